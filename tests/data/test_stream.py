"""The order of prompts: permutations, purity, seeds."""

from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.data import Prompt, PromptStream

sizes = st.integers(min_value=1, max_value=60)
seeds = st.integers(min_value=0, max_value=2**70)


def source(size: int) -> list[Prompt]:
    return [Prompt(row, f"p{row}", {}) for row in range(size)]


def epoch_rows(stream: PromptStream, size: int, epoch: int) -> list[int]:
    requested = [stream.at(i) for i in range(epoch * size, (epoch + 1) * size)]
    assert {number for number, _ in requested} == {epoch}
    return [prompt.row for _, prompt in requested]


@given(size=sizes, seed=seeds, epoch=st.integers(min_value=0, max_value=5), shuffle=st.booleans())
def test_each_epoch_draws_every_row_once(size: int, seed: int, epoch: int, shuffle: bool) -> None:
    rows = epoch_rows(PromptStream(source(size), seed, shuffle), size, epoch)
    assert sorted(rows) == list(range(size))
    if not shuffle:
        assert rows == list(range(size))


@given(size=sizes, seed=seeds, numbers=st.lists(st.integers(0, 400), min_size=1, max_size=20))
def test_at_depends_on_the_number_only(size: int, seed: int, numbers: list[int]) -> None:
    used = PromptStream(source(size), seed, True)
    for number in numbers:
        fresh = PromptStream(source(size), seed, True)
        assert used.at(number) == fresh.at(number)


@given(seed=st.integers(min_value=0, max_value=2**40))
def test_seeds_and_epochs_give_different_orders(seed: int) -> None:
    size = 40  # two orders are equal by chance once in 40! cases
    stream = PromptStream(source(size), seed, True)
    other = PromptStream(source(size), seed + 1, True)
    assert epoch_rows(stream, size, 0) != epoch_rows(other, size, 0)
    assert epoch_rows(stream, size, 0) != epoch_rows(stream, size, 1)


def test_every_row_is_as_often_first() -> None:
    size, trials = 5, 2000
    first = [PromptStream(source(size), seed, True).at(0)[1].row for seed in range(trials)]
    for row in range(size):
        assert abs(first.count(row) - trials / size) < 5 * (trials / size) ** 0.5


def test_the_order_is_the_same_in_every_release() -> None:
    """A run must be resumable by a later version: these numbers never change."""
    assert epoch_rows(PromptStream(source(8), 0, True), 8, 0) == [3, 5, 2, 1, 6, 7, 4, 0]
