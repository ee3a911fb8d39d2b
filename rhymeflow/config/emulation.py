"""Section `emulation`: a run on this machine that takes the time of a cluster."""

from __future__ import annotations

from rhymeflow.config.section import Positive, PositiveFloat, Section


class EmulationConfig(Section):
    """The timing of a cluster for a real run (docs/emulation.md): workers compute, and then wait
    until as much time has passed as a profile's devices would have taken. All times that the run
    shows and records are the cluster's. Intervals of the runtime, such as `run.worker_timeout` and
    `run.save_seconds`, stay those of this machine."""

    profile: str | None = None
    """Profile of the emulated model and devices, by name or file; `None`: nothing is emulated. It
    is also the cost model of routing. `rollout.max_kv_tokens` is its capacity, unless given."""
    devices: Positive | None = None
    """Devices of the cluster. With a staleness bound of 0 all of them generate and train in turn;
    else `train_devices` train, and the others are the instances."""
    train_devices: Positive | None = None
    """Devices that train, all as one learner; `None`: about two thirds. `rhymeflow simulate` shows
    what another division does."""
    time_scale: PositiveFloat = 80.0
    """Seconds of the cluster that pass in one second of this machine. A run that cannot keep up
    says so (`emulation/rollout_behind`, `emulation/learner_behind`)."""
    tokens_per_token: PositiveFloat = 100.0
    """Tokens of the emulated model that one token of the policy stands for, in iterations, cache,
    prefill and training. Everything is as coarse as that: one iteration of the policy is so many of
    the model, each with the same rows, drafts and accepted tokens."""
    reward_seconds: PositiveFloat | None = None
    """Seconds of the cluster that a reward takes at least; `None`: as long as here, scaled."""
    environment_seconds: PositiveFloat | None = None
    """Seconds of the cluster that an environment's answer takes at least; `None`: as long as here,
    scaled."""

    @property
    def is_used(self) -> bool:
        """Whether anything is emulated."""
        return self.profile is not None

    @property
    def scale(self) -> float:
        """Seconds that the run records per second of this machine; 1 if nothing is emulated."""
        return self.time_scale if self.is_used else 1.0

    @property
    def said(self) -> str:
        """What a run says beside its times; empty if nothing is emulated."""
        if not self.is_used:
            return ""
        return f"emulated: {self.devices} devices of {self.profile}, times from its cost model"
