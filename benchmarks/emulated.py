"""Real learning under the timing of clusters: seconds of the cluster to a held-out reward.

Each run is real (docs/emulation.md), with each schedule at the split of devices where the simulator
finds it fastest, on the lengths of a run of that setting. Versions are evaluated afterwards,
outside of the run, by answers sampled at temperature 1. With `--record` runs accumulate.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks import harness
from benchmarks.schedules import Side
from benchmarks.training.train import QUIET, train, training_rows
from rhymeflow import emulation
from rhymeflow.config import Config
from rhymeflow.config.load import build_config, read_config
from rhymeflow.core.events import InstanceJoined, LearnerReady, VersionPublished
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.runtime.controller import ROUND_SECONDS
from rhymeflow.sim.simulate import run as simulate
from rhymeflow.sim.workload import RecordedWorkload
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, checkpoints_up_to
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS
from rhymeflow.utils.bounds import FIXED_BOUNDS
from rhymeflow.workers.rollout import STATUS_SECONDS

RUNS, SPLITS = (harness.RESULTS / f"emulated-{name}.jsonl" for name in ("runs", "splits"))


class Setting(NamedTuple):
    profile: str
    devices: int
    seeds: int


SETTINGS = {
    "a": Setting("qwen3-30b-a3b-h20", 16, 5),
    "b": Setting("qwen3-30b-a3b-h20", 32, 3),
    "c": Setting("qwen2.5-14b-h20", 16, 3),
    "d": Setting("qwen3-14b-h800", 16, 3),
}
SCALE, SPLIT_SCALE = 80.0, 1.5
"""Seconds of the cluster in one of this machine where 16 instances generate; so many times as many
where fewer do, beside a learner."""
LATE, TRIES, SLOWER = 0.02, 4, 0.7
"""A run whose work takes longer by a greater share is not counted, but made again at a scale of so
much of the last one, at most so often in all."""
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "tree": {"drafting.shape": "tree"},
    "32 tokens": {"drafting.max_draft": 32},
    "tree, 32 tokens": {"drafting.shape": "tree", "drafting.max_draft": 32},
    "by reward": {"drafting.ranking": "reward"},
    "by frequency": {"drafting.ranking": "frequency"},
    "half of the noise rhymes": {"rollout.rhyming_noise": 0.5},
    "all noise rhymes": {"rollout.rhyming_noise": 1.0},
}
VARIANT_STEPS = 16
"""After the first epoch, of a run with a way of drafting."""
CHECKED_STEPS = 8
"""Of runs that check the scale, after the first epoch."""
STEPS, SAVED_EVERY, FIRST_SAVED, DRAWN_EVERY = 40, 2, 16, 4
"""Of a run; versions that are evaluated: every so many, from there on until the goal; for the
picture, every so many of the whole run."""
GOAL, ANSWERS = 0.80, 4
"""Held-out reward, and how many answers to each held-out prompt it is the mean of."""
SKIPPED = 4
"""Steps at the beginning without which speed is measured: the first epoch has no drafts."""
SPLIT_STEPS = 16
"""Of the run whose lengths splits are searched on, and of simulations there."""
REWARD_SECONDS = 0.006
"""Of this machine, from a response's end to its reward, in the median."""
LONG = 4.0
"""A response of so many mean lengths is long: a batch waits for it."""


BASE, DRAFTED = Side("synchronous", 0, has_drafts=False), Side("synchronous", 0)
OURS = Side("rhymeflow", 1)
DRAWN = BASE, DRAFTED, OURS
SIDES = (
    *(BASE, DRAFTED, OURS, Side("one_step", 1), Side("histopipe", 1)),
    *(Side("staleflow", 1), Side("rhymeflow", 3), Side("staleflow", 3)),
)


