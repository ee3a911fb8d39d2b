"""Whether a run learns, and if not, why: verdicts on the metrics of its last steps.

A verdict is one sentence with its evidence, and what to try; docs/troubleshooting.md has likely
causes by its name. Thresholds come from runs that fail on purpose and from healthy ones
(`rhymeflow bench verdicts`)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from rhymeflow.config import Config
from rhymeflow.reward.components import WeightedSum
from rhymeflow.suites.figures import REWARD, STDERR

Row = Mapping[str, Any]

WINDOW = 4  # steps that the evidence is of: a verdict needs as many
NO_SPREAD, CUT, CLIPPED = 0.9, 0.7, 0.1
"""Shares of groups without a spread of rewards, of responses that are cut, of clipped tokens."""
MISMATCH, RUNAWAY = 0.03, 1.0
"""KL per token between sampler and learner (from that on, most runs of the map in
docs/off-policy.md end lower), and from the reference to the policy."""
COLLAPSED, ENTROPY_LEFT = 0.5, 0.05
"""What is left of the best mean reward; of the entropy of the first steps."""
BEYOND_NOISE = 3.0  # standard deviations of a step's mean reward that a collapse has to exceed
BEHIND = 0.02  # share by which emulated work takes longer than it should
FILTERED, FAILED = 0.9, 0.02  # shares of the groups that ended meanwhile, and of responses
STEPS_TO_RISE, _END = 100, 25
"""Steps after which a reward that learns is above its noise, by so many first and last ones."""
DIVERGENCE = "distillation/divergence"
_EQUAL = 1e-9
SURE = 2.0  # standard errors that a change of the held-out reward has to exceed


class Verdict(NamedTuple):
    """Something that keeps a run from learning, or that should be known of what it learned."""

    name: str  # a heading of docs/troubleshooting.md
    said: str  # one sentence, with the figures it comes from
    remedy: str  # what to try first

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.said}: {self.remedy}"


class HeldOut(NamedTuple):
    """An evaluation on the held-out prompts."""

    step: int
    reward: float
    stderr: float | None  # of the mean over prompts; None of a single one


@dataclass
class Seen:
    """The steps of a run so far."""

    groups_per_batch: int
    num_generations: int
    has_tools: bool
    has_turns: bool
    parts: tuple[str, ...]  # names of the functions and environments that make the reward
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))
    """One more than the evidence is of: counts grow from row to row."""
    first: list[Row] = field(default_factory=list)  # the first `WINDOW` steps
    best_reward: float = -math.inf  # greatest mean over `WINDOW` steps, or over the first ones
    rewards: list[float] = field(default_factory=list)  # mean rewards of all steps
    divergences: list[float] = field(default_factory=list)  # from a teacher, of all steps
    held_out: list[HeldOut] = field(default_factory=list)
    num_filtered: int = 0  # groups that were filtered since the last step

    @property
    def window(self) -> list[Row]:
        """The steps that the evidence is of."""
        return list(self.recent)[-WINDOW:]

    def mean(self, name: str, rows: Sequence[Row] | None = None) -> float | None:
        """The mean of a metric over the window or `rows`; None if one of them lacks it."""
        values = [row.get(name) for row in (self.window if rows is None else rows)]
        return None if not values or None in values else fmean(v for v in values if v is not None)

    def has_risen(self, by: float) -> bool:
        """Whether the mean reward is more than `by` above that of the first steps."""
        now, before = self.mean("reward"), self.mean("reward", self.first)
        return now is not None and before is not None and now > before + by

    @property
    def approaches(self) -> bool:
        """Whether the policy is closer to the teacher than in the first steps."""
        now, before = self.mean(DIVERGENCE), self.mean(DIVERGENCE, self.first)
        return now is not None and before is not None and now < before

    def grown(self, name: str) -> float:
        """How much a count grew over the window."""
        return (self.recent[-1].get(name) or 0.0) - (self.recent[0].get(name) or 0.0)


class Learning:
    """Takes in metrics as they come; `now` are the verdicts that held after the last `add`."""

    def __init__(self, config: Config) -> None:
        world = config.environment
        parts = WeightedSum(config.reward.functions, world.judges).weights
        batch = config.learner.groups_per_batch, config.rollout.num_generations
        has_turns = bool(world.classes or world.tools)  # a program may want a single call
        self._seen = Seen(*batch, bool(world.tools), has_turns, tuple(parts))
        compares = config.learner.advantage not in ("reward", "gae") and config.trains_on_rewards
        teacher = config.learner.distillation.teacher
        follows = teacher not in (None, "policy") and not config.trains_on_rewards
        is_without = {
            _constant: not config.trains_on_rewards, _no_spread: not compares, _apart: not follows
        }  # fmt: skip
        self._left_out = {rule for rule, is_out in is_without.items() if is_out}
        self._warmup = config.learner.critic_warmup_steps  # steps that leave the policy as it is
        self.now: list[Verdict] = []
        self.last_step = 0  # the last step that was taken in

    def add(self, step: int, row: Row) -> list[Verdict]:
        """Take in a row of metrics; return the verdicts that hold now and did not before."""
        self.take(step, row)
        return self.judge()

    def filtered(self, count: int) -> list[Verdict]:
        """Take in how many groups were filtered since the last step, which may be the last that
        there will ever be; return as `add`."""
        self._seen.num_filtered = count
        return self.judge() if _is_endless(self._seen) else []

    def judge(self) -> list[Verdict]:
        """Judge what was taken in; return as `add`."""
        before = {verdict.name for verdict in self.now}
        self.now = self._verdicts()
        return [verdict for verdict in self.now if verdict.name not in before]

    def take(self, step: int, row: Row) -> None:
        """Take in a row of metrics, of a step, of an evaluation or of both, without a verdict."""
        seen = self._seen
        if row.get(REWARD) is not None:
            seen.held_out.append(HeldOut(step, row[REWARD], row.get(STDERR)))
        if "grad_norm" not in row:
            return
        self.last_step, seen.num_filtered = step, 0
        if step <= self._warmup:
            return
        if len(seen.first) < WINDOW:
            seen.first.append(row)
        seen.recent.append(row)
        if row.get("reward") is not None:
            seen.rewards.append(row["reward"])
        if row.get(DIVERGENCE) is not None:
            seen.divergences.append(row[DIVERGENCE])
        if (reward := seen.mean("reward")) is not None:
            seen.best_reward = max(seen.best_reward, reward)

    def _verdicts(self) -> list[Verdict]:
        is_judged = len(self._seen.recent) >= WINDOW
        rules = _RULES if is_judged else (_filtered,) if _is_endless(self._seen) else ()
        judged = [rule(self._seen) for rule in rules if rule not in self._left_out]
        return [found for found in judged if found is not None]

    def at_end(self) -> list[Verdict]:
        """The verdicts on all that was taken in, as on a run that is over."""
        held_out = self._seen.held_out
        over = within_noise(held_out[0], held_out[-1]) if len(held_out) > 1 else None
        return [*self._verdicts(), *([] if over is None else [over])]


# -- rules -----------------------------------------------------------------------------------------


def _gradient(seen: Seen) -> Verdict | None:
    rows = seen.window
    broken = sum(1 for row in rows if row.get("skipped_steps") or row.get("grad_norm") is None)
    if broken:
        said = f"the gradient was not finite in {broken} of the last {WINDOW} steps"
        return Verdict("gradient not finite", said, "lower learner.learning_rate")
    is_flat = all(row.get("frac_reward_zero_std") == 1.0 for row in rows)
    if all(row["grad_norm"] == 0 for row in rows) and not is_flat:
        said = f"the gradient of the last {WINDOW} steps is exactly 0"
        return Verdict("gradient 0", said, "see whether every parameter is frozen")
    return None


def _collapse(seen: Seen) -> Verdict | None:
    reward, before = seen.mean("reward"), seen.best_reward
    if reward is None or before <= 0 or reward > COLLAPSED * before:
        return None
    if before - reward <= BEYOND_NOISE * pstdev([row["reward"] for row in seen.window]):
        return None
    said = f"the mean reward fell from {before:.3f} to {reward:.3f}"
    remedy = "lower learner.learning_rate, and resume from a checkpoint before the fall"
    return Verdict("reward collapsed", said, remedy)


def _does_not_rise(seen: Seen) -> Verdict | None:
    if (ends := _unmoved(seen.rewards, 1.0)) is None:
        return None
    said = f"the mean reward of the last {_END} steps, {ends[1]:.3f}, is not above that "
    said += f"of the first {_END}, {ends[0]:.3f}"
    remedy = "see which responses are rewarded, and try another learner.learning_rate"
    return Verdict("reward does not rise", said, remedy)


def _apart(seen: Seen) -> Verdict | None:
    if (ends := _unmoved(seen.divergences, -1.0)) is None:
        return None
    said = f"the divergence from the teacher in the last {_END} steps, {ends[1]:.4f}, is not below "
    said += f"that of the first {_END}, {ends[0]:.4f}"
    return Verdict("teacher not approached", said, "try another learner.learning_rate")


def _unmoved(values: Sequence[float], sign: float) -> tuple[float, float] | None:
    """The means of the first and the last values, once there are enough, unless they have moved
    to the side of `sign` by more than their noise."""
    if len(values) < STEPS_TO_RISE:
        return None
    first, last = values[:_END], values[-_END:]
    noise = math.hypot(pstdev(first), pstdev(last)) / math.sqrt(_END)
    has_moved = sign * (fmean(last) - fmean(first)) > noise
    return None if has_moved or not noise else (fmean(first), fmean(last))


def _constant(seen: Seen) -> Verdict | None:
    rows = seen.window
    # Sums of equal numbers differ in their last bits.
    if any((row.get("reward_std") or 0.0) > _EQUAL for row in rows):
        return None
    value = seen.mean("reward")
    if (
        value is None
        or max(abs(row["reward"] - value) for row in rows) > _EQUAL
        or value < seen.best_reward - _EQUAL
        or seen.has_risen(_EQUAL)
    ):
        return None
    if abs(value) <= _EQUAL:
        said = f"all rewards of the last {WINDOW} steps are 0"
        remedy = "compare responses with what the reward function expects"
        return Verdict("rewards all 0", said, remedy)
    said = f"all rewards of the last {WINDOW} steps are {value:g}"
    return Verdict("rewards constant", said, "make the reward depend on the response")


def _no_spread(seen: Seen) -> Verdict | None:
    share, std = seen.mean("frac_reward_zero_std"), seen.mean("reward_std")
    if share is None or share < NO_SPREAD or not std or seen.has_risen(std):
        return None
    said = f"in {share:.0%} of groups all responses have the same reward, which teaches nothing"
    return Verdict("no spread of rewards", said, "choose prompts that are solved now and then")


def _above(metric: str, limit: float, found: Verdict, seen: Seen) -> Verdict | None:
    """A limit to the mean of a metric, whose value comes in place of the braces."""
    mean = seen.mean(metric)
    if mean is None or mean < limit:
        return None
    return found._replace(said=found.said.format(mean))


_cut = partial(_above, "completions/clipped_ratio", CUT, Verdict("responses cut",
    "{:.0%} of responses were cut at rollout.max_completion_length",
    "raise it, or ask for shorter answers"))  # fmt: skip
_clipped = partial(_above, "clip_ratio/region_mean", CLIPPED, Verdict("tokens clipped",
    "{:.0%} of tokens were clipped",
    "lower learner.learning_rate or schedule.max_staleness"))  # fmt: skip
_mismatch = partial(_above, "off_policy/mismatch_kl", MISMATCH, Verdict("mismatch",
    "learner and sampler differ by a KL of {:.3g} per token",
    "lower schedule.max_staleness or learner.learning_rate"))  # fmt: skip
_runaway = partial(_above, "kl", RUNAWAY, Verdict("reference runs away",
    "the policy is a KL of {:.3g} per token away from its reference",
    "raise learner.beta or lower learner.learning_rate"))  # fmt: skip


def _entropy(seen: Seen) -> Verdict | None:
    now, before = seen.mean("entropy"), seen.mean("entropy", seen.first)
    if now is None or not before or now > ENTROPY_LEFT * before:
        return None
    if seen.has_risen(0.0) or seen.approaches:
        return None
    what = "reward did not rise" if seen.rewards else "divergence from the teacher did not fall"
    said = f"the entropy fell from {before:.3g} to {now:.3g} and the {what}"
    return Verdict("entropy gone", said, "lower learner.learning_rate, or raise the temperature")


def _is_endless(seen: Seen) -> bool:
    """Whether as many groups as in `WINDOW` batches were filtered since the last step."""
    return seen.num_filtered >= WINDOW * seen.groups_per_batch


def _filtered(seen: Seen) -> Verdict | None:
    if _is_endless(seen):
        share = f"all {seen.num_filtered:,} groups since the last step"
    else:
        consumed, filtered = (seen.grown(f"endings/{kind}") for kind in ("consumed", "filtered"))
        total = consumed + filtered
        if not total or filtered < FILTERED * total:
            return None
        share = f"{filtered / total:.0%} of groups"
    said = f"{share} were filtered: their rewards were all equal"
    return Verdict("groups filtered", said, "choose prompts that are solved now and then")


def _failed(seen: Seen) -> Verdict | None:
    failed = sum(row.get("rewards/failed") or 0.0 for row in seen.window)
    share = failed / (failed + WINDOW * seen.groups_per_batch * seen.num_generations)
    if share < FAILED:
        return None
    said = f"{share:.1%} of responses have no reward: a reward function or an environment failed"
    return Verdict("rewards fail", said, "rhymeflow inspect shows the errors")


def _unused(seen: Seen) -> Verdict | None:
    if seen.has_tools and not any(row.get("tools/call_frequency") for row in seen.window):
        said = f"no response of the last {WINDOW} steps called a tool"
        return Verdict("tools unused", said, "show an example call in the prompt")
    if seen.has_turns and all((row.get("turns/mean") or 1.0) <= 1.0 for row in seen.window):
        said = f"every response of the last {WINDOW} steps has one turn"
        return Verdict("turns unused", said, "see whether the environment answers")
    return None


def _not_applied(seen: Seen) -> Verdict | None:
    rows = seen.window
    for name in seen.parts:
        if not any(f"rewards/{name}/mean" in row for row in rows):
            said = f"reward function {name} returned None for every response"
            return Verdict("reward function returns None", said, "see which responses it judges so")
    return None


def _behind(seen: Seen) -> Verdict | None:
    for who in ("learner", "rollout"):
        share = fmean(row.get(f"emulation/{who}_behind") or 0.0 for row in seen.window)
        if share >= BEHIND:
            said = f"this machine is too slow for the emulation: {who} takes {share:.0%} longer"
            return Verdict("emulation behind", said, "lower emulation.time_scale")
    return None


def _held_out_fell(seen: Seen) -> Verdict | None:
    if len(seen.held_out) < 2:
        return None
    best, last = max(seen.held_out[:-1], key=lambda each: each.reward), seen.held_out[-1]
    noise = _noise(best, last)
    if noise is None or best.reward - last.reward <= noise:
        return None
    said = f"the held-out reward fell from {best.reward:.3f} at step {best.step} to "
    said += f"{last.reward:.3f} at step {last.step}"
    return Verdict("held-out reward falls", said, "take the checkpoint before, or train for less")


def _noise(a: HeldOut, b: HeldOut) -> float | None:
    """What the difference of two evaluations has to exceed to be told from chance."""
    if a.stderr is None or b.stderr is None:
        return None
    return SURE * math.hypot(a.stderr, b.stderr)


def within_noise(first: HeldOut, last: HeldOut) -> Verdict | None:
    """Whether what held-out prompts say of the whole run is within their noise."""
    noise, change = _noise(first, last), last.reward - first.reward
    if noise is None or abs(change) > noise or not noise:
        return None
    said = f"the held-out change of {change:+.3f} is within its noise of {noise:.3f}"
    return Verdict("held-out change within noise", said, "evaluate on more prompts")


_RULES: tuple[Callable[[Seen], Verdict | None], ...] = (
    _gradient, _collapse, _does_not_rise, _apart, _constant, _no_spread, _cut, _entropy, _filtered,
    _failed, _not_applied, _unused, _mismatch, _clipped, _runaway, _held_out_fell, _behind,
)  # fmt: skip
"""In the order in which their verdicts are shown."""
