"""From the configuration to the coordinator's plan and rules."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rhymeflow import build, profiles
from rhymeflow.config import Config, DataConfig, LearnerConfig, RolloutConfig, ScheduleConfig
from rhymeflow.config.load import dump_config, parse_config
from rhymeflow.core.histopipe.pipeline import Pipeline
from rhymeflow.core.strategies.base import NoLayout
from rhymeflow.core.strategies.routing import waterfall
from rhymeflow.core.strategies.schedules import ROUTING, SCHEDULES, Bundle
from rhymeflow.core.strategies.sync import when_idle
from rhymeflow.utils.bounds import FIXED_BOUNDS
from tests.refused import refusal


def rules(**values: Any) -> Config:
    return Config(schedule=ScheduleConfig(**values))


# -- the plan -------------------------------------------------------------------------------------


def test_every_number_arrives():
    config = Config(
        learner=LearnerConfig(max_steps=7, groups_per_batch=6),
        rollout=RolloutConfig(num_generations=5),
        schedule=ScheduleConfig(
            max_staleness=3, batch_order="requested", extra_groups=2, extra_generations=1,
            filter_zero_variance=True,
            on_stuck="retry",
        ),
    )  # fmt: skip
    made = build.plan(config)
    assert asdict(made) == {
        "num_batches": 7, "groups_per_batch": 6, "num_generations": 5, "max_length": 512,
        "max_staleness": 3, "batch_order": "requested", "accumulate_early": True,
        "eval_steps": {"held_out": config.run.eval_steps}, "extra_groups": 2,
        "extra_generations": 1, "filter_zero_variance": True, "max_filtered": 24,
        "on_stuck": "retry", "stuck_threshold": 1, "max_retries": 2,
    }  # fmt: skip


def test_suites_are_evaluated_as_often_as_each_says():
    assert build.plan(Config(data=DataConfig(eval_size=0))).eval_steps == {}, "nothing is held out"
    suites = [{"name": "a", "steps": 3}, {"name": "b"}, {"name": "c", "steps": 1}]
    config = Config.model_validate({"eval": {"suites": suites}, "run": {"eval_steps": 7}})
    assert build.plan(config).eval_steps == {"held_out": 7, "a": 3, "c": 1}


@pytest.mark.parametrize(
    "learner",
    [
        {"num_iterations": 2},
        {"num_minibatches": 2, "groups_per_batch": 4},
        {"scale_rewards": "batch"},
        {"multi_objective_aggregation": "normalize_then_sum"},
    ],
    ids=str,
)
def test_a_learner_that_needs_the_whole_batch_waits_for_it(learner):
    assert not build.plan(Config.model_validate({"learner": learner})).accumulate_early
    name = next(iter(learner))
    with pytest.raises(ValueError, match=f"accumulate_early = true: with learner.{name} = "):
        Config.model_validate({"learner": learner, "schedule": {"accumulate_early": True}})


# -- the rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_bundle_by_name(name):
    made, bundle = build.schedule(rules(name=name)), SCHEDULES[name]
    for piece in ("admission", "routing", "sync", "on_pull", "migration"):
        assert getattr(made, piece) == getattr(bundle, piece)
    assert made.settings.throughput_ratio == bundle.throughput_ratio
    assert (made.layout is NoLayout) == (bundle.layout is None)
    plan = build.plan(rules(name=name))
    assert plan.batch_order == bundle.batch_order
    assert plan.max_staleness == FIXED_BOUNDS.get(name, 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rules_in_force_are_all_named_and_make_the_same_schedule(name):
    given = rules(name=name, on_pull="keep")
    named = build.rules_in_force(given)
    assert None not in named.model_dump().values()
    assert (named.name, named.on_pull) == (name, "keep")
    assert parse_config(dump_config(given.model_copy(update={"schedule": named}))).schedule == named
    found = build.schedule(given.model_copy(update={"schedule": named}))
    expected = build.schedule(given)
    layouts = found.layout, expected.layout
    assert replace(found, layout=NoLayout) == replace(expected, layout=NoLayout)
    assert type(layouts[0]()) is type(layouts[1]())
    assert build.rules_in_force(given.model_copy(update={"schedule": named})) == named


def test_pieces_by_name():
    made = build.schedule(rules(name="bounded", routing="waterfall", on_pull="keep"))
    assert (made.routing, made.sync, made.on_pull) == (waterfall, when_idle, "keep")
    pipeline = build.schedule(rules(name="histopipe"))
    assert isinstance(pipeline.layout(), Pipeline)
    assert pipeline.layout() is not pipeline.layout(), "each run has one of its own"


def test_strategies_weigh_with_the_cost_model_and_the_bound():
    made = build.schedule(rules(cost_model="qwen2.5-14b-h20")).settings
    assert made.cost == profiles.load("qwen2.5-14b-h20").cost(1)
    made = build.schedule(rules(name="rhymeflow", max_staleness=3)).settings
    assert made.max_slowdown == 1.5, "stragglers may be slower the further the bound"


def first_come(view, key=None):
    return []


partly_given = partial(first_come, key=None)


def no_arguments():
    return []


def test_functions_of_the_users(tmp_path):
    made = build.schedule(rules(routing="tests.test_build.first_come"))
    assert made.routing is first_come
    path = tmp_path / "my_rules.py"
    path.write_text("def never(instance, view):\n    return False\n")
    assert build.schedule(rules(sync=f"{path}:never")).sync(None, None) is False


NO_RULES = [
    # what is given, what is said
    (
        {"routing": "watrefall"},
        f'schedule.routing: given "watrefall", allowed: {", ".join(ROUTING)}, or a function of '
        "your own, path/to/file.py:function or dotted; did you mean waterfall?",
    ),
    ({"sync": "waterfall"}, "schedule.sync: "),
    ({"migration": "rebalnce"}, "did you mean rebalance?"),
    ({"sync": "no/such.py:f"}, "schedule.sync: no/such.py:f: there is no file"),
    (
        {"migration": "tests.test_build.no_arguments"},
        "schedule.migration: tests.test_build.no_arguments: cannot be called as f(view)",
    ),
    ({"routing": "tests.test_build.first_com"}, "there is no 'first_com'"),
    ({"cost_model": "demo-cpo"}, "did you mean"),
    ({"routing": "os.system"}, "schedule.routing: os.system: comes with Python, and is no rule"),
    ({"routing": "builtins.int"}, "comes with Python, and is no rule"),
]


@pytest.mark.parametrize(("given", "said"), NO_RULES)
def test_what_is_no_rule(given, said):
    assert said in refusal(build.schedule, rules(**given))


def test_what_could_not_be_learned_from_or_is_a_rule_after_all():
    greedy = Config.model_validate({"rollout": {"temperature": 0}})
    assert "rollout.temperature = 0: " in refusal(build.schedule, greedy)
    bound = "tests.test_build.partly_given"  # made by functools, but of a function of the user's
    assert build.schedule(rules(routing=bound)).routing is partly_given


# -- docs/schedules.md ----------------------------------------------------------------------------

PAGE = (Path(__file__).parent.parent / "docs" / "schedules.md").read_text(encoding="utf-8")


def table_of_schedules() -> str:
    """As it is to be on the page."""

    def cell(piece: Any) -> str:
        if isinstance(piece, bool):
            return "yes" if piece else "no"
        return "–" if piece is None else str(getattr(piece, "__name__", piece))

    rows = [["`schedule.name`", *Bundle._fields, "bound"], ["---"] * (len(Bundle._fields) + 2)]
    for name, bundle in SCHEDULES.items():
        bound = str(rules(name=name).schedule.bound) if name in FIXED_BOUNDS else "`max_staleness`"
        rows.append([f"`{name}`", *map(cell, bundle), bound])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_the_page_has_the_table_of_schedules():
    assert table_of_schedules() in PAGE, f"it is to be\n{table_of_schedules()}"


def test_groups_at_a_time_are_what_the_bound_allows_unless_it_is_given():
    def inflight(**rules_: Any) -> int:
        return build.schedule(rules(**rules_)).max_inflight_groups

    batch = rules().learner.groups_per_batch
    for name in ("partial", "staleflow", "rhymeflow"):
        assert inflight(name=name, max_staleness=3) == 4 * batch, "as many as the bound allows"
    assert (
        inflight(name="partial", max_staleness=3, max_inflight_batches=1.5, extra_groups=2)
        == (batch + 2) * 1.5
    )
