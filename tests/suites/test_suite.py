"""Which prompts a suite has, what its configuration is; which suites a run evaluates, what judges
them, and what its best checkpoint can be best by."""

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from rhymeflow import check
from rhymeflow.config import Config
from rhymeflow.config.load import build_config, read_config
from rhymeflow.data.load import load_prompts
from rhymeflow.runtime.resume_options import check_change
from rhymeflow.suites.figures import JudgedAnswer, figures, figures_of, headlines, metrics_of
from rhymeflow.suites.suite import (
    RUN,
    Suite,
    check_best_metric,
    chosen,
    environment_sections,
    functions_of,
    of_run,
    prompts_of,
    reward_sections,
    uses_environments,
)
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
def of_a_file(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(40)))
    return build_config({"data.source": str(rows)}, where="T")


def test_rows_that_are_trained_on_are_never_held_out(of_a_file):
    assert texts(suite(of_a_file)) == ["p36", "p37", "p38", "p39"]
    assert texts(suite(of_a_file, size=2)) == ["p36", "p37"]
    message = refusal(prompts_of, suite(of_a_file, size=5))
    assert "size = 5, but the held-out set has 4 rows" in message


def test_a_file_of_its_own_is_taken_whole(of_a_file, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("prompt\na\nb\nc\n")
    assert texts(suite(of_a_file, source=str(other))) == ["a", "b", "c"]
    assert texts(suite(of_a_file, source=str(other), size=1)) == ["a"]
    for fields, said in (
        ({"size": 4}, f"size = 4, but {other} has 3 rows"),
        ({"options": {"a": 1}}, "options are for generators"),
    ):
        assert said in refusal(prompts_of, suite(of_a_file, source=str(other), **fields))


def test_problems_of_the_runs_generator_are_those_it_holds_out():
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


def test_sampling_is_the_runs_unless_the_suite_says_otherwise():
    given = {"run.eval_temperature": 0.3, "rollout.temperature": 0.8, "top_p": 0.9}
    config = build_config(given, where="T")
    assert suite(config).config.rollout.temperature == 0.3
    assert suite(config, n=2).config.rollout.temperature == 0.8
    found = suite(config, n=2, temperature=0.0, top_k=5, max_completion_length=7).config.rollout
    assert (found.temperature, found.top_p, found.top_k) == (0.0, 0.9, 5)
    assert found.max_completion_length == 7


def test_environments_stand_for_the_classes_of_the_run():
    config = read_config("guess")
    assert suite(config).config.environment == config.environment
    found = suite(config, environments=[], functions=[{"function": "regex"}]).config
    assert not found.environment.is_used
    assert found.environment.max_turns == 6
    assert [each.function for each in found.reward.functions] == ["regex"]


MATH = {"name": "math", "n": 3, "steps": 2, "functions": [{"function": "math_verify"}]}
GAME = {"name": "game", "steps": 5, "environments": [{"environment": "recipe:guess"}]}
OFFLINE = {"name": "offline", "functions": [{"function": "a.b"}]}


def config(*suites: dict[str, Any], **sections: dict[str, Any]) -> Config:
    return Config.model_validate({"eval": {"suites": list(suites)}, **sections})


def test_those_that_say_how_often_and_the_held_out_prompts():
    run = {"run": {"eval_temperature": 0.5}, "rollout": {"temperature": 0.9}}
    found = of_run(config(MATH, OFFLINE, GAME, **run))
    assert [each.name for each in found] == ["held_out", "math", "game"]
    assert [each.config.rollout.temperature for each in found] == [0.5, 0.9, 0.5]
    assert [each.name for each in of_run(config(GAME, data={"eval_size": 0}))] == ["game"]


def test_the_held_out_prompts_are_not_evaluated_twice():
    with pytest.raises(ValidationError, match=r"run\.eval_steps .* own suite held_out"):
        config({"name": "held_out", "steps": 1})
    assert [each.name for each in of_run(config({"name": "held_out"}))] == ["held_out"]


def test_functions_and_environments_of_all_have_their_places():
    other = {"name": "other", "steps": 1, "functions": [{"function": "x.y"}, {"function": "x.z"}]}
    made = config(OFFLINE, MATH, GAME, other)
    functions = [f.function for each in reward_sections(made).values() for f in each]
    assert functions == ["exact_match", "math_verify", "x.y", "x.z"]
    places = {name: list(functions_of(made, name)) for name in (RUN, "held_out", "game")}
    assert set(map(tuple, places.values())) == {(0,)}, "what has none of its own has the run's"
    assert list(functions_of(made, "math")) == [1]
    assert list(functions_of(made, "other")) == [2, 3]
    assert list(environment_sections(made)) == [RUN, "game"]
    assert uses_environments(made)
    assert not uses_environments(config(MATH))


def test_what_the_best_checkpoint_can_be_best_by():
    """Exactly what is written when its suite is evaluated, and is better if it is more."""
    answers = [[JudgedAnswer(1.0, 3, False, "1")] * 3]
    written = metrics_of("math", figures(answers, 1.0))
    for name in written:
        made = config(MATH, run={"best_metric": name})
        if name.rpartition("/")[2] in ("mean_length", "clipped_ratio"):
            said = refusal(check_best_metric, made)
            assert said.startswith("run.best_metric: given 'eval/math/")
        else:
            check_best_metric(made)
            assert made.run.best_suite == "math"
    named = config(MATH | {"name": "math/easy"}, run={"best_metric": "eval/math/easy/avg@3"})
    check_best_metric(named)
    assert named.run.best_suite == "math/easy"
    assert list(figures_of(metrics_of("math/easy", figures(answers, 1.0)))) == ["math/easy"]
    assert config().run.best_suite == "held_out"
    assert metrics_of("held_out", {"avg@1": 0.5})["eval/reward"] == 0.5
    check_best_metric(config(data={"eval_size": 0}))


def test_a_best_metric_that_is_never_found_is_refused_before_a_run_and_when_it_is_resumed():
    right = config(MATH, GAME, data={"size": 9})
    wrong = right.changed(run={"best_metric": "eval/math/pass@4"})
    what = (
        r"^run\.best_metric: given 'eval/math/pass@4', and this run has eval/reward, "
        r"eval/held_out/avg@1, .*eval/math/maj@3, eval/game/avg@1, eval/game/pass@1.*math/"
    )
    assert re.search(what, refusal(check.before_start, wrong))
    assert re.search(what, refusal(check_change, right, wrong, 0))


def test_a_suite_may_come_or_go_or_be_due_at_other_times_when_a_run_is_resumed():
    before = config(MATH, GAME)
    check_change(before, config(GAME | {"steps": 7}, OFFLINE), 0)
    message = refusal(check_change, before, config(MATH | {"n": 4}, GAME), 0)
    assert message.startswith("eval.suites: math: only `steps` can be changed")


def test_what_is_shown_of_a_row_of_metrics():
    row = {"reward": 1.0, "eval/reward": 0.5, "step": 3, "clip_ratio/region_mean": 0.1}
    row |= metrics_of("held_out", {"avg@1": 0.5})
    row |= metrics_of("math", {"avg@3": 0.4, "pass@1": 0.1, "pass@3": 0.7, "mean_length": 9.0})
    row |= metrics_of("game", {"avg@1": 0.2, "pass@1": 0.3})
    assert headlines(row) == {"math avg@3": 0.4, "math pass@3": 0.7, "game avg@1": 0.2}
    assert figures_of(row)["game"] == {"avg@1": 0.2, "pass@1": 0.3}
