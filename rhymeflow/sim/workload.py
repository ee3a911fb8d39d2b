"""The workload of a simulation: prompts, and the length, reward and turns of each response.

It depends only on (seed, prompt, epoch, member), so all schedules are compared on one workload.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import exp, log, log1p, sqrt
from pathlib import Path
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np
import xxhash

from rhymeflow.config import Config, WorkloadConfig
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.sim.drafts import expected_rate, rate_of
from rhymeflow.sim.response import Observation
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS

_NORMAL = NormalDist()
_REACH, _PER_UNIT = 6.0, 64
"""Lengths are tabulated at standard normal scores from minus to plus this, so many per unit."""
_SCORES = np.linspace(-_REACH, _REACH, int(2 * _REACH * _PER_UNIT) + 1)
_WEIGHTS = np.exp(-(_SCORES**2) / 2)
_WEIGHTS /= _WEIGHTS.sum()


class Lengths:
    """Lengths from 1 to `longest` tokens, of a configured distribution. Raises `UserError` if no
    scale of it has the configured mean."""

    def __init__(self, config: WorkloadConfig, longest: int) -> None:
        self.mean = mean = longest / 4 if config.mean_length is None else config.mean_length
        table = _scaled(config.sigma * _SCORES, mean, longest)
        self.rho = _rho(table, config.prompt_variance_share)
        self._table: list[float] = table.tolist()

    def at(self, score: float) -> int:
        """Return the length, in tokens, at a standard normal score."""
        position = (min(max(score, -_REACH), _REACH) + _REACH) * _PER_UNIT
        index = min(int(position), len(self._table) - 2)
        low, high = self._table[index], self._table[index + 1]
        return max(1, round(low + (position - index) * (high - low)))


# -- fitting the table -----------------------------------------------------------------------------


def _scaled(shape: np.ndarray, mean: float, longest: int) -> np.ndarray:
    """Return the lengths at `_SCORES`, scaled and clipped so that they have this mean."""

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
    """Return the correlation of scores at which prompts explain this share of the variance."""
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
    """Return the least x in the interval at which a monotone condition holds."""
    for _ in range(50):
        middle = (low + high) / 2
        if reached(middle):
            high = middle
        else:
            low = middle
    return high


COMPUTED = "packing/computed_share"  # a run's metric; see `learner/packing.py`
DECIDED = 0.2  # share of prompts whose responses all get the same reward
SIGMA = 1.0  # standard deviation of the logarithm of an environment's seconds
MOST_TURNS = 8  # cap of a response's turns, in means: one in a thousand would have more


class SimulatedPrompt(NamedTuple):
    """A prompt requested from the data."""

    row: int
    epoch: int
    tokens: int


class ResponseSpec(NamedTuple):
    """The length, reward and turns of a response."""

    length: int  # tokens that the policy will generate
    reward: float
    observations: list[Observation]  # from its environment; empty without one
    acceptance: Sequence[float] = (0.0,)  # of drafted tokens, by turn; others have the last's
    ending: float = 0.0  # seconds that its environment took to end the episode


class Synthetic:
    """A workload whose lengths follow a configured distribution, with a level for each prompt.

    A prompt's level is a standard normal number that drifts over epochs as an autoregressive
    process, which keeps its distribution. Rewards are 0 or 1: for a share `DECIDED` of the prompts
    all responses have the same, for others each is 1 with a probability that the prompt has.
    """

    def __init__(self, config: Config) -> None:
        self.config = config.simulation.workload
        self._seed, self._acceptance = config.run.seed, config.simulation.acceptance
        self._lengths = Lengths(self.config, config.rollout.max_completion_length)
        self._prompt_weight = sqrt(self._lengths.rho)
        self._response_weight = sqrt(1 - self._lengths.rho)
        mean = self.config.mean_turns
        self._most_turns = 1 if mean == 1 else round(MOST_TURNS * mean)
        self.longest_prompt = self.config.prompt_tokens
        self.most_observed = (self._most_turns - 1) * self.config.observation_tokens
        """Most tokens of observations in one response."""

    computed_share = 1.0  # share of a batch's tokens that the learner computes

    def prompt(self, number: int) -> SimulatedPrompt:
        """Return the prompt that is requested as `number`, from 0: epoch after epoch, in order."""
        epoch, row = divmod(number, self.config.num_prompts)
        return SimulatedPrompt(row, epoch, self.config.prompt_tokens)

    def response(self, row: int, epoch: int, member: int) -> ResponseSpec:
        """Return a response, whose length combines the prompt's level and a score of its own."""
        own = _NORMAL.inv_cdf(uniform(self._seed, b"length", row, epoch, member))
        score = self._prompt_weight * self._level(row, epoch) + self._response_weight * own
        length = self._lengths.at(score)
        observations = self._observations(row, epoch, member, length)
        rate = expected_rate(self._acceptance, length / self._lengths.mean, is_known=epoch > 0)
        return ResponseSpec(length, self._reward(row, epoch, member), observations, (rate,))

    def _reward(self, row: int, epoch: int, member: int) -> float:
        chance = uniform(self._seed, b"chance", row)
        if uniform(self._seed, b"decided", row) < DECIDED:
            return float(chance < 0.5)
        return float(uniform(self._seed, b"reward", row, epoch, member) < chance)

    def _observations(self, row: int, epoch: int, member: int, length: int) -> list[Observation]:
        """Split the response into turns of equal length: geometric number, lognormal seconds."""
        config, where = self.config, (row, epoch, member)
        if config.mean_turns == 1:
            return []
        draw = uniform(self._seed, b"turns", *where)
        num_turns = 1 + int(log(draw) / log1p(-1 / config.mean_turns))
        num_turns = min(num_turns, length, self._most_turns)
        return [
            Observation(
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
    """The prompts and responses of a run's event store, repeated endlessly.

    A response that the run did not finish, or never requested, is replaced by another one of its
    prompt, or of any prompt if that has none, chosen by hash. Responses that were finished early
    are left out. Environments answer as recorded, after the same time. The acceptance of drafts is
    that of each turn's own iterations, if the response was drafted for, else as configured. The
    time of rewards is left out.
    Raises `UserError` if there is no run, or no response was finished in it.
    """

    def __init__(self, run_dir: Path, config: Config, *, newest: int | None = None) -> None:
        """`newest`: number of groups to read, the last with a finished response; None: all."""
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
            all_observations, endings = _recorded_answers(reader)
            keeps_cache = config.rollout.kv_cache_on_pull == "keep"
            decodes = _recorded_decodes(reader, first, all_observations, keeps_cache=keeps_cache)
        if not responses:
            raise UserError(f"{run_dir}: no response was finished in this run")
        rows = metrics.read(run_dir).values()
        self.computed_share = fmean([row[COMPUTED] for row in rows if COMPUTED in row] or [1.0])
        self._prompts = [SimulatedPrompt(*found) for found in dict.fromkeys(groups)]
        self._epochs = 1 + max(prompt.epoch for prompt in self._prompts)
        self._known: dict[tuple[int, int, int], ResponseSpec] = {}
        self._all: list[ResponseSpec] = []
        self._by_row: dict[int, list[ResponseSpec]] = {}
        mean_length = fmean(length for *_, length, _ in responses)
        for row, epoch, member, group, length, reward in responses:
            observations = all_observations.get((group, member), [])
            sampled = min(length - sum(each.tokens for each in observations), longest)
            observations = [each for each in observations if each.after < sampled]
            turns = decodes.get((group, member), {})
            if any(turn.drafted for turn in turns.values()):
                numbers = range(max(turns) + 1)
                acceptance = [rate_of(*turns.get(number, ([], 0, 0))) for number in numbers]
            else:
                relative, configured = length / mean_length, config.simulation.acceptance
                acceptance = [expected_rate(configured, relative, is_known=epoch > 0)]
            ending = endings.get((group, member), 0.0)
            response = ResponseSpec(sampled, reward, observations, acceptance, ending)
            self._known[row, epoch, member] = response
            self._all.append(response)
            self._by_row.setdefault(row, []).append(response)
        self.longest_prompt = max(prompt.tokens for prompt in self._prompts)
        observed = (sum(each.tokens for each in spec.observations) for spec in self._all)
        self.most_observed = max(observed)

    def prompt(self, number: int) -> SimulatedPrompt:
        """Return the prompt of request `number`, from 0, then all again in new epochs."""
        repetition, index = divmod(number, len(self._prompts))
        recorded = self._prompts[index]
        return recorded._replace(epoch=recorded.epoch + repetition * self._epochs)

    def response(self, row: int, epoch: int, member: int) -> ResponseSpec:
        """Return the recorded response, or the one that replaces it."""
        if (row, epoch, member) in self._known:
            return self._known[row, epoch, member]
        others = self._by_row.get(row, self._all)
        return others[int(uniform(self._seed, b"other", row, epoch, member) * len(others))]


def _first_of(reader: TrajectoryReader, newest: int) -> int:
    """Return the first of the last `newest` groups with a finished response."""
    rows = reader.query(
        "SELECT DISTINCT group_id FROM trajectories WHERE group_id >= 0"
        " ORDER BY group_id DESC LIMIT ?",
        newest,
    )
    return min((group for (group,) in rows), default=0)


_Observations = dict[tuple[int, int], list[Observation]]


class _Turn(NamedTuple):
    """The iterations of a turn, but those that prefilled, which make one token without a draft."""

    tokens: list[int]  # that each decode made; one begins where something had to be prefilled
    steps: int  # iterations of them all
    drafted: int  # tokens


def _recorded_decodes(
    reader: TrajectoryReader, first: int, observations: _Observations, *, keeps_cache: bool
) -> dict[tuple[int, int], dict[int, _Turn]]:
    """Return the turns by (group, member), from `first` on, and by number. Of the members of a
    group that begin on the same instance, the first prefills the prompt, and the others draft at
    once."""
    found: dict[tuple[int, int], dict[int, _Turn]] = {}
    with_prompt: set[tuple[int, str]] = set()
    last: tuple[object, ...] = ()
    sampled = 0  # by the policy, in this response
    for group, member, start, length, version, instance, steps, drafted in reader.query(
        "SELECT group_id, member, start, length, version, instance, steps, drafted FROM spans"
        " WHERE group_id >= ? ORDER BY 1, 2, 3",
        first,
    ):
        under = 0 if keeps_cache else version
        is_first = (group, member) not in found
        if is_first:
            sampled, is_prefilled = 0, (group, instance) not in with_prompt
        else:
            is_prefilled = last != (group, member, start, under, instance)
        # One iteration that drafted was no prefill: something else had put all into the cache.
        is_prefilled = is_prefilled and not (steps == 1 and drafted)
        if is_first and is_prefilled:
            with_prompt.add((group, instance))
        turns = found.setdefault((group, member), {})
        ends = [each.after for each in observations.get((group, member), ())]
        number = bisect_right(ends, sampled)
        tokens, all_steps, all_drafted = turns.get(number, _Turn([], 0, 0))
        if not tokens or is_prefilled:
            tokens.append(0)
        tokens[-1] += length - is_prefilled
        turns[number] = _Turn(tokens, all_steps + steps - is_prefilled, all_drafted + drafted)
        sampled += length
        last = group, member, start + length, under, instance
    return found


def _recorded_answers(
    reader: TrajectoryReader,
) -> tuple[_Observations, dict[tuple[int, int], float]]:
    """Return by (group, member) the environments' observations, in order, and the seconds of the
    answer that ended the episode. An answer's seconds are those from when the turn was over, so
    that they hold what it waited for as well."""
    ends: dict[tuple[int, int], tuple[float, int]] = {}
    """When each response's last turn ended, and its tokens then."""
    observations: _Observations = {}
    endings: dict[tuple[int, int], float] = {}
    for time, kind, group, member, length, called in reader.query(
        "SELECT time, kind, json_extract(body, '$.trajectory[0]'),"
        " json_extract(body, '$.trajectory[1]'), json_extract(body, '$.length'),"
        " json_extract(body, '$.observed') FROM events"
        " WHERE kind IN ('TurnEnded', 'Observed', 'EpisodeEnded') ORDER BY seq"
    ):
        if kind == "TurnEnded":
            ends[group, member] = time, length
            if called:  # an agent's calls, which are in the response once they are answered
                last = observations[group, member].pop()
                observations[group, member].append(last._replace(tokens=last.tokens + called))
            continue
        ended, before = ends[group, member]
        if kind == "EpisodeEnded":
            endings[group, member] = time - ended
            continue
        earlier = observations.setdefault((group, member), [])
        after = before - sum(each.tokens for each in earlier)
        earlier.append(Observation(after, length - before, time - ended))
    return observations, endings


Workload = Synthetic | RecordedWorkload
"""Where prompts, lengths and rewards come from."""


def workload(config: Config, run_dir: Path | None) -> Workload:
    """Return the workload of a run, or the configured one; `UserError` as their classes say."""
    return Synthetic(config) if run_dir is None else RecordedWorkload(run_dir, config)


def uniform(seed: int, purpose: bytes, *numbers: int) -> float:
    """Hash the arguments to a number in (0, 1)."""
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    bits = xxhash.xxh3_64_intdigest(purpose + packed, seed=seed & 0xFFFF_FFFF_FFFF_FFFF)
    return ((bits >> 11) + 0.5) * 2.0**-53