class Run(msgspec.Struct, frozen=True):
    """What one run found; times in seconds of the cluster, from when it was ready."""

    setting: str
    side: Side
    seed: int
    train_devices: int
    scale: float
    published: list[float]
    """When each version was, from 1."""
    rewards: dict[int, float]
    """Held-out, by version: until one is at the goal; of `DRAWN` sides, over the whole run."""
    tokens_per_iteration: float
    """Without the first epoch."""
    long_tokens_per_iteration: float
    idle_rollout: float
    idle_learner: float
    learner_behind: float
    rollout_behind: float
    simulated: list[float]
    """Steps per second, idle share of rollout and of the learner, in the simulation of this run."""


class Split(msgspec.Struct, frozen=True):
    """The fastest split of a setting's devices for a side, by the simulator."""

    setting: str
    side: Side
    train_devices: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_choice(parser, "--setting", SETTINGS)
    what = "schedules (default), a check of the scale, or ways of drafting"
    parser.add_argument("--part", choices=list(PARTS), default="schedules", help=what)
    what = "runs of each side (default: those of the setting; 0: report what is recorded)"
    parser.add_argument("--seeds", type=harness.whole(0), metavar="N", help=what)
    what = f"seconds of the cluster in one of this machine, for 16 instances (default {SCALE:g})"
    parser.add_argument("--scale", type=float, default=SCALE, metavar="S", help=what)


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows, found = PARTS[args.part](args)
    name = "emulated" if args.part == "schedules" else f"emulated-{args.part}"
    return harness.report(name, rows, found, args, notes())


def schedules(args: argparse.Namespace) -> harness.Found:
    """Every schedule in each setting, with all runs that are recorded."""
    chosen = args.setting or ["a"]
    runs = harness.lines(RUNS, Run)
    for name in chosen:
        seeds = SETTINGS[name].seeds if args.seeds is None else args.seeds
        for seed in range(seeds):
            for side in SIDES if seed % 2 == 0 else reversed(SIDES):
                if not any((e.setting, e.side, e.seed) == (name, side, seed) for e in runs):
                    runs.append(in_time(name, side, seed, args.scale, runs))
                    if args.record:
                        harness.add_line(RUNS, runs[-1])
    rows = [row for name in chosen for row in table(name, runs)]
    return rows, targets(rows)


class Short(NamedTuple):
    """What a short run found after its first epoch."""

    seconds: float
    """Of a step."""
    tokens_per_iteration: float
    long_tokens_per_iteration: float
    late: float


def short(config: Config, steps: int) -> Short:
    with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
        run_dir = Path(folder) / "run"
        train(
            config.changed(learner={"max_steps": SKIPPED + steps}, run={"output_dir": str(run_dir)})
        )
        published, rows = published_at(run_dir), training_rows(run_dir)[SKIPPED:]
        late = max(behind_of(rows).values())
        seconds = (published[-1] - published[SKIPPED - 1]) / steps
        return Short(seconds, *drafts_of(run_dir), late)


def half_scale(args: argparse.Namespace) -> harness.Found:
    """Seconds of a step of the cluster against those at half the scale, where this machine has
    twice the time."""
    rows = []
    for name in args.setting or ["a"]:
        for side in (BASE, DRAFTED, OURS):
            training = split_of(name, side, args.scale)
            scale = scale_of(name, training, args.scale)
            whole, half = (
                short(configure(name, side, 0, training, Path("run"), each), CHECKED_STEPS)
                for each in (scale, scale / 2)
            )
            row = {"setting": name, "side": str(side), "scale": round(scale)}
            row |= {"s/step": round(whole.seconds, 1), "at half": round(half.seconds, 1)}
            rows.append(row | {"over half": round(whole.seconds / half.seconds, 3)})
            print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    worst = max(abs(row["over half"] - 1) for row in rows)
    return rows, [harness.at_most("emulated/step time against half the scale", worst, LATE)]


