"""Emulation: real runs that take the time of a cluster, by its cost model (docs/emulation.md).

A profile is scaled to the policy's tokens once, and is the cost model of workers, routing and
simulations alike. A worker's `Pace` has what it does last as long. With nothing to emulate, a pace
is the machine's own clock.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable

from rhymeflow import profiles
from rhymeflow.config import Config, LearnerConfig
from rhymeflow.core.cost import CostModel
from rhymeflow.errors import UserError
from rhymeflow.profiles import Profile

DRAFT_SECONDS = 17e-6
"""Seconds that looking for a draft takes for one response in one iteration, by the benchmark of the
drafter (docs/drafting.md): on a cluster as here, whatever the machine is busy with."""
LEAST_SECONDS = 0.02
"""Seconds of this machine below which rewards and answers of environments cannot be emulated: they
take about 6 ms from a response's end to its reward, and three times that at worst."""
_LEAST_ITERATION = 0.002
"""The same for an iteration, of which the smallest take 1.2 ms of a core."""
_TRAINING_SHARE = 2 / 3
"""Share of the devices that train, unless it is configured."""
_CATCHES_UP = 0.25
"""Seconds of this machine by which iterations can be late and still catch up with the model."""


def profile_of(config: Config) -> Profile | None:
    """Return the emulated profile, in tokens of the policy and seconds of the cluster; None if
    nothing is emulated.

    One iteration of the policy stands for T = `tokens_per_token` of the model, in each of which the
    cache has T times the policy's tokens. Raises `UserError` if there is no such profile.
    """
    emulation = config.emulation
    if emulation.profile is None:
        return None
    profile, scale = profiles.load(emulation.profile), emulation.tokens_per_token
    per_token = ("k2", "k3", "c", "k4", "prefill_token", "train_token", "measure_token")
    return dataclasses.replace(
        profile,
        k1=profile.k1 * scale * scale,
        **{name: getattr(profile, name) * scale for name in per_token},
        kv_capacity=max(1, int(profile.kv_capacity / scale)),
    )


def resolved(config: Config) -> Config:
    """Return `config` with the number of instances, the devices that train and the size of the
    cache that the emulated cluster has; unchanged if nothing is emulated.

    Raises:
        UserError: the devices cannot be divided, or something is too short to be emulated.
    """
    profile, emulation, rollout = profile_of(config), config.emulation, config.rollout
    if profile is None:
        return config
    assert emulation.devices is not None
    each, devices = profile.devices_per_instance, emulation.devices
    training = _train_devices(config, each)
    generating = devices if config.is_colocated else devices - training
    if training < 1 or generating < each or generating % each:
        raise UserError(
            f"emulation.devices = {devices}, emulation.train_devices = {training}: that leaves "
            f"{max(generating, 0)} that generate, in instances of {each}; both sides need devices"
        )
    instances = generating // each
    if rollout.num_instances not in (type(rollout)().num_instances, instances):
        raise UserError(
            f"rollout.num_instances = {rollout.num_instances}: emulation.devices = {devices} "
            f"are {instances} instances and {training} devices that train; leave it out"
        )
    _check_times(config, profile)
    capacity = rollout.max_kv_tokens or profile.kv_capacity
    if rollout.max_completion_length >= capacity:
        raise UserError(
            f"rollout.max_completion_length = {rollout.max_completion_length}: an instance's cache "
            f"holds {capacity} of the policy's tokens, {emulation.tokens_per_token:g} of the "
            "model's each; a smaller emulation.tokens_per_token fits more"
        )
    return config.changed(
        emulation={"train_devices": training},
        rollout={"num_instances": instances, "max_kv_tokens": capacity},
    )


def _train_devices(config: Config, each: int) -> int:
    """Return the devices that train; `each` instance has so many."""
    emulation = config.emulation
    assert emulation.devices is not None
    if config.is_colocated:
        return emulation.devices
    if emulation.train_devices is not None:
        return emulation.train_devices
    instances = max(1, round((1 - _TRAINING_SHARE) * emulation.devices / each))
    return emulation.devices - instances * each


def _check_times(config: Config, profile: Profile) -> None:
    emulation = config.emulation
    cost, scale = profile.cost(1), emulation.time_scale
    times = {
        "emulation.profile: an iteration": (cost.iteration(1, 0), _LEAST_ITERATION),
        "emulation.reward_seconds": (emulation.reward_seconds, LEAST_SECONDS),
        "emulation.environment_seconds": (emulation.environment_seconds, LEAST_SECONDS),
    }
    for what, (seconds, least) in times.items():
        if seconds is not None and seconds / scale < least:
            raise UserError(
                f"{what}: {seconds:.3g} s at emulation.time_scale = {scale:g} are "
                f"{1000 * seconds / scale:.2g} ms here, too short to be emulated; a scale of "
                f"{seconds / least:.3g} is slow enough"
            )


