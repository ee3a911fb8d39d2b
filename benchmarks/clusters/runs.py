"""Emulated runs: settings and sides, the split of devices, and what one run finds.

Each run is real (docs/emulation.md), with each schedule at the split of devices where the simulator
finds it fastest, on the lengths of a run of that setting. Versions are evaluated afterwards,
outside of the run, by answers sampled at temperature 1.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from benchmarks import harness
from benchmarks.schedules import Side
from benchmarks.training.train import QUIET, train, training_rows
from rhymeflow import emulation
from rhymeflow.config import Config
from rhymeflow.config.load import build_config, read_config
from rhymeflow.core.events import InstanceJoined, InstanceLeft, LearnerReady, VersionPublished
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.runtime.controller import ROUND_SECONDS
from rhymeflow.sim.faults import Death
from rhymeflow.sim.result import SimulationResult
from rhymeflow.sim.simulate import run as simulate
from rhymeflow.sim.workload import RecordedWorkload
from rhymeflow.store.checkpoint_dirs import paths_of
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS
from rhymeflow.utils.bounds import FIXED_BOUNDS
from rhymeflow.workers.rollout import STATUS_SECONDS

T = TypeVar("T")

RUNS, SPLITS = (harness.RESULTS / f"emulated-{name}.jsonl" for name in ("runs", "splits"))


class Setting(NamedTuple):
    profile: str
    devices: int
    seeds: int = 3
    recipe: str = "emulated"
    """With an environment: only two sides, their answers taking a second, and no goal."""


SETTINGS = {
    "a": Setting("qwen3-30b-a3b-h20", 16, 5),
    "b": Setting("qwen3-30b-a3b-h20", 32),
    "c": Setting("qwen2.5-14b-h20", 16),
    "d": Setting("qwen3-14b-h800", 16),
    "guess": Setting("qwen3-30b-a3b-h20", 16, recipe="guess"),
    "tools": Setting("qwen3-30b-a3b-h20", 16, recipe="tools"),
}
ENVIRONMENT_SECONDS, ENVIRONMENT_SCALE = 1.0, 20.0
"""Of an environment's answer, and the greatest scale at which it can be emulated."""
SCALE, SPLIT_SCALE = 32.0, 1.5
"""Seconds of the cluster in one of this machine where 16 instances generate; so many times as many
where fewer do, beside a learner."""
LATE, TRIES, SLOWER = 0.02, 4, 0.7
"""A run whose work takes longer by a greater share is not counted, but made again at a scale of so
much of the last one, at most so often in all."""
STEPS, SAVED_EVERY, FIRST_SAVED, DRAWN_EVERY = 40, 2, 16, 4
"""Of a run; versions that are evaluated: every so many, from there on until the goal; for the
picture, every so many of the whole run."""
GOAL, ANSWERS = 0.80, 4
"""Held-out reward, and how many answers to each held-out prompt it is the mean of."""
SKIPPED = 4
"""Steps at the beginning without which speed is measured: the first epoch has no drafts."""
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


def sides_of(name: str) -> tuple[Side, ...]:
    """The sides that are compared in a setting."""
    return SIDES if SETTINGS[name].recipe == "emulated" else (DRAFTED, OURS)


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
    """0: no response was long."""
    idle_rollout: float
    idle_learner: float
    learner_behind: float
    rollout_behind: float
    simulated: list[float]
    """Steps per second, idle share of rollout and of the learner, in the simulation of this run."""

    @property
    def steps_per_s(self) -> float:
        """Without the first epoch, and without the last steps, during which no batch is made."""
        last = len(self.published) - 1 - self.side.bound
        return (last - SKIPPED) / (self.published[last] - self.published[SKIPPED])

    @property
    def reached(self) -> tuple[float, float] | None:
        """Steps and seconds to the goal, interpolated between evaluated versions."""
        before: tuple[int, float] | None = None
        for version, reward in sorted(self.rewards.items()):
            if reward >= GOAL:
                steps = float(version)
                if before is not None:
                    share = (GOAL - before[1]) / (reward - before[1])
                    steps = before[0] + share * (version - before[0])
                low = int(steps)
                at = [0.0, *self.published]
                upper = at[min(low + 1, len(at) - 1)]
                return round(steps, 1), round(at[low] + (steps - low) * (upper - at[low]), 1)
            before = version, reward
        return None


class Split(msgspec.Struct, frozen=True):
    """The fastest split of a setting's devices for a side, by the simulator."""

    setting: str
    side: Side
    train_devices: int


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
    if setting.recipe != "emulated":
        fields["emulation.environment_seconds"] = str(ENVIRONMENT_SECONDS)
        fields["data.eval_size"] = "0"
        groups = read_config(setting.recipe, {}).learner.groups_per_batch
        fields["data.size"] = str(SKIPPED * groups)
    return read_config(setting.recipe, fields)


# -- splits ----------------------------------------------------------------------------------------


def split_of(name: str, side: Side, scale: float) -> int | None:
    """The devices that train; None: all devices do both in turn."""
    if FIXED_BOUNDS.get(side.schedule, side.bound) == 0:
        return None
    known = {(e.setting, e.side): e.train_devices for e in harness.lines(SPLITS, Split)}
    if (name, side) not in known:
        with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
            config = configure(name, DRAFTED, 100, None, Path(folder) / "lengths", scale)
            train(config)
            lengths = RecordedWorkload(Path(folder) / "lengths", config)
            for each in sides_of(name):
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
        speeds[devices - rollout] = simulated(config, lengths)[0]
    best = max(speeds, key=lambda training: speeds[training])
    print(f"  {name}: {side}: {best} train ({speeds[best]:.5f} steps/s)", file=sys.stderr)
    return best


