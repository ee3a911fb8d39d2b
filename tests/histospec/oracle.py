"""What index and search are, said directly: plain lists, every suffix compared with every place."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rhymeflow.histospec import build_draft, kernels
from rhymeflow.histospec.search import _weights


@dataclass
class Text:
    """One response with the tail of its prompt before it."""

    prompt: int
    sample: int
    noise: int
    tail: int
    tokens: list[int] = field(default_factory=list)
    is_finished: bool = False
    merit: float = 1.0
    reward: float | None = None


class History:
    """An index with room for all of it."""

    def __init__(self) -> None:
        self.texts: list[Text] = []
        self.order: list[tuple[int, int]] = []
        """Text and place of all tokens, as they came."""

    def begin(self, prompt, tail, *, sample, noise_epoch):
        self.texts.append(Text(prompt, sample, noise_epoch, len(tail)))
        self.extend(len(self.texts) - 1, tail)
        return len(self.texts) - 1

    def extend(self, number, tokens):
        text = self.texts[number]
        self.order += [(number, len(text.tokens) + i) for i in range(len(tokens))]
        text.tokens += tokens

    def finish(self, number, reward):
        text = self.texts[number]
        text.is_finished, text.reward = True, reward
        if reward is None:
            return
        judged = [t for t in self.texts if t.prompt == text.prompt and t.reward is not None]
        rewards = np.array([t.reward for t in judged])
        for other in judged:
            over = (other.reward - rewards.mean()) / rewards.std() if rewards.std() > 1e-6 else 0.0
            other.merit = 2.0 ** min(max(over, -2.0), 2.0)

    def agreement(self, number, place, context):
        """Tokens up to this place that are the context's last ones."""
        tokens, matched = self.texts[number].tokens, 0
        while (
            matched < min(kernels.LONGEST_MATCH, len(context), place + 1)
            and tokens[place - matched] == context[-1 - matched]
        ):
            matched += 1
        return matched


