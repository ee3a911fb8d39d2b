"""Drafters that know the answer, or do not, and keep count of what they are told."""

import random

import pytest

from rhymeflow.histospec.draft import Draft, DraftStats

VOCABULARY = 150


class FakeDrafter:
    """Calls `draft(answer, at, room, random)` for each response, `answer[at]` being its next token.
    `answers`: tokens by (prompt, sample). `places`: of the engine. Checks that the engine keeps the
    protocol."""

    num_searched = 0

    def __init__(self, draft, answers, seed=0, places=1024):
        self.draft, self.answers, self.places = draft, answers, places
        self.random = random.Random(seed)
        self.texts, self.stats = {}, DraftStats()
        self.begun = 0
        self.pending = None

    def begin(self, prompt_ids, tokens, *, sample, noise_epoch):
        assert len(self.texts) < self.places, "more handles than places"
        handle = self.begun
        self.begun += 1
        self.texts[handle] = (list(tokens), self.answers[tuple(prompt_ids), sample])
        return handle

    def end(self, handle):
        del self.texts[handle]

    def propose(self, handles, room, *, other_rows, kv_tokens):
        assert len(set(handles)) == len(handles) == len(room) > 0
        drafts = []
        for handle, most in zip(handles, room, strict=True):
            tokens, answer = self.texts[handle]
            drafts.append(self.draft(answer, len(tokens), most, self.random))
        self.pending = (set(handles), other_rows, kv_tokens)
        self.num_drafted = sum(len(draft.tokens) for draft in drafts)
        return drafts

    def observe(self, handles, generated, *, rows, kv_tokens, seconds, other_rows=None):
        assert seconds > 0
        if self.pending is not None:  # else all that is here is being recomputed
            assert self.pending[0] <= set(handles)
            assert self.pending[2] == kv_tokens
            self.pending = None
        for handle, tokens in zip(handles, generated, strict=True):
            assert tokens
            self.texts[handle][0].extend(tokens)


def line(tokens):
    """The linear draft of these tokens."""
    return Draft(list(tokens), list(range(-1, len(tokens) - 1)))


def right(size):
    """The next `size` tokens of the answer, as far as there are any."""
    return lambda answer, at, room, rng: line(answer[at : at + size])


def noisy(chance, most, vocabulary=VOCABULARY):
    """Each token is right with this chance; of any length, none included."""

    def draft(answer, at, room, rng):
        tokens = answer[at : at + rng.randint(0, most)]
        return line([t if rng.random() < chance else rng.randrange(vocabulary) for t in tokens])

    return draft


def tree(chance, most):
    """Random trees with random nodes on the right path, in any branch; some have none."""

    def draft(answer, at, room, rng):
        tokens, parents, right_nodes = [], [], [-1]
        for node in range(rng.randint(0, most)):
            depth = len(right_nodes) - 1
            if rng.random() < chance and at + depth < len(answer):
                parents.append(right_nodes[-1])
                tokens.append(answer[at + depth])
                right_nodes.append(node)
            else:
                parents.append(rng.randint(-1, node - 1))
                tokens.append(rng.randrange(VOCABULARY))
        return Draft(tokens, parents)

    return draft


def answers_of(requests):
    return {(tuple(r.prompt_ids), r.noise_key.sample): list(r.tokens) for r in requests}


def assert_same(requests, expected, tolerance=2e-5):
    for one, other in zip(requests, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.segments == other.segments
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=tolerance)
