"""What index and search are, said directly: plain lists, every suffix compared with every place."""

from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from rhymeflow.histospec import build_draft, kernels
from rhymeflow.histospec.index import Index, prompt_key
from rhymeflow.histospec.search import _weights


@dataclass(eq=False)
class Text:
    """One response with the tail of its prompt before it."""

    who: tuple[int, int, int]  # prompt, sample, noise
    tail: int
    tokens: list[int] = field(default_factory=list)
    is_finished: bool = False
    reward: float | None = None


class Recorded(Index):
    """An index, and all it was told as plain lists."""

    def __init__(self):
        super().__init__(max_tokens=4000, max_responses=64)
        self.texts: list[Text] = []
        self.order: list[tuple[Text, int]] = []  # text and place of all tokens, as they came

    def begin(self, prompt_ids, *, sample, noise_epoch):
        who = prompt_key(prompt_ids), sample, noise_epoch
        self.texts.append(Text(who, len(prompt_ids)))
        return super().begin(prompt_ids, sample=sample, noise_epoch=noise_epoch)

    def extend(self, response, tokens):
        text = self.texts[response - 1]
        self.order += [(text, len(text.tokens) + i) for i in range(len(tokens))]
        text.tokens += tokens
        super().extend(response, tokens)

    def finish(self, response, reward):
        text = self.texts[response - 1]
        text.is_finished, text.reward = True, reward
        super().finish(response, reward)

    def merit(self, text):
        """By how its reward compares with those of the prompt's other responses."""
        siblings = [t for t in self.texts if t.who[0] == text.who[0] and t.reward is not None]
        rewards = np.array([t.reward for t in siblings])
        if text.reward is None or rewards.std() <= 1e-6:
            return 1.0
        return 2.0 ** min(max((text.reward - rewards.mean()) / rewards.std(), -2.0), 2.0)


def found(indexes, who, context):
    """Candidates found by suffix: text, place after the match, tokens matched, kind, merit."""
    candidates = []
    for length, scope in zip(kernels.LEVELS, kernels.SCOPES, strict=True):
        if len(candidates) >= kernels.ENOUGH or length > len(context):
            continue
        for source, index in enumerate(indexes):
            # What is left is shared with the indexes that come after this one.
            share = kernels.INDEXES - source
            most = len(candidates) + -(-(kernels.FOUND - len(candidates)) // share)
            for text, place in _chain(index, length, scope, who, context):
                known = any(text is other and place + 1 == at for other, at, *_ in candidates)
                if len(candidates) < most and place + 1 < len(text.tokens) and not known:
                    matched = _agreement(text.tokens[: place + 1], context)
                    of_text = _kind(text, who), index.merit(text)
                    candidates.append((text, place + 1, matched, *of_text))
    return candidates


def _chain(index, length, scope, who, context):
    """The newest places at which this suffix ends."""
    members = []
    for text, place in reversed(index.order):
        is_in_scope = {
            kernels.OF_ALL: place + 1 >= text.tail,
            kernels.OF_THE_PROMPT: text.who[0] == who[0],
            kernels.OF_ITSELF: text.who == who,
        }[scope]
        if is_in_scope and text.tokens[: place + 1][-length:] == context[-length:]:
            members.append((text, place))
    return members[: kernels._STEPS]


def _agreement(said, context):
    """How many of the last tokens are the context's last ones."""
    pairs = zip(reversed(said), reversed(context[-kernels.LONGEST_MATCH :]), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _kind(text, who):
    if text.who[0] != who[0]:
        return kernels.KIND_SHARED
    return kernels.KIND_SELF if text.who == who and not text.is_finished else kernels.KIND_OWN


class Sequence:
    """A running response and its candidates."""

    def __init__(self, indexes, prompt_ids, *, sample, noise_epoch):
        self.indexes, self.who = indexes, (prompt_key(prompt_ids), sample, noise_epoch)
        self.context = list(prompt_ids)
        self.length = self.came = self.age = 0
        self.needed = 1
        self.found: list[tuple] = []
        texts = [text for index in indexes for text in reversed(index.texts) if noise_epoch >= 0]
        same = [text for text in texts if text.who == self.who and text.is_finished]
        self.aligned = same[: kernels.ALIGNED]

    def extend(self, tokens):
        self.context += tokens
        self.length += len(tokens)
        self.came += len(tokens)

    def candidates(self):
        """(what comes next, matched, kind, merit), brought up to date."""
        context, came = self.context[-kernels.MEMORY :], self.came
        new = self.context[len(self.context) - came :]
        self.found = [
            (text, place + came, min(matched + came, kernels.LONGEST_MATCH), *rest)
            for text, place, matched, *rest in self.found
            if came <= kernels.LONGEST_MATCH and text.tokens[place : place + came] == new
        ]
        self.age += came
        self.came = 0
        if len(self.found) < self.needed or self.age >= kernels.STALE_AFTER:
            self.found = found(self.indexes, self.who, context)
            self.needed = min(kernels.KEPT, max(len(self.found), 1))
            self.age = 0
        kept = [(text.tokens[place:], *rest) for text, place, *rest in self.found]
        for text in self.aligned:
            place = text.tail + self.length
            if place < len(text.tokens):
                matched = _agreement(text.tokens[:place], context)
                kept.append((text.tokens[place:], matched, kernels.KIND_ALIGNED, 1.0))
        return kept


def draft(sequence, most, *, state, is_tree, rates, stops=()):
    """Nodes (token, parent, path probability, class) of a draft; none follows one of `stops`."""
    weights = _weights()
    pool = [
        (text, kind, weights[kind, matched], np.float32(merit))
        for text, matched, kind, merit in sequence.candidates()
    ]
    nodes, waiting = [], _options(pool, [], -1, np.float32(1), state, is_tree, rates)
    while waiting and len(nodes) < most:
        best = max(waiting, key=lambda node: node[2])
        waiting.remove(best)
        path, parent, probability, its_class = best
        nodes.append((path[-1], parent, probability, its_class))
        if path[-1] not in stops:
            waiting += _options(pool, path, len(nodes) - 1, probability, state, is_tree, rates)
    return nodes


def _options(pool, path, parent, probability, state, is_tree, rates):
    """Nodes that may follow a path."""
    depth, options = len(path), {}
    for text, *voter in pool:
        if text[:depth] == path and len(text) > depth:
            options.setdefault(text[depth], []).append(voter)
    scored = []
    for token, voters in options.items():
        score = np.float32(0)
        for _, vote, merit in voters:
            score += vote * merit
        scored.append((score, token, max(kind for kind, *_ in voters)))
    total = sum((score for score, *_ in scored), np.float32(build_draft.UNCAST))
    judged = []
    for score, token, kind in scored:
        its_class = build_draft.class_of(score / total, state, kind)
        judged.append((rates[its_class], score / total, token, its_class))
    judged.sort(key=lambda option: (-option[0], -option[1]))
    kept = judged[: build_draft.BRANCHES if is_tree else 1]
    return [([*path, token], parent, probability * rate, its) for rate, _, token, its in kept]