class Pace:
    """The time of one worker: what it does lasts as long as `cost` says, in seconds of the cluster,
    `scale` of which pass in one of this machine. Without `cost` nothing waits.

    Iterations keep a running deadline: one that is late is caught up by those after it. `clock` and
    `sleep` are this machine's.
    """

    def __init__(
        self,
        cost: CostModel | None = None,
        scale: float = 1.0,
        *,
        draft_seconds: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`draft_seconds`: what looking for one draft is charged with."""
        self.cost, self.scale, self.draft_seconds = cost, scale, draft_seconds
        self._clock, self._sleep = clock, sleep
        self._due: float | None = None
        """When the iterations so far should have ended; None: nothing has run since it was idle."""
        self._charged = 0.0  # seconds of the iteration that has begun
        self.modelled = self.behind = 0.0
        """Seconds that work should have taken, and by how much it took longer, in all."""

    def now(self) -> float:
        """Return seconds of the cluster, since no particular time."""
        return self._clock() * self.scale

    def begin(self) -> None:
        """Note that an iteration begins."""
        if self.cost is None:
            return
        now = self._clock()
        if self._due is None:
            self._due = now
        elif (late := now - _CATCHES_UP - self._due) > 0:
            self._due += late
            self.behind += late * self.scale

    def charge(self, decoded: int, prefilled: int, cached: int, searched: int) -> float | None:
        """Charge the iteration with so many rows, with a cache of so many tokens, and with looking
        for so many drafts; return its seconds without the last, or None if nothing is emulated."""
        if self.cost is None:
            return None
        seconds = self.cost.iteration(decoded, cached) + self.cost.prefill_token * prefilled
        self._charged = seconds + searched * self.draft_seconds
        return seconds

    def end(self, *, is_idle: bool) -> None:
        """Wait until the iteration that has begun should end; `is_idle`: no other follows."""
        if self._due is None:
            return
        self._due += self._charged / self.scale
        self.modelled += self._charged
        if (early := self._due - self._clock()) > 0:
            self._sleep(early)
        if is_idle:
            self.rest()

    def rest(self) -> None:
        """Note that there is nothing to do for now: what is late by then stays so."""
        if self._due is not None:
            self.behind += max(self._clock() - self._due, 0.0) * self.scale
        self._due = None

    def hold_training(
        self, charged: Counter[str], since: float | None, *, num_steps: int = 0
    ) -> None:
        """Hold training on so many tokens, by the name of their cost, which are counted anew then,
        and `num_steps` steps; it began at `since`, or not at all."""
        if (cost := self.cost) is not None and since is not None:
            tokens = sum(getattr(cost, name) * count for name, count in charged.items())
            self.hold(tokens + cost.train_step * num_steps, since)
        charged.clear()

    def hold(self, seconds: float, since: float) -> None:
        """Wait until something that happens alone, and began at `since` by `now`, has lasted
        `seconds` of the cluster; no iteration runs meanwhile."""
        self.modelled += seconds
        if (early := since + seconds - self.now()) > 0:
            self._sleep(early / self.scale)
        else:
            self.behind -= early
        self._due = None

    def behind_share(self) -> float:
        """Return by what share work since the last call took longer than it should have."""
        share = self.behind / max(self.modelled, 1e-9)
        self.modelled = self.behind = 0.0
        return share


def learner_cost(cost: CostModel, learner: LearnerConfig, *, is_warmup: bool = False) -> CostModel:
    """Return the cost of all that the learner computes for a token of a batch, in each pass and
    before the first: by the policy, its reference, a critic and a teacher on its ranks, each as
    large as the policy. `Learner.charged` counts the passes that it makes. `is_warmup`: in steps
    that train the critic alone."""
    passes, teacher = learner.num_iterations, learner.distillation
    forward = float(learner.needs_proximal + learner.has_critic)  # passes without a gradient
    if learner.beta > 0.0:
        forward += 2 if learner.kl_in == "reward" else 1
    if learner.needs_whole_responses and not is_warmup:
        # Before each optimizer step, or all but the first.
        forward += passes - learner.needs_proximal / learner.num_minibatches
    if teacher.is_used and not teacher.is_served:
        forward += passes * (not is_warmup) if teacher.is_divergence else 1
    trained = 1 + learner.has_critic - is_warmup  # models; in a warm-up the policy is only scored
    forward += passes * is_warmup
    train = passes * trained * cost.train_token + forward * cost.measure_token
    measure = (passes + learner.needs_proximal) * cost.measure_token
    measured = train if learner.trains_on_all else measure
    return dataclasses.replace(cost, train_token=train, measure_token=measured)


def draft_seconds(config: Config) -> float:
    """Return the seconds of the cluster that looking for a draft takes for one response."""
    emulation = config.emulation
    return DRAFT_SECONDS * (emulation.tokens_per_token if emulation.is_used else 1.0)


def pace_of(config: Config) -> Pace:
    """Return the pace of a worker of this run."""
    profile, emulation = profile_of(config), config.emulation
    if profile is None:
        return Pace()
    assert emulation.train_devices is not None, "see `resolved`"
    return Pace(
        profile.cost(emulation.train_devices),
        emulation.time_scale,
        draft_seconds=draft_seconds(config),
    )
