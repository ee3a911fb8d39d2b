"""Recorded rollouts and their replay: what is accepted is what an engine would accept."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from benchmarks import drafter
from benchmarks.drafter import Count, num_accepted, replay
from benchmarks.rollouts.recorded import Rollout, batches, empty_history, load, save
from rhymeflow.histospec.draft import Draft


def rollout(row: int, epoch: int, sample: int, tokens: list[int], reward: float = 0.5) -> Rollout:
    return Rollout(row, epoch, epoch, sample, epoch, 10 * epoch + row, [90, row], tokens, reward)


class Oracle:
    """A drafter that drafts what comes, as far as `most`, and then something wrong."""

    def __init__(self, texts: Sequence[list[int]], most: int) -> None:
        self.texts, self.most = texts, most
        self.told: list[list[int]] = []
        self.ended: list[int] = []

    def begin(self, prompt: list[int], tokens: list[int], **_: int) -> int:
        self.told.append(list(tokens))
        return len(self.told) - 1

    def propose(self, handles: list[int], room: list[int], **_: int) -> list[Draft]:
        drafts = []
        for handle, most in zip(handles, room, strict=True):
            done = len(self.told[handle])
            tokens = [*self.texts[handle][done : done + self.most], -1][:most]
            drafts.append(Draft(tokens, list(range(-1, len(tokens) - 1))))
        return drafts

    def observe(self, handles: list[int], made: list[list[int]], **_: float) -> None:
        for handle, tokens in zip(handles, made, strict=True):
            self.told[handle] += tokens

    def end(self, handle: int) -> None:
        assert self.told[handle] == self.texts[handle]
        self.ended.append(handle)


def replayed(batches: list[list[Rollout]], most: int, limit: int) -> list[Count]:
    rollouts = [one for batch in batches for one in batch]
    oracle = Oracle([one.tokens for one in rollouts], most)
    counts = replay(oracle, empty_history(rollouts), batches, limit)
    assert sorted(oracle.ended) == list(range(len(rollouts)))
    return counts


def test_a_step_makes_what_was_accepted_and_one_more():
    (count,) = replayed([[rollout(0, 0, 0, [1, 2, 3, 4, 5, 6])]], 2, 100)
    # The first token is given. 2 3 4, of which two were drafted; then 5 6, both drafted.
    assert (count.steps, count.generated, count.accepted) == (2, 5, 4)
    assert (count.drafted, len(count.iteration_seconds)) == (6, 2)
    (count,) = replayed([[rollout(0, 0, 0, [1, 2, 3, 4])]], 9, 4)
    assert (count.drafted, count.steps, count.generated) == (2, 1, 3), "short of the limit"


@given(st.data())
def test_accepted_is_the_longest_path_that_the_target_takes(data):
    tokens = data.draw(st.lists(st.integers(0, 2), max_size=8))
    parents = [data.draw(st.integers(-1, place - 1)) for place in range(len(tokens))]
    pairs = list(zip(parents, tokens, strict=True))
    if len(set(pairs)) < len(pairs):
        return  # as drafts are: one token is not twice the child of one parent
    target = data.draw(st.lists(st.integers(0, 2), max_size=6))
    position = data.draw(st.integers(0, len(target)))

    def path(node: int) -> list[int]:
        return [] if node < 0 else [*path(parents[node]), tokens[node]]

    paths = [path(node) for node in range(len(tokens))]
    expected = max((len(p) for p in paths if p == target[position : position + len(p)]), default=0)
    assert num_accepted(tokens, parents, target, position) == expected


def test_saved_rollouts_are_loaded_equal_and_history_is_drafted_from_the_second_epoch_on(tmp_path):
    texts = [[row * 100 + place for place in range(30)] for row in range(2)]
    rollouts = [rollout(row, epoch, 0, texts[row]) for epoch in range(2) for row in range(2)]
    save(tmp_path / "some.npz", rollouts)
    assert load(tmp_path / "some.npz") == rollouts
    made = drafter.made(rollouts, max_draft=8, shape="linear")
    first, second = replay(*made, batches(rollouts, 2), limit=64)
    assert first.accepted == 0
    assert second.accepted > 0.7 * second.generated
