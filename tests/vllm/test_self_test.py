"""The self-test ends with an engine that takes several iterations for a prompt."""

import pytest

from rhymeflow.engine.vllm import self_test


class Slow:
    """Generates a token in each iteration after the first ones of a prompt."""

    def __init__(self, iterations_of_prompt):
        self._iterations = iterations_of_prompt
        self.requests, self.num_interrupted = [], 0

    @property
    def has_work(self):
        return bool(self.requests)

    def submit(self, request):
        self.requests, self._left = [request], self._iterations

    def poll(self, timeout):
        if self._left:
            self._left -= 1
            return
        (request,) = self.requests
        request.tokens.append(7 * len(request.tokens) % 5)
        if len(request.tokens) == self_test.NUM_TOKENS:
            self.requests = []

    def interrupt(self):
        self.num_interrupted += 1
        interrupted, self.requests = self.requests, []
        return interrupted


def test_a_request_is_interrupted_once():
    engine = Slow(2)
    self_test.check(engine, drafts=False, has_sampler=False)
    assert engine.num_interrupted == self_test.NUM_TRIES


def test_an_engine_that_generates_nothing_is_refused():
    with pytest.raises(self_test.VllmDiffers, match="generates no 12 tokens in 200 iterations"):
        self_test.check(Slow(10**6), drafts=False, has_sampler=False)