def drafting(args: argparse.Namespace) -> harness.Found:
    """Ways of drafting where verifying is nearly free, against the default one."""
    rows = []
    for name in args.setting or ["a"]:
        for side in (DRAFTED, OURS):
            training = split_of(name, side, args.scale)
            scale = scale_of(name, training, args.scale)
            base = 0.0
            for variant, fields in VARIANTS.items():
                config = configure(name, side, 0, training, Path("run"), scale)
                config = build_config(fields, base=config, where=variant)
                found = short(config, VARIANT_STEPS)
                base = base or found.seconds
                row = {"setting": name, "side": str(side), "drafting": variant}
                row |= {"s/step": round(found.seconds, 1), "gain": round(base / found.seconds, 3)}
                row["tokens/iteration"] = round(found.tokens_per_iteration, 2)
                row["long"] = round(found.long_tokens_per_iteration, 2)
                rows.append(row | {"behind": round(found.late, 3)})
                print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    return rows, []


PARTS = {"schedules": schedules, "scale": half_scale, "drafting": drafting}


def configure(
    name: str, side: Side, seed: int, training: int | None, run_dir: Path, scale: float = SCALE
) -> Config:
    setting = SETTINGS[name]
    fields = {
        **QUIET,
        "data.eval_size": "128",
        "emulation.profile": setting.profile,
        "emulation.devices": str(setting.devices),
        "emulation.time_scale": str(scale),
        "schedule.name": side.schedule,
        "schedule.max_staleness": str(side.bound),
        "drafting.window": "cost" if side.has_drafts else "off",
        "learner.max_steps": str(STEPS),
        "run.save_steps": str(SAVED_EVERY),
        "run.save_total_limit": "0",
        "run.seed": str(seed),
        "run.output_dir": str(run_dir.resolve()),
    }
    if training is not None:
        fields["emulation.train_devices"] = str(training)
    return read_config("emulated", fields)


# -- splits ----------------------------------------------------------------------------------------


def split_of(name: str, side: Side, scale: float) -> int | None:
    """The devices that train; None: all devices do both in turn."""
    if FIXED_BOUNDS.get(side.schedule, side.bound) == 0:
        return None
    known = {(e.setting, e.side): e.train_devices for e in harness.lines(SPLITS, Split)}
    if (name, side) not in known:
        with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
            config = configure(name, DRAFTED, 100, None, Path(folder) / "lengths", scale)
            config = config.changed(learner={"max_steps": SPLIT_STEPS})
            train(config)
            lengths = RecordedWorkload(Path(folder) / "lengths", config)
            for each in SIDES:
                if FIXED_BOUNDS.get(each.schedule, each.bound) > 0:
                    found = Split(name, each, fastest(name, each, lengths))
                    harness.add_line(SPLITS, found)
                    known[name, each] = found.train_devices
    return known[name, side]


def fastest(name: str, side: Side, lengths: RecordedWorkload) -> int:
    profile = emulation.profile_of(configure(name, side, 0, None, Path("unused")))
    assert profile is not None
    devices, each = SETTINGS[name].devices, profile.devices_per_instance
    speeds = {}
    for rollout in range(each, devices, each):
        config = configure(name, side, 0, devices - rollout, Path("unused"))
        config = config.changed(learner={"max_steps": SPLIT_STEPS})
        with contextlib.suppress(AssertionError):
            speeds[devices - rollout] = simulated(config, lengths)[0]
    best = max(speeds, key=lambda training: speeds[training])
    print(f"  {name}: {side}: {best} train ({speeds[best]:.5f} steps/s)", file=sys.stderr)
    return best


def simulated(config: Config, lengths: RecordedWorkload) -> list[float]:
    """Steps per second and idle shares of a simulation with the runtime's own intervals."""
    scale, bound = config.emulation.scale, config.schedule.bound
    fields = {
        "simulation.skip_steps": SKIPPED,
        "simulation.tick_seconds": ROUND_SECONDS * scale,
        "simulation.snapshot_seconds": STATUS_SECONDS * scale,
        "simulation.message_seconds": 0.0005 * scale,
        "simulation.reward_seconds": REWARD_SECONDS * scale,
    }
    found = simulate(build_config(fields, base=config, where="emulated"), lengths, uncounted=bound)
    return [found.steps_per_second, found.idle_rollout, found.idle_learner]


