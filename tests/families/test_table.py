"""The table of types has those of the cases; others are refused before anything is loaded."""

import json
import runpy
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rhymeflow.config import ModelConfig
from rhymeflow.models import families
from rhymeflow.models.families import FAMILIES
from rhymeflow.models.source import check_files
from tests.characters import make_tokenizer
from tests.families.cases import DENSE, EXPERTS, GROUPS, NEWER, OTHER, WINDOWS, save
from tests.refused import refusal

ROOT = Path(__file__).parents[2]


def test_each_type_has_a_case_and_each_case_a_name_of_its_own():
    names = [name for group in GROUPS for name in group]
    assert len(set(names)) == len(names)
    assert {name.split()[0] for name in names} == set(FAMILIES) - NEWER
    assert set(FAMILIES) - NEWER <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not NEWER & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_other_types_are_refused_by_their_name_from_config_json_alone(tmp_path):
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        message = refusal(check_files, ModelConfig(name=str(tmp_path)))
        if model_type in FAMILIES:
            assert "holds no weights" in message
        else:
            assert f"models of type '{model_type}' are not supported" in message


def test_a_dry_run_refuses_what_the_engine_does_not_run_and_names_another(
    refused, tmp_path, capsys
):
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neo"}')
    dry = ("train", "demo", "--model.name", str(tmp_path), "--dry-run")
    assert "models of type 'gpt_neo' are not supported" in refused(*dry)
    save("lfm2", tmp_path)
    make_tokenizer("0123456789+", 100).save_pretrained(tmp_path)
    capsys.readouterr()  # how saving goes
    message = refused(*dry)
    assert "a model of type 'lfm2' has layers that carry a state" in message
    assert "set rollout.engine = 'vllm'" in message
    save("kimi_linear", tmp_path)
    capsys.readouterr()
    message = refused(*dry)
    assert "nor does vLLM run it, as it has latent attention" in message
    assert message.endswith("`rhymeflow sft` alone trains it")


@pytest.mark.parametrize(
    ("fields", "carries"),
    [
        ({"model_type": "llama"}, False),
        ({"model_type": "llama", "layer_types": ["linear_attention"]}, False),
        ({"model_type": "jamba"}, True),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}, True),
        ({"model_type": "granitemoehybrid", "layer_types": ["full_attention"]}, False),
        ({"model_type": "nemotron_h", "layers_block_type": ["mlp", "linear_attention"]}, True),
        ({"model_type": "nemotron_h", "layers_block_type": ["mlp", "full_attention"]}, False),
        ({"model_type": "qwen3_5", "text_config": {"layer_types": ["full_attention"]}}, False),
        ({"model_type": "qwen3_5", "text_config": {"layer_types": ["linear_attention"]}}, True),
    ],
    ids=str,
)
def test_whether_a_model_carries_a_state_is_in_its_configuration(fields, carries):
    assert families.carries_state(fields) == carries


def test_the_mismatch_of_each_model_that_the_engine_runs_is_recorded():
    report = json.loads((ROOT / "benchmarks/results/families.json").read_text())
    runs = [*DENSE, *WINDOWS, *EXPERTS, "granitemoehybrid attention alone"]
    runs += [name for name in OTHER if FAMILIES[name.split()[0]].not_native is None]
    recorded = {row["model"] for row in report["rows"]}
    assert recorded - NEWER == set(runs)


def test_the_page_is_that_of_the_table(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["models_page.py", "--check"])
    runpy.run_path("scripts/models_page.py", run_name="__main__")