def found(histories, whose, context):
    """Candidates found by suffix: (source, text, place after the match, matched, kind, merit)."""
    candidates = []
    for length, scope in zip(kernels.LEVELS, kernels.SCOPES, strict=True):
        if len(candidates) >= kernels.ENOUGH or length > len(context):
            continue
        for source, history in enumerate(histories):
            # What is left is shared with the indexes that come after this one.
            share = kernels.INDEXES - source
            most = len(candidates) + -(-(kernels.FOUND - len(candidates)) // share)
            for number, place in _chain(history, length, scope, *whose, context):
                text = history.texts[number]
                if len(candidates) >= most:
                    break
                here = (source, number, place + 1)
                known = any(here == candidate[:3] for candidate in candidates)
                matched = history.agreement(number, place, context)
                if place + 1 < len(text.tokens) and not known and matched >= length:
                    candidates.append((*here, matched, _kind(text, *whose), text.merit))
    return candidates


def _chain(history, length, scope, prompt, sample, noise, context):
    """The newest places at which this suffix ends."""
    members = []
    for number, place in reversed(history.order):
        text = history.texts[number]
        here = text.tokens[max(0, place + 1 - length) : place + 1]
        if here == context[-length:] and _counts(text, place, scope, prompt, sample, noise):
            members.append((number, place))
    return members[: kernels._STEPS]


def _counts(text, place, scope, prompt, sample, noise):
    if scope == kernels.OF_ALL:
        return place + 1 >= text.tail
    if scope == kernels.OF_THE_PROMPT:
        return text.prompt == prompt
    return (text.prompt, text.sample, text.noise) == (prompt, sample, noise)


def _kind(text, prompt, sample, noise):
    if text.prompt != prompt:
        return kernels.KIND_SHARED
    if (text.sample, text.noise) == (sample, noise) and not text.is_finished:
        return kernels.KIND_SELF
    return kernels.KIND_OWN


def aligned(history: History, prompt, sample, noise):
    """Responses that share prompt, sample and noise, the newest first."""
    return [
        number
        for number in reversed(range(len(history.texts)))
        for text in [history.texts[number]]
        if (text.prompt, text.sample, text.noise) == (prompt, sample, noise) and text.is_finished
    ]


class Sequence:
    """A running response and its candidates."""

    def __init__(self, histories, prompt, prompt_ids, tokens, *, sample, noise_epoch):
        self.histories = histories
        self.who = (prompt, sample, noise_epoch)
        self.context = [*prompt_ids, *tokens]
        self.length = len(tokens)
        self.came = 0
        self.age = 0
        self.needed = 1
        self.found: list[tuple] = []
        self.aligned = [
            (history, number)
            for history in histories
            for number in (aligned(history, *self.who) if noise_epoch >= 0 else [])
            if self._place(history, number) < len(history.texts[number].tokens)
        ][: kernels.ALIGNED]

    def _place(self, history, number):
        """Where the token before the next one stands."""
        return history.texts[number].tail + self.length - 1

    def extend(self, tokens):
        self.context += tokens
        self.length += len(tokens)
        self.came += len(tokens)

    def _says(self, source, number, place, came):
        """Whether a candidate said what came."""
        said = self.histories[source].texts[number].tokens[place : place + len(came)]
        return len(came) <= kernels.LONGEST_MATCH and said == came

    def candidates(self):
        """(what comes next, matched, kind, merit), brought up to date."""
        context = self.context[-kernels.MEMORY :]
        came = self.context[len(self.context) - self.came :]
        self.found = [
            (source, n, place + len(came), min(matched + len(came), kernels.LONGEST_MATCH), *rest)
            for source, n, place, matched, *rest in self.found
            if self._says(source, n, place, came)
        ]
        self.age += self.came
        self.came = 0
        if len(self.found) < self.needed or self.age >= kernels.STALE_AFTER:
            self.found = found(self.histories, self.who, context)
            self.needed = min(kernels.KEPT, max(len(self.found), 1))
            self.age = 0
        return [
            (self.histories[source].texts[number].tokens[place:], *rest)
            for source, number, place, *rest in self.found
        ] + [
            (history.texts[n].tokens[place + 1 :], history.agreement(n, place, context), 3, 1.0)
            for history, n in self.aligned
            for place in [self._place(history, n)]
            if place + 1 < len(history.texts[n].tokens)
        ]


def draft(sequence, most, *, state, ranking, is_tree, rates):
    """Nodes (token, parent, path probability, class) of a draft."""
    weights = _weights()
    pool = [
        (text, matched, kind, weights[kind, matched], np.float32(merit))
        for text, matched, kind, merit in sequence.candidates()
    ]
    nodes, waiting = [], _options(pool, [], -1, np.float32(1), state, ranking, is_tree, rates)
    while waiting and len(nodes) < most:
        best = max(waiting, key=lambda node: node[2])
        waiting.remove(best)
        path, parent, probability, its_class = best
        nodes.append((path[-1], parent, probability, its_class))
        waiting += _options(pool, path, len(nodes) - 1, probability, state, ranking, is_tree, rates)
    return nodes


def _options(pool, path, parent, probability, state, ranking, is_tree, rates):
    """Nodes that may follow a path."""
    depth = len(path)
    here = [one for one in pool if one[0][:depth] == path and len(one[0]) > depth]
    options = {}
    for text, *voter in here:
        options.setdefault(text[depth], []).append(voter)
    scored = []
    for token, voters in options.items():
        votes, liked = np.float32(0), np.float32(0)
        for _, _, vote, merit in voters:
            votes += vote
            liked += vote * merit
        score = {"reward": liked / votes, "frequency": votes, "combined": liked}[ranking]
        scored.append((score, token, voters))
    total = sum((score for score, *_ in scored), np.float32(build_draft.NOBODY))
    judged = []
    for score, token, voters in scored:
        share = score / total
        its_class = build_draft.class_of(share, state, max(voter[1] for voter in voters))
        judged.append((rates[its_class], share, token, its_class))
    judged.sort(key=lambda option: (-option[0], -option[1]))
    kept = judged[: build_draft.BRANCHES if is_tree else 1]
    return [([*path, token], parent, probability * rate, its) for rate, _, token, its in kept]