def simulated(config: Config, lengths: RecordedWorkload) -> list[float]:
    """Steps per second and idle shares of a simulation."""
    found = simulate_run(config, lengths)
    return [found.steps_per_second, found.idle_rollout, found.idle_learner]


def simulate_run(
    config: Config, lengths: RecordedWorkload, deaths: Sequence[Death] | None = None
) -> SimulationResult:
    """A simulation with the runtime's own intervals."""
    scale, bound = config.emulation.scale, config.schedule.bound
    fields = {
        "simulation.skip_steps": SKIPPED,
        "simulation.tick_seconds": ROUND_SECONDS * scale,
        "simulation.snapshot_seconds": STATUS_SECONDS * scale,
        "simulation.message_seconds": 0.0005 * scale,
        "simulation.reward_seconds": REWARD_SECONDS * scale,
    }
    config = build_config(fields, base=config, where="emulated")
    return simulate(config, lengths, deaths=deaths, uncounted=bound)


# -- a run -----------------------------------------------------------------------------------------


def scale_of(name: str, training: int | None, scale: float) -> float:
    """The scale of a side, `scale` being that of 16 instances."""
    if SETTINGS[name].recipe != "emulated":
        return min(scale, ENVIRONMENT_SCALE)
    return scale * (16 / SETTINGS[name].devices if training is None else SPLIT_SCALE)


def in_time(name: str, side: Side, seed: int, scale: float, runs: Sequence[Run]) -> Run:
    """A run that this machine has kept up with."""
    training = split_of(name, side, scale)
    return kept_up(
        lambda scale: measured(name, side, seed, training, scale, runs),
        lambda found: max(found.learner_behind, found.rollout_behind),
        scale_of(name, training, scale),
    )


def kept_up(measure: Callable[[float], T], late: Callable[[T], float], scale: float) -> T:
    """What is measured at this scale, or at the first lower one that this machine keeps up with.
    `late` is by what share it did not."""
    for _ in range(TRIES):
        found = measure(scale)
        if late(found) <= LATE:
            return found
        what = f"  {late(found):.1%} late at a scale of {scale:.0f}: again"
        print(what, file=sys.stderr, flush=True)
        scale *= SLOWER
    raise UserError(f"--scale: this machine is {late(found):.1%} late even at {scale / SLOWER:.0f}")


def measured(
    name: str, side: Side, seed: int, training: int | None, scale: float, runs: Sequence[Run]
) -> Run:
    with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
        run_dir = Path(folder) / "run"
        config = emulation.resolved(configure(name, side, seed, training, run_dir, scale))
        train(config)
        published = published_at(run_dir)
        rows = training_rows(run_dir)[SKIPPED : STEPS - side.bound]
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
    print(
        f"  {name} {side}, seed {seed}: {1 / found.steps_per_s:.1f} s a step, goal at "
        f"{found.reached}, "
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
    """When each version was published, in seconds since the run was ready."""
    with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
        ready = ready_at(reader)
        events = reader.events()
        return [round(at - ready, 3) for _, at, e in events if isinstance(e, VersionPublished)]


def ready_at(reader: TrajectoryReader) -> float:
    """When a version and all instances were there; what joins after a death replaces another."""
    ready, has_learner = 0.0, False
    for _, at, event in reader.events():
        match event:
            case InstanceLeft() | VersionPublished():
                return ready
            case LearnerReady() if not has_learner:
                ready, has_learner = max(ready, at), True
            case InstanceJoined():
                ready = max(ready, at)
    return ready


def twin(name: str, side: Side, seed: int, runs: Iterable[Run]) -> dict[int, float]:
    """Rewards of the run that differs in drafts alone, which has the same weights to the bit."""
    other = side._replace(has_drafts=not side.has_drafts)
    if side.bound > 0:
        return {}
    found = (e.rewards for e in runs if (e.setting, e.side, e.seed) == (name, other, seed))
    return next(found, {})


def rewards_of(config: Config, run_dir: Path, is_drawn: bool) -> dict[int, float]:
    """Mean reward of sampled answers to the held-out prompts, by saved version."""
    if config.environment.is_used:
        return {}
    evaluate = evaluator(config)
    rewards: dict[int, float] = {}
    if is_drawn:
        rewards[0] = evaluate(config.model.name)
    for version, path in paths_of(run_dir).items():
        is_near = version >= FIRST_SAVED and max(rewards.values(), default=0.0) < GOAL
        if is_near or (is_drawn and version % DRAWN_EVERY == 0):
            rewards[version] = evaluate(str(path))
    return rewards


def evaluator(config: Config, answers: int = ANSWERS) -> Callable[[str], float]:
    """A function from a model's name to the mean reward of so many answers to each held-out prompt,
    with noise of its own that is the same for all."""
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
    held_out = prompts.held_out * answers
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

    # Of a small model: beside other programs a second thread takes ten times the processor's time.
    torch.set_num_threads(1)
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
