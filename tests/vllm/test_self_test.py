"""The self-test ends with an engine that takes several iterations for a prompt."""

from rhymeflow.engine.vllm import self_test


class Slow:
    """Generates a token in each iteration after the first two of a prompt."""

    def __init__(self):
        self.requests, self.num_polls, self.num_interrupted = [], 0, 0

    @property
    def has_work(self):
        return bool(self.requests)

    def submit(self, request):
        self.requests, self._left = [request], 2

    def poll(self, timeout):
        self.num_polls += 1
        assert self.num_polls < 1000, "the self-test does not end"
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
    engine = Slow()
    self_test.check(engine, drafts=False, has_sampler=False)
    assert engine.num_interrupted == self_test.NUM_TRIES
