"""Entries of `log_history` from rows, and callbacks that are called with them."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import EarlyStoppingCallback
from transformers.trainer_callback import TrainerCallback, TrainerState

from rhymeflow.trainer.callbacks import Callbacks, History, Rhythm


def row(version: int) -> dict[str, float]:
    return {"loss": float(version), "learning_rate": version / 8, "num_tokens": 100.0 * version}


def test_an_entry_has_means_and_the_latest_of_what_is_counted():
    history = History(Rhythm(every=2, steps_per_version=3, versions_per_epoch=4.0))
    made = [history.trained(version, row(version)) for version in (1, 2, 3, 4)]
    assert made[0] is None
    assert made[1] == {
        "loss": 1.5, "learning_rate": 0.25, "num_tokens": 200.0, "step": 6, "epoch": 0.5,
    }  # fmt: skip
    assert history.entries == [made[1], made[3]]


@given(st.integers(0, 4), st.booleans(), st.lists(st.booleans(), max_size=12))
def test_rows_read_afterwards_give_the_same_entries(every, has_first, evaluated):
    rhythm = Rhythm(every, has_first)
    live, rows = History(rhythm), {}
    for version, is_evaluated in enumerate(evaluated, 1):
        live.trained(version, row(version))
        rows[version] = {"step": version, "time": 1.0, **row(version)}
        if is_evaluated:
            live.evaluated(version, {"eval/reward": 0.5, "eval/a/b/reward": 1.0})
            rows[version] |= {"eval/reward": 0.5, "eval/a/b/reward": 1.0}
    afterwards = History(rhythm)
    afterwards.read(rows)
    assert afterwards.entries == live.entries
    trained = [each["step"] for each in live.entries if "loss" in each]
    every_or_never = [v for v in range(1, len(evaluated) + 1) if every and v % every == 0]
    first = [1] if has_first and every and evaluated and 1 not in every_or_never else []
    assert trained == first + every_or_never


def test_shares_are_of_the_time_of_all_steps_and_of_the_rest_what_is_finite_has_a_mean():
    history = History(Rhythm(every=4))
    for version, value in enumerate((None, 2.0, math.nan, 4.0), 1):
        row = {"loss": value, "kl": None, "grad_norm": math.inf}
        seconds, idle = 10.0 - version, None if version == 4 else 0.1 * version
        row |= {"step_time": seconds, "idle/learner": idle, "idle/rollout": None}
        history.trained(version, row)
    (entry,) = history.entries
    assert entry["idle/rollout"] is None
    assert (entry["loss"], entry["kl"], entry["grad_norm"]) == (3.0, None, None)
    assert entry["idle/learner"] == pytest.approx((9 * 0.1 + 8 * 0.2 + 7 * 0.3) / (9 + 8 + 7))


def test_callbacks_see_the_state_of_their_own_step():
    """Also of a checkpoint and an evaluation that are ready two steps later."""
    seen: list[tuple[Any, ...]] = []

    class Records(TrainerCallback):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("on_"):
                return super().__getattribute__(name)
            return lambda args, state, control, **more: seen.append(
                (name.removeprefix("on_"), state.global_step, state.epoch)
            )

    rhythm = Rhythm(steps_per_version=2, versions_per_epoch=2.0)
    told = Callbacks([Records()], None, TrainerState(max_steps=6), rhythm, lambda: None)
    told.begin({})
    told.evaluated(0, {"eval/reward": 1.0})
    for version in (1, 2):
        told.step_ended(version, {"loss": 1.0})
    told.evaluated(1, {"eval/reward": 0.5})
    told.saved(1, "step-1")
    told.step_ended(3, {"loss": 1.0})
    told.saved(3, "step-3")
    told.end()
    assert seen == [
        ("train_begin", 0, 0.0), ("epoch_begin", 0, 0.0), ("step_begin", 0, 0.0),
        ("log", 0, 0.0), ("evaluate", 0, 0.0),
        ("step_end", 2, 0.5), ("log", 2, 0.5), ("step_begin", 2, 0.5),
        ("step_end", 4, 1.0), ("log", 4, 1.0), ("epoch_end", 4, 1.0),
        ("epoch_begin", 4, 1.0), ("step_begin", 4, 1.0),
        ("log", 2, 0.5), ("evaluate", 2, 0.5), ("save", 2, 0.5),
        ("step_end", 6, 1.5), ("log", 6, 1.5), ("save", 6, 1.5),
        ("epoch_end", 6, 1.5), ("log", 6, 1.5), ("train_end", 6, 1.5),
    ]  # fmt: skip
    assert [each["step"] for each in told.state.log_history] == [0, 2, 4, 2, 6]


@pytest.mark.parametrize(
    ("wanted", "stops", "saves", "warns"),
    [
        ("should_training_stop", True, False, False),
        ("should_save", False, True, False),
        ("should_evaluate", False, False, True),
        (None, False, False, False),
    ],
)
def test_what_the_control_asks_for(wanted, stops, saves, warns):
    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if wanted is not None:
                setattr(control, wanted, True)

    made = Callbacks([Asks()], None, TrainerState(max_steps=4), Rhythm(), lambda: None)
    made.begin({})
    with pytest.warns(match="eval_steps says when") if warns else nullcontext():
        made.step_ended(1, row(1))
    assert (made.stop_asked, made.save_asked) == (stops, saves)


@pytest.mark.parametrize("resumed", [0, 2])
def test_early_stopping_compares_with_the_best_evaluation_after_the_start(resumed):
    args = SimpleNamespace(
        metric_for_best_model="eval_reward", greater_is_better=True, load_best_model_at_end=True,
        eval_strategy="steps",
    )  # fmt: skip
    values = {1: 0.5, 2: 0.75, 3: 0.5, 4: 0.75}
    rows = {version: {**row(version), "eval/reward": values[version]} for version in (1, 2)}
    stops = EarlyStoppingCallback(early_stopping_patience=2)
    told = Callbacks([stops], args, TrainerState(max_steps=9), Rhythm(), lambda: None)
    told.begin({version: rows[version] for version in range(1, resumed + 1)})
    if not resumed:
        told.evaluated(0, {"eval/reward": 2.0})
    for version in range(resumed + 1, 5):
        assert not told.stop_asked
        told.evaluated(version, {"eval/reward": values[version]})
    assert told.stop_asked
    assert (told.state.best_metric, told.state.best_global_step) == (0.75, 2)


def test_names_of_suites_may_have_slashes():
    metrics = {"eval/math/easy/avg@1": 0.5, "eval/math/easy/pass@2": 0.7, "eval/reward": 0.1}
    entry = History(Rhythm()).evaluated(3, metrics)
    assert {"eval_math/easy_reward", "eval_math/easy_pass@2", "eval_reward"} <= set(entry)