# -- a run -----------------------------------------------------------------------------------------


def scale_of(name: str, training: int | None, scale: float) -> float:
    """The scale of a side, `scale` being that of 16 instances."""
    return scale * (16 / SETTINGS[name].devices if training is None else SPLIT_SCALE)


def in_time(name: str, side: Side, seed: int, scale: float, runs: Sequence[Run]) -> Run:
    """A run that this machine has kept up with."""
    training = split_of(name, side, scale)
    scale = scale_of(name, training, scale)
    for _ in range(TRIES):
        found = measured(name, side, seed, training, scale, runs)
        late = max(found.learner_behind, found.rollout_behind)
        if late <= LATE:
            return found
        print(f"  {late:.1%} late at a scale of {scale:.0f}: again", file=sys.stderr, flush=True)
        scale *= SLOWER
    raise UserError(f"--scale: this machine is {late:.1%} late even at {scale:.0f}")


def measured(
    name: str, side: Side, seed: int, training: int | None, scale: float, runs: Sequence[Run]
) -> Run:
    with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
        run_dir = Path(folder) / "run"
        config = emulation.resolved(configure(name, side, seed, training, run_dir, scale))
        train(config)
        published = published_at(run_dir)
        rows = training_rows(run_dir)[SKIPPED:]
        shares = {
            part: metrics.time_weighted_mean(rows, f"idle/{part}") or 0.0
            for part in ("rollout", "learner")
        }
        behind = behind_of(rows)
        found = Run(
            name,
            side,
            seed,
            config.emulation.train_devices or 0,
            scale,
            published,
            twin(name, side, seed, runs) or rewards_of(config, run_dir, side in DRAWN),
            *drafts_of(run_dir),
            shares["rollout"],
            shares["learner"],
            behind["learner"],
            behind["rollout"],
            simulated(config, RecordedWorkload(run_dir, config)),
        )
    speed = steps_per_s(found)
    print(
        f"  {name} {side}, seed {seed}: {1 / speed:.1f} s a step, goal at {reached(found)}, "
        f"simulated {1 / found.simulated[0]:.1f} s",
        file=sys.stderr,
        flush=True,
    )
    return found


