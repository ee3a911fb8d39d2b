"""How long responses were, and how long those under way will be.

Hears what groups are opened, what finishes and what ends; keeps each prompt's record
(`prompts.py`); learns what predictions were worth (`evidence.py`), what they were off by
(`residuals.py`), and makes predictions (`outlook.py`). A prediction from a history that is wrong is
no worse than one without.

Holds true: expectations are in (made, longest] and never fall as `made` grows; the same
facts and questions give the same answers; a fact about a group that is not open, or told twice,
changes nothing. What is learned is learned from groups that have ended, all that ended since the
last question or opening at once, so it does not matter who of them was first; before there are any,
what lengths are like is learned from the first that finish. Predictions are made anew after some
dozen responses, so that they can be kept between. Knows no clock and no tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import exp, inf, log, sqrt

from rhymeflow.core.lengths import siblings
from rhymeflow.core.lengths.correction import Correction
from rhymeflow.core.lengths.evidence import Evidence, Example
from rhymeflow.core.lengths.hindsight import Calibration, Hindsight
from rhymeflow.core.lengths.opened import OpenGroup
from rhymeflow.core.lengths.outlook import NOBODY, Outlook, Past, Standing, marks
from rhymeflow.core.lengths.prompts import ByReward, PromptLengths
from rhymeflow.core.lengths.residuals import Residuals, exponential_points, normal_points, spread
from rhymeflow.core.types import GroupId, TrajectoryId

_RECENT = 1024
"""Responses whose residuals are kept, of each kind."""
_BEGINNING = 256
"""Responses of groups that ended, until which those of open groups say what lengths are like."""
_RENEW = 32
"""Responses that were learned from, after which predictions are made anew."""
_BEYOND = 0.25
"""A response that was ended at the longest would have been longer: by so much, as a logarithm."""
_NEAR = -1.5
"""Standard deviations below the guess, from where on predictions of what remains are corrected."""
_NORMAL = normal_points()


class LengthHistory:
    """Lengths by prompt and by group, and what they foretell.

    Args:
        longest: tokens at which a response ends whatever it says.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._marks = marks(longest)
        self._prior = exponential_points(longest / 4)
        self._open: dict[GroupId, OpenGroup] = {}
        self._ended: list[OpenGroup] = []
        self._prompts: dict[int, PromptLengths] = {}
        self._size = 1
        self._first: list[float] = []
        self._learned = self._unused = 0
        self._next_look = 1
        self._hindsight, self._correction = Hindsight(), Correction()
        mean = sum(self._prior) / len(self._prior)
        self._evidence = Evidence(mean, spread(self._prior) ** 2)
        self._unseen: deque[float] = deque(maxlen=_RECENT)
        self._known: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._sibling: deque[float] = deque(maxlen=_RECENT)
        self._edition = 0
        self._renew()

    # -- facts -------------------------------------------------------------------------------

    def open(self, group: GroupId, prompt: int, epoch: int) -> None:
        """A group of this prompt (row number) was drawn."""
        if group in self._open:
            return
        self._settle()
        record, past = self._prompts.get(prompt), None
        if record is not None:
            trust = self._evidence.trust(record.weight)
            past = Past(record.logs / record.weight, trust)
        opened = self._open[group] = OpenGroup(prompt, epoch, past)
        opened.base, opened.guess = self._outlook.base, self._outlook.guess(past)
        opened.low, opened.high = self._outlook.interval(past)

    def finished(self, trajectory: TrajectoryId, length: int) -> None:
        """A response of an open group is complete, and was not cut short."""
        group = self._open.get(trajectory.group)
        if group is None or trajectory.member in group.lengths:
            return
        self._settle()
        length = min(max(1, length), self.longest)
        group.lengths[trajectory.member] = length
        group.total += log(length)
        group.curve = []
        self._size = max(self._size, trajectory.member + 1)
        if self._learned < _BEGINNING:
            self._first.append(log(length) + _BEYOND * (length == self.longest))
            if len(self._first) >= self._next_look:
                self._next_look = len(self._first) * 5 // 4 + 1
                self._renew()

    def rewarded(self, trajectory: TrajectoryId, reward: float) -> None:
        """A finished response of an open group is judged."""
        group = self._open.get(trajectory.group)
        if group is not None and trajectory.member in group.lengths:
            group.rewards.setdefault(trajectory.member, reward)

    def close(self, group: GroupId) -> None:
        """The group has ended: no more will be asked about it."""
        ended = self._open.pop(group, None)
        if ended is None or not ended.lengths:
            return
        self._ended.append(ended)
        for length in ended.lengths.values():
            covered = exp(ended.low) - 0.5 <= length <= exp(ended.high) + 0.5  # rounded
            self._hindsight.add(ended.past is not None, ended.guess, length, covered)

    # -- questions ---------------------------------------------------------------------------

    @property
    def skill(self) -> float:
        """How much of the variance of (log) lengths recent predictions explained, 0 to 1."""
        self._settle()
        return self._evidence.skill

    def expected(self, group: GroupId, made: int = 0) -> float:
        """Mean tokens, when complete, of a response of this group that has `made` and goes on."""
        if self._ended:
            self._settle()
        found = self._open.get(group)
        if found is None:
            found = self._nobody
        elif found.edition != self._edition:
            found.edition, found.curve = self._edition, []
        if made >= self.longest:
            return float(self.longest)
        above = bisect_right(self._marks, made) if made > 0 else 1
        curve = found.curve
        if above >= len(curve):
            self._extend(found, above)
        low = self._marks[above - 1]
        if made <= low:
            return curve[above - 1]
        share = (made - low) / (self._marks[above] - low)
        return curve[above - 1] + share * (curve[above] - curve[above - 1])

    def quantile(self, group: GroupId, q: float, made: int = 0) -> float:
        """The q-quantile of the same."""
        self._settle()
        if made >= self.longest:
            return float(self.longest)
        found = self._open.get(group)
        standing = NOBODY if found is None else found.standing
        return self._outlook.quantile(standing, min(max(q, 0.0), 1.0), max(made, 0))

    def of(self, prompt: int) -> PromptLengths | None:
        """What is remembered of a prompt whose groups have ended; not to be changed."""
        self._settle()
        return self._prompts.get(prompt)

    def by_reward(self, prompt: int) -> ByReward:
        """Mean tokens of its responses better than their group's mean, and of its others."""
        record = self.of(prompt)
        return ByReward(None, None) if record is None else record.by_reward()

    @property
    def worth(self) -> float:
        """The weight that predictions give to a prompt's history, 0 to 1.2."""
        self._settle()
        return self._evidence.worth

    def calibration(self) -> Calibration:
        """How good predictions were lately; asking has no influence on anything at all."""
        return self._hindsight.calibration(self._evidence.skill)

    def _extend(self, group: OpenGroup, last: int) -> None:
        """Work out expectations at the marks up to this one."""
        curve, standing = group.curve, group.standing
        for mark in self._marks[len(curve) : last + 1]:
            value = float(self.longest)
            if mark < self.longest:
                value = self._outlook.mean(standing, mark)
            curve.append(max(value, curve[-1]) if curve else value)

    # -- learning ----------------------------------------------------------------------------

    def _settle(self) -> None:
        """Learn from the groups that ended since the last question or fact."""
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        whole = [group for group in ended if 2 * len(group.lengths) >= self._size]
        if self._learned >= _BEGINNING:
            for group in whole:
                self._correct(group)
        self._evidence.learn([self._example(group) for group in whole])
        for group in whole:
            self._keep_residuals(group)
        for group in ended:
            self._remember(group)
        count = sum(len(group.lengths) for group in whole)
        self._learned += count
        self._unused += count
        if self._unused >= _RENEW:
            self._renew()

    def _deviation(self, group: OpenGroup) -> float | None:
        past = group.past
        return None if past is None else past.trust * (past.level - self._evidence.mean)

    def _example(self, group: OpenGroup) -> Example:
        count = len(group.lengths)
        mean = group.total / count
        scatter = sum((log(length) - mean) ** 2 for length in group.lengths.values())
        deviation = self._deviation(group)
        return Example(mean, count, scatter, deviation, group.base, group.guess)

    def _keep_residuals(self, group: OpenGroup) -> None:
        evidence, deviation = self._evidence, self._deviation(group)
        logs = [log(length) for length in group.lengths.values()]
        over = [_BEYOND * (length == self.longest) for length in group.lengths.values()]
        variance, guess = evidence.between, evidence.base
        if deviation is None:
            self._unseen.extend(a + b - guess for a, b in zip(logs, over, strict=True))
        else:
            self._known.extend((a + b - guess, deviation) for a, b in zip(logs, over, strict=True))
            variance, guess = evidence.beyond, guess + evidence.worth * deviation
        if len(logs) < 2:
            return
        for value, more in zip(logs, over, strict=True):
            centre, rest = siblings.level(
                guess, variance, evidence.within, group.total - value, len(logs) - 1
            )
            self._sibling.append((value + more - centre) / sqrt(evidence.within + rest))

    def _remember(self, group: OpenGroup) -> None:
        """Add to the prompt's record; those that did not finish were longer than the others."""
        evidence, count = self._evidence, len(group.lengths)
        level = group.total / count
        if count < self._size:
            guess = evidence.base + evidence.worth * (self._deviation(group) or 0.0)
            variance = evidence.between if group.past is None else evidence.beyond
            longest = log(max(group.lengths.values()))
            unfinished = self._size - count
            level, _ = siblings.level(
                guess, variance, evidence.within, group.total, count, unfinished, longest
            )
        record = self._prompts.setdefault(group.prompt, PromptLengths())
        record.add(group.epoch, level - evidence.drift, group.lengths)
        record.judge(group.lengths, group.rewards)

    def _correct(self, group: OpenGroup) -> None:
        """Go through a group once more, and see what was foretold at each mark."""
        outlook, lengths = self._outlook, sorted(group.lengths.values())
        size, total, finished = len(lengths), 0.0, 0
        for mark in self._marks[:-1]:
            while finished < size and lengths[finished] <= mark:
                total += log(lengths[finished])
                finished += 1
            if finished == size:
                break
            standing = Standing(group.past, finished, total)
            distance = outlook.distance(standing, log(mark)) if mark else -inf
            if distance < _NEAR:
                continue
            left = outlook.mean(standing, mark, corrected=False) - mark
            over = sum(lengths[finished:]) / (size - finished) - mark
            self._correction.learn(
                finished, self._size, distance, responses=size - finished, ratio=over / left
            )

    def _renew(self) -> None:
        """Make predictions from what is known now."""
        evidence = self._evidence
        self._unused = 0
        self._edition += 1
        base, worth = evidence.base, evidence.worth
        if self._learned < _BEGINNING:
            logs = [*self._first, *self._prior[4::8]]
            base = sum(logs) / len(logs)
            unseen: Sequence[float] = [value - base for value in self._first]
        else:
            self._first, unseen = [], self._unseen
        of_unseen = Residuals(unseen, [value - base for value in self._prior], trust=4.0)
        known = [value - worth * deviation for value, deviation in self._known]
        share = sqrt((evidence.within + evidence.beyond) / (evidence.within + evidence.between))
        self._outlook = Outlook(
            longest=self.longest,
            size=self._size,
            drift=evidence.drift,
            average=base - evidence.drift,
            worth=worth,
            within=evidence.within,
            between=evidence.between,
            beyond=evidence.beyond,
            unseen=of_unseen,
            known=Residuals(known, [share * value for value in of_unseen.points], trust=8.0),
            siblings=Residuals(self._sibling, _NORMAL, trust=8.0),
            correction=self._correction,
        )
        self._nobody = OpenGroup(-1, 0, None)
