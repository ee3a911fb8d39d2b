"""Which prompts a suite has, and what its configuration is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rhymeflow.config import Config
from rhymeflow.config.load import build_config, read_config
from rhymeflow.data.load import load_prompts
from rhymeflow.suites.suite import Suite, chosen, prompts_of
from tests.refused import refusal


def suite(config: Config, **fields: Any) -> Suite:
    given = {"eval.suites": [{"name": "it", **fields}]}
    (found,) = chosen(build_config(given, config, where="T"), ())
    return found


def texts(found: Suite) -> list[Any]:
    prompts = prompts_of(found)
    assert [each.row for each in prompts] == list(range(len(prompts)))
    return [each.prompt for each in prompts]


@pytest.fixture
def of_a_file(tmp_path: Path) -> Config:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(40)))
    return build_config({"data.source": str(rows)}, where="T")


def test_rows_that_are_trained_on_are_never_held_out(of_a_file: Config) -> None:
    assert texts(suite(of_a_file)) == ["p36", "p37", "p38", "p39"]
    assert texts(suite(of_a_file, size=2)) == ["p36", "p37"]
    message = refusal(prompts_of, suite(of_a_file, size=5))
    assert "size = 5, but what is held out has 4 rows" in message


def test_a_file_of_its_own_is_taken_whole(of_a_file: Config, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("prompt\na\nb\nc\n")
    assert texts(suite(of_a_file, source=str(other))) == ["a", "b", "c"]
    assert texts(suite(of_a_file, source=str(other), size=1)) == ["a"]
    for fields, said in (
        ({"size": 4}, f"size = 4, but {other} has 3 rows"),
        ({"options": {"a": 1}}, "options are for generators"),
    ):
        assert said in refusal(prompts_of, suite(of_a_file, source=str(other), **fields))


def test_problems_of_the_runs_generator_are_those_it_holds_out() -> None:
    config = read_config("demo")
    train, held_out = load_prompts(config.data, config.run.seed)
    expected = [each.prompt for each in held_out]
    assert texts(suite(config)) == expected
    assert texts(suite(config, source="recipe:demo", size=5)) == expected[:5]
    more = texts(suite(config, size=200))
    assert len(set(more)) == 200
    assert not {each.prompt for each in train} & set(more)
    options = {"min_terms": 20, "median_terms": 21}
    found = texts(suite(config, source="recipe:demo", options=options))
    assert len(found) == 64
    assert all(len(text.split()) >= 20 for text in found)


def test_sampling_is_the_runs_unless_the_suite_says_otherwise() -> None:
    given = {"run.eval_temperature": 0.3, "rollout.temperature": 0.8, "top_p": 0.9}
    config = build_config(given, where="T")
    assert suite(config).config.rollout.temperature == 0.3
    assert suite(config, n=2).config.rollout.temperature == 0.8
    found = suite(config, n=2, temperature=0.0, top_k=5, max_completion_length=7).config.rollout
    assert (found.temperature, found.top_p, found.top_k) == (0.0, 0.9, 5)
    assert found.max_completion_length == 7


def test_environments_stand_for_the_classes_of_the_run() -> None:
    config = read_config("guess")
    assert suite(config).config.environment == config.environment
    found = suite(config, environments=[], functions=[{"function": "regex"}]).config
    assert not found.environment.is_used
    assert found.environment.max_turns == 6
    assert [each.function for each in found.reward.functions] == ["regex"]
