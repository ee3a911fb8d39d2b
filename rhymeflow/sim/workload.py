"""What the simulated run is given: prompts, and for each response its length and its reward.

All of it follows from (seed, prompt, epoch, member), so all schedules are compared on one workload.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import exp, log, log1p, sqrt
from pathlib import Path
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np
import xxhash

from rhymeflow.config import Config, WorkloadConfig
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.sim.response import Answer
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS

_NORMAL = NormalDist()
_REACH = 6.0
_PER_UNIT = 64
_SCORES = np.linspace(-_REACH, _REACH, int(2 * _REACH * _PER_UNIT) + 1)
_WEIGHTS = np.exp(-(_SCORES**2) / 2)
_WEIGHTS /= _WEIGHTS.sum()


class Lengths:
    """Lengths 1 .. `longest` of a configured distribution.

    Raises:
        UserError: no scale of the distribution has the mean that is asked for.
    """

    def __init__(self, config: WorkloadConfig, longest: int) -> None:
        mean = longest / 4 if config.mean_length is None else config.mean_length
        table = _scaled(config.sigma * _SCORES, mean, longest)
        self.rho = _rho(table, config.prompt_variance_share)
        self._table: list[float] = table.tolist()

    def at(self, score: float) -> int:
        """The length at a normal score."""
        position = (min(max(score, -_REACH), _REACH) + _REACH) * _PER_UNIT
        index = min(int(position), len(self._table) - 2)
        low, high = self._table[index], self._table[index + 1]
        return max(1, round(low + (position - index) * (high - low)))


# -- fitting the table -----------------------------------------------------------------------------


def _scaled(shape: np.ndarray, mean: float, longest: int) -> np.ndarray:
    """Lengths at the scores, scaled and cut off so that they have this mean."""

    def lengths(scale: float) -> np.ndarray:
        return np.exp(np.clip(shape + scale, 0.0, log(longest)))

    low, high = -float(shape.max()), log(longest) - float(shape.min())
    if not 1 < mean < longest:
        raise UserError(
            f"simulation.workload.mean_length: {mean:g} is not the mean of responses of 1 to "
            f"{longest} tokens (rollout.max_completion_length)"
        )
    return lengths(_bisect(lambda scale: float(lengths(scale) @ _WEIGHTS) >= mean, low, high))


def _rho(table: np.ndarray, share: float) -> float:
    """The correlation of scores at which the prompt explains this share of the variance."""
    if share in (0.0, 1.0):
        return share
    mean = float(table @ _WEIGHTS)
    variance = float(table**2 @ _WEIGHTS) - mean**2
    coarse, weights = _SCORES[::8], _WEIGHTS[::8] / _WEIGHTS[::8].sum()

    def explains(rho: float) -> bool:
        scores = sqrt(rho) * coarse[:, None] + sqrt(1 - rho) * coarse[None, :]
        of_prompt = np.interp(scores, _SCORES, table) @ weights
        return float(of_prompt**2 @ weights) - mean**2 >= share * variance

    return _bisect(explains, 0.0, 1.0)


def _bisect(reached: Callable[[float], bool], low: float, high: float) -> float:
    """The least x in the interval at which a condition that never becomes false again holds."""
    for _ in range(50):
        middle = (low + high) / 2
        if reached(middle):
            high = middle
        else:
            low = middle
    return high


COMPUTED = "packing/computed_share"  # the metric of a run; see `learner/packing.py`
DECIDED = 0.2  # share of prompts whose responses all get the same reward
SIGMA = 1.0  # standard deviation of the logarithm of an environment's seconds
MOST_TURNS = 8  # of a response, in times the mean: one of a thousand would have more


class SimulatedPrompt(NamedTuple):
    """A prompt requested from the data."""

    row: int
    epoch: int
    tokens: int


class ResponseSpec(NamedTuple):
    """What a response will be."""

    length: int  # tokens that the policy will generate
    reward: float
    answers: list[Answer]  # of its environment; empty without one


class Synthetic:
    """Lengths of a configured distribution, with a level of each prompt.

    A prompt's level is a normal number that drifts from epoch to epoch (autoregressive, so that its
    distribution stays). Rewards are 0 or 1: for `DECIDED` of the prompts the same for all
    responses, else 1 with a probability of the prompt's own.
    """

    def __init__(self, config: Config) -> None:
        self.config = config.simulation.workload
        self._seed = config.run.seed
        self._lengths = Lengths(self.config, config.rollout.max_completion_length)
        self._of_prompt = sqrt(self._lengths.rho)
        self._of_response = sqrt(1 - self._lengths.rho)
        mean = self.config.mean_turns
        self._most_turns = 1 if mean == 1 else round(MOST_TURNS * mean)
        self.longest_prompt = self.config.prompt_tokens
        self.most_observed = (self._most_turns - 1) * self.config.observation_tokens
        """Most tokens that environments answer in one response, by the most turns."""

    computed_share = 1.0  # of a batch's tokens the learner computes all, as far as is known

    def prompt(self, number: int) -> SimulatedPrompt:
        """Epoch after epoch, in order: prompts do not differ but by their hashes."""
        epoch, row = divmod(number, self.config.num_prompts)
        return SimulatedPrompt(row, epoch, self.config.prompt_tokens)

    def response(self, row: int, epoch: int, member: int) -> ResponseSpec:
        """A length by the prompt's level and the response's own score."""
        own = _NORMAL.inv_cdf(uniform(self._seed, b"length", row, epoch, member))
        score = self._of_prompt * self._level(row, epoch) + self._of_response * own
        length = self._lengths.at(score)
        answers = self._answers(row, epoch, member, length)
        return ResponseSpec(length, self._reward(row, epoch, member), answers)

    def _reward(self, row: int, epoch: int, member: int) -> float:
        chance = uniform(self._seed, b"chance", row)
        if uniform(self._seed, b"decided", row) < DECIDED:
            return float(chance < 0.5)
        return float(uniform(self._seed, b"reward", row, epoch, member) < chance)

    def _answers(self, row: int, epoch: int, member: int, length: int) -> list[Answer]:
        """Turns of about one length; how many is geometric, and each answer takes its own time."""
        config, where = self.config, (row, epoch, member)
        if config.mean_turns == 1:
            return []
        draw = uniform(self._seed, b"turns", *where)
        num_turns = 1 + int(log(draw) / log1p(-1 / config.mean_turns))
        num_turns = min(num_turns, length, self._most_turns)
        return [
            Answer(
                length * turn // num_turns,
                config.observation_tokens,
                config.environment_seconds * exp(SIGMA * score - SIGMA * SIGMA / 2),
            )
            for turn in range(1, num_turns)
            for score in (_NORMAL.inv_cdf(uniform(self._seed, b"answer", *where, turn)),)
        ]

    def _level(self, row: int, epoch: int) -> float:
        stays = self.config.epoch_correlation
        moves = sqrt(1 - stays * stays)
        level = _NORMAL.inv_cdf(uniform(self._seed, b"level", row, 0))
        for e in range(1, epoch + 1):
            level = stays * level + moves * _NORMAL.inv_cdf(uniform(self._seed, b"level", row, e))
        return level


class RecordedWorkload:
    """Prompts and responses as a run's event store has them, over and over.

    What the run did not finish (also a request beyond its end) is one of the prompt's other
    responses, or of all where the prompt has none, chosen by hash. Those that were cut short are
    left out. Environments answer what they did, after as long; the time that the last answer took,
    after which a response was complete, is left out, as that of rewards is.

    Raises:
        UserError: there is no run, or no response in it.
    """

    def __init__(self, run_dir: Path, config: Config, *, newest: int | None = None) -> None:
        """`newest`: so many groups, the last ones with a response that was finished; None: all."""
        self._seed, longest = config.run.seed, config.rollout.max_completion_length
        with open_undamaged(run_dir / EVENTS) as reader:
            first = 0 if newest is None else _first_of(reader, newest)
            groups = reader.query(
                "SELECT row, epoch, LENGTH(prompt_tokens) / 4 FROM groups WHERE group_id >= ?"
                " ORDER BY group_id",
                first,
            )
            responses = reader.query(
                "SELECT g.row, g.epoch, t.member, t.group_id, t.length, t.reward"
                " FROM trajectories t JOIN groups g USING (group_id) WHERE t.group_id >= ?"
                " AND t.reason != 'finished_early' AND t.length > 0 AND t.reward IS NOT NULL"
                " ORDER BY t.group_id, t.member",
                first,
            )
            answered = _recorded_answers(reader)
        if not responses:
            raise UserError(f"{run_dir}: no response was finished in this run")
        rows = metrics.read(run_dir).values()
        self.computed_share = fmean([row[COMPUTED] for row in rows if COMPUTED in row] or [1.0])
        self._prompts = [SimulatedPrompt(*found) for found in dict.fromkeys(groups)]
        self._epochs = 1 + max(prompt.epoch for prompt in self._prompts)
        self._known: dict[tuple[int, int, int], ResponseSpec] = {}
        self._all: list[ResponseSpec] = []
        self._by_row: dict[int, list[ResponseSpec]] = {}
        for row, epoch, member, group, length, reward in responses:
            heard = answered.get((group, member), [])
            sampled = min(length - sum(answer.tokens for answer in heard), longest)
            answers = [answer for answer in heard if answer.after < sampled]
            response = ResponseSpec(sampled, reward, answers)
            self._known[row, epoch, member] = response
            self._all.append(response)
            self._by_row.setdefault(row, []).append(response)
        self.longest_prompt = max(prompt.tokens for prompt in self._prompts)
        self.most_observed = max(sum(each.tokens for each in one.answers) for one in self._all)

    def prompt(self, number: int) -> SimulatedPrompt:
        """As they were requested; then from the beginning, in later epochs."""
        turn, index = divmod(number, len(self._prompts))
        found = self._prompts[index]
        return found._replace(epoch=found.epoch + turn * self._epochs)

    def response(self, row: int, epoch: int, member: int) -> ResponseSpec:
        """As it was recorded, or another one of its prompt's, or of any prompt's."""
        if (row, epoch, member) in self._known:
            return self._known[row, epoch, member]
        others = self._by_row.get(row, self._all)
        return others[int(uniform(self._seed, b"other", row, epoch, member) * len(others))]


def _first_of(reader: TrajectoryReader, newest: int) -> int:
    """The first of so many groups, the last of which something was finished."""
    rows = reader.query(
        "SELECT DISTINCT group_id FROM trajectories WHERE group_id >= 0"
        " ORDER BY group_id DESC LIMIT ?",
        newest,
    )
    return min((group for (group,) in rows), default=0)


def _recorded_answers(reader: TrajectoryReader) -> dict[tuple[int, int], list[Answer]]:
    """What environments answered, by group and member, in order."""
    ends: dict[tuple[int, int], int] = {}
    answers: dict[tuple[int, int], list[Answer]] = {}
    for kind, group, member, length, seconds in reader.query(
        "SELECT kind, json_extract(body, '$.trajectory[0]'), json_extract(body, '$.trajectory[1]'),"
        " json_extract(body, '$.length'), json_extract(body, '$.seconds') FROM events"
        " WHERE kind IN ('TurnEnded', 'Observed') ORDER BY seq"
    ):
        if kind == "TurnEnded":
            ends[group, member] = length
            continue
        heard = answers.setdefault((group, member), [])
        tokens = length - ends[group, member]
        after = ends[group, member] - sum(answer.tokens for answer in heard)
        heard.append(Answer(after, tokens, seconds))
    return answers


Workload = Synthetic | RecordedWorkload
"""Where prompts, lengths and rewards come from."""


def workload(config: Config, run_dir: Path | None) -> Workload:
    """The recorded run's, or the configured one. `UserError` if it cannot be had."""
    return Synthetic(config) if run_dir is None else RecordedWorkload(run_dir, config)


def uniform(seed: int, purpose: bytes, *numbers: int) -> float:
    """A number in (0, 1), by hash of these."""
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    bits = xxhash.xxh3_64_intdigest(purpose + packed, seed=seed & 0xFFFF_FFFF_FFFF_FFFF)
    return ((bits >> 11) + 0.5) * 2.0**-53