def behind_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By what share the learner and the instances were late, in the mean of steps."""
    return {
        who: statistics.fmean(row.get(f"emulation/{who}_behind") or 0.0 for row in rows)
        for who in ("learner", "rollout")
    }


def published_at(run_dir: Path) -> list[float]:
    """When each version was published, in seconds since a version and all instances were there."""
    ready, published = 0.0, []
    with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
        for _, time, event in reader.events():
            match event:
                case LearnerReady() | InstanceJoined():
                    ready = max(ready, time)
                case VersionPublished():
                    published.append(time)
    return [round(time - ready, 3) for time in published]


def twin(name: str, side: Side, seed: int, runs: Iterable[Run]) -> Mapping[int, float]:
    """Rewards of the run that differs in drafts alone, which has the same weights to the bit."""
    other = side._replace(has_drafts=not side.has_drafts)
    if side.bound > 0:
        return {}
    found = (e.rewards for e in runs if (e.setting, e.side, e.seed) == (name, other, seed))
    return next(found, {})


def rewards_of(config: Config, run_dir: Path, is_drawn: bool) -> dict[int, float]:
    """Mean reward of sampled answers to the held-out prompts, by saved version."""
    evaluate = evaluator(config)
    rewards: dict[int, float] = {}
    if is_drawn:
        rewards[0] = evaluate(config.model.name)
    for version, path in checkpoints_up_to(run_dir / CHECKPOINTS, STEPS).items():
        is_near = version >= FIRST_SAVED and max(rewards.values(), default=0.0) < GOAL
        if is_near or (is_drawn and version % DRAWN_EVERY == 0):
            rewards[version] = evaluate(str(path))
    return rewards


def evaluator(config: Config) -> Any:
    """A function from a model's name to the mean reward of its answers, with noise of its own that is
    the same for all."""
    import torch

    from rhymeflow.data.load import RunPrompts
    from rhymeflow.engine.base import NoiseKey, Request, Sampling
    from rhymeflow.engine.native.engine import Engine
    from rhymeflow.models.load import load_model, resolve_dtype, stop_token_ids
    from rhymeflow.models.precision import resolve_device
    from rhymeflow.models.tokenizer import load_tokenizer, max_length
    from rhymeflow.recipes.demo import task

    tokenizer, device = load_tokenizer(config.model), resolve_device(config.model)
    prompts = RunPrompts.load(config, tokenizer, max_length(config.model), None)
    held_out = prompts.held_out * ANSWERS
    ids = [prompts.encoder.encode(each) for each in held_out]

    def evaluate(name: str) -> float:
        of_version = config.model.model_copy(update={"name": name})
        dtype = resolve_dtype(config.model, device)
        model = load_model(of_version, dtype=dtype, device=device)
        engine = Engine(
            model, seed=1, max_num_seqs=256, max_prefill_tokens=8192, instance="eval", version=0
        )
        stop = stop_token_ids(model, tokenizer)
        how = Sampling(1.0, 1.0, 0, config.rollout.max_completion_length, stop)
        requests = [Request(i, each, NoiseKey(i, 0, 0), how) for i, each in enumerate(ids)]
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            engine.step()
        texts = [str(tokenizer.decode(e.tokens, skip_special_tokens=True)) for e in requests]
        answers = [each.columns["answer"] for each in held_out]
        rewards = task.reward([each.prompt for each in held_out], texts, answers)
        return statistics.fmean(rewards)

    torch.set_num_threads(2)
    return evaluate


def drafts_of(run_dir: Path) -> tuple[float, float]:
    """Tokens per iteration after the first epoch, of all and of long responses."""
    with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
        found = reader.query(
            "SELECT SUM(length), SUM(steps) FROM spans JOIN groups USING (group_id)"
            " WHERE epoch > 0 GROUP BY group_id, member"
        )
    mean = statistics.fmean(length for length, _ in found)
    parts = found, [each for each in found if each[0] >= LONG * mean]
    every, long = (sum(n for n, _ in p) / max(sum(s for _, s in p), 1) for p in parts)
    return every, long


# -- report ----------------------------------------------------------------------------------------


def steps_per_s(found: Run) -> float:
    """Without the first epoch, and without the last steps, during which no batch is generated."""
    last = len(found.published) - 1 - found.side.bound
    return (last - SKIPPED) / (found.published[last] - found.published[SKIPPED])


def reached(found: Run) -> tuple[float, float] | None:
    """Steps and seconds to the goal, interpolated between evaluated versions."""
    before: tuple[int, float] | None = None
    for version, reward in sorted(found.rewards.items()):
        if reward >= GOAL:
            if before is None:
                steps = float(version)
            else:
                share = (GOAL - before[1]) / (reward - before[1])
                steps = before[0] + share * (version - before[0])
            low = int(steps)
            at = [0.0, *found.published]
            upper = at[min(low + 1, len(at) - 1)]
            return round(steps, 1), round(at[low] + (steps - low) * (upper - at[low]), 1)
        before = version, reward
    return None


def table(name: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each side: medians over seeds; ratios are paired by seed."""
    by_side: dict[Side, dict[int, Run]] = {}
    for each in runs:
        if each.setting == name:
            by_side.setdefault(each.side, {})[each.seed] = each
    rows = []
    for side in SIDES:
        if side not in by_side:
            continue
        found = list(by_side[side].values())
        goals = [goal for goal in map(reached, found) if goal is not None]
        median = statistics.median
        row: dict[str, Any] = {
            "setting": name,
            "schedule": side.schedule,
            "bound": side.bound,
            "drafts": side.has_drafts,
            "seeds": len(found),
            "reached": f"{len(goals)} of {len(found)}",
            "train devices": found[0].train_devices,
            "s/step": round(median(1 / steps_per_s(each) for each in found), 1),
            "steps to goal": median(steps for steps, _ in goals) if goals else "",
            "s to goal": round(median(seconds for _, seconds in goals)) if goals else "",
        }
        for base, label in ((BASE, "synchronous"), (DRAFTED, "synchronous, drafts")):
            row |= ratios(by_side[side], by_side.get(base, {}), label)
        row |= {
            "tokens/iteration": round(median(e.tokens_per_iteration for e in found), 2),
            "long": round(median(e.long_tokens_per_iteration for e in found), 2),
            "idle rollout": round(median(e.idle_rollout for e in found), 3),
            "idle learner": round(median(e.idle_learner for e in found), 3),
            "behind": round(max(max(e.learner_behind, e.rollout_behind) for e in found), 3),
            "simulated": round(median(e.simulated[0] / steps_per_s(e) for e in found), 3),
            "simulated idle": round(max(abs(e.simulated[1] - e.idle_rollout) for e in found), 3),
        }
        rows.append(row)
    return rows


