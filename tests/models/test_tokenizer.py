"""A tokenizer is the one that `AutoTokenizer` finds, and comes without what models need."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

from transformers import AutoTokenizer

from rhymeflow import recipes
from rhymeflow.config import ModelConfig
from rhymeflow.models.tokenizer import load_tokenizer

CODE = """
import sys
from rhymeflow.config import ModelConfig
from rhymeflow.models.tokenizer import load_tokenizer
load_tokenizer(ModelConfig(name="recipe:demo"))
print(*{"transformers.modeling_utils", "torch._dynamo", "numba"} & set(sys.modules))
"""


def same(directory) -> bool:
    ours, theirs = (
        load_tokenizer(ModelConfig(name=directory)),
        AutoTokenizer.from_pretrained(directory),
    )
    texts = ("a3 b4?", " =12")
    return type(ours) is type(theirs) and all(ours.encode(t) == theirs.encode(t) for t in texts)


def test_it_is_what_auto_tokenizer_finds(tmp_path) -> None:
    demo = recipes.directory("demo")
    assert same(str(demo))
    unnamed = tmp_path / "unnamed"
    shutil.copytree(demo, unnamed)
    file = unnamed / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    del fields["tokenizer_class"]
    file.write_text(json.dumps(fields))
    assert same(str(unnamed))


def test_it_loads_no_model_code() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