def ratios(runs: Mapping[int, Run], base: Mapping[int, Run], label: str) -> dict[str, float]:
    """Steps per second, time and steps to the goal over those of `base`, of the same seeds."""
    both = [(runs[seed], base[seed]) for seed in runs if seed in base]
    if not both:
        return {}
    median = statistics.median
    row = {
        f"steps/s over {label}": round(median(steps_per_s(a) / steps_per_s(b) for a, b in both), 3)
    }
    goals = [(reached(a), reached(b)) for a, b in both]
    reach = [(a, b) for a, b in goals if a is not None and b is not None]
    if reach:
        row[f"time over {label}"] = round(median(b[1] / a[1] for a, b in reach), 3)
        row[f"steps over {label}"] = round(median(a[0] / b[0] for a, b in reach), 3)
    return row


def targets(rows: Sequence[Mapping[str, Any]]) -> list[harness.Target]:
    found = []

    def of(setting: str, side: Side, column: str) -> float | None:
        wanted = (setting, side.schedule, side.bound, side.has_drafts)
        names = "setting", "schedule", "bound", "drafts"
        return next(
            (r.get(column) for r in rows if tuple(r[name] for name in names) == wanted), None
        )

    for column, target in (
        ("time over synchronous", 2.7),
        ("steps/s over synchronous", 3.0),
        ("steps/s over synchronous, drafts", 1.5),
        ("time over synchronous, drafts", 1.35),
    ):
        if (value := of("a", OURS, column)) is not None:
            found.append(harness.Target(f"(a) rhymeflow, bound 1: {column}", value, target))
    if (value := of("a", OURS, "steps over synchronous")) is not None:
        found.append(harness.at_most("(a) rhymeflow, bound 1: steps over synchronous", value, 1.1))
    if (value := of("a", DRAFTED, "steps/s over synchronous")) is not None:
        found.append(harness.Target("(a) drafts alone: steps/s", value, 2.0))
    return found


def notes() -> str:
    return (
        f"Recipe `emulated`, {STEPS} steps; speed without the first {SKIPPED}. Times are of the "
        f"cluster, by its cost model. Goal: {GOAL} of {ANSWERS} answers to each of 128 held-out "
        "prompts, sampled at temperature 1. Ratios are paired by seed; `time over`: the other's "
        "seconds over this side's. `long`: tokens per iteration of responses of four mean lengths "
        "or more. `behind`: the greatest share by which this machine was late. `simulated`: steps "
        "per second of a simulation of the run over its own, and the greatest error of an idle "
        "share."
    )
