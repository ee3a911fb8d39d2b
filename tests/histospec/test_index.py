"""What an index holds, what it forgets, and what readers in other processes see."""

import os

import numpy as np
import pytest

from rhymeflow.config import DraftingConfig
from rhymeflow.errors import UserError
from rhymeflow.histospec import build_draft, kernels
from rhymeflow.histospec.index import Index, prompt_key
from rhymeflow.histospec.search import Search
from rhymeflow.utils import shared_memory

PROMPT = [3, 1, 4, 1, 5]
RATES = np.full(build_draft.NUM_CLASSES, 0.5, np.float32)


def add(index: Index, tokens: list[int], *, prompt: list[int] = PROMPT, sample: int = 0) -> int:
    number = index.begin(prompt, sample=sample, noise_epoch=-1)
    index.extend(number, tokens)
    return number


def searching(index: Index, **drafting: object) -> Search:
    return Search(index, None, DraftingConfig(**drafting), max_sequences=8, rates=RATES)


def drafted(index: Index, tokens: list[int], most: int = 4) -> list[int]:
    """What is proposed after these tokens."""
    search = searching(index, max_draft=most)
    handle = search.begin(PROMPT, tokens, sample=99, noise_epoch=-1)
    proposals = search.propose(np.array([handle]), np.array([most]), np.array([0]))
    return proposals.tokens[0, : proposals.counts[0]].tolist()


def test_counts_what_it_holds_and_never_holds_more_than_there_is_room_for():
    index = Index(max_tokens=200, max_responses=3)
    room = len(index.readable.words) // kernels.BLOCK_WORDS * kernels.BLOCK_TOKENS
    add(index, [1, 2, 3])
    assert (index.num_tokens, index.num_responses) == (8, 1)
    for _ in range(4):
        number = add(index, [1])
    assert index.num_responses == 3
    for start in range(100):
        index.extend(number, list(range(start, start + 9)))
        assert index.num_tokens <= room
    assert index.num_tokens >= 200


def test_the_oldest_text_goes_first():
    index = Index(max_tokens=200, max_responses=8)
    first = add(index, [30, 31, 32, 33, 34])
    assert drafted(index, [30, 31]) == [32, 33, 34]
    for sample in range(1, 30):
        add(index, [sample % 7 + 10] * 40, sample=sample)
    assert 32 not in drafted(index, [30, 31])
    before = index.num_tokens
    index.extend(first, [35])
    index.finish(first, 1.0)
    assert index.num_tokens == before, "what was overwritten is passed over"


def test_prompt_keys_are_of_63_bits_and_the_same_everywhere():
    assert prompt_key([1, 2, 3]) == 5701193394889117291
    assert prompt_key(np.array([1, 2, 3])) == prompt_key([1, 2, 3])
    assert prompt_key([1, 2]) != prompt_key([1, 2, 0])


def test_takes_less_than_a_sixth_of_the_published_memory():
    index = Index(max_tokens=1 << 16, max_responses=64)
    assert index.num_bytes / (1 << 16) < 430 / 6


def test_shared_memory_is_freed_by_its_owner_alone_and_readers_cannot_write():
    index = Index(max_tokens=1000, max_responses=8, shared=True)
    reader = Index.attach(index.handle)
    with pytest.raises(ValueError, match="read-only"):
        reader.readable.words[0] = 1
    reader.close()
    assert (shared_memory.DIRECTORY / index.handle.name).exists()
    index.close()
    assert not (shared_memory.DIRECTORY / index.handle.name).exists()
    with pytest.raises(FileNotFoundError):
        Index.attach(index.handle)


def test_too_little_shared_memory_is_said_in_one_line():
    with pytest.raises(UserError, match=r"no room for the history index .* drafting.history_tok"):
        Index(max_tokens=1 << 40, max_responses=8, shared=True)
    assert not list(shared_memory.DIRECTORY.glob(f"rhymeflow-history-{os.getpid()}-*"))


def test_readers_of_what_is_being_overwritten_propose_tokens_and_end():
    """Whatever a reader sees: random words everywhere but in the counters and among the tokens."""
    random = np.random.default_rng(3)
    found = 0
    for _ in range(50):
        index = Index(max_tokens=300, max_responses=8)
        for sample in range(6):
            add(index, random.integers(0, 3, 60).tolist(), sample=sample)
        arrays = index._arrays
        of_blocks = arrays.words.reshape(-1, kernels.BLOCK_WORDS)[:, : kernels.FIRST_WORD]
        for array in (of_blocks, arrays.links, arrays.heads, arrays.records, arrays.prompts):
            chosen = random.random(array.shape) < 0.3
            info = np.iinfo(array.dtype)
            wild = random.integers(info.min, info.max, array.shape, array.dtype, endpoint=True)
            near = random.integers(6, 40, array.shape).astype(array.dtype)
            array[chosen] = np.where(random.random(array.shape) < 0.5, wild, near)[chosen]
        search = searching(index, max_draft=8, shape="tree")
        handle = search.begin(PROMPT, [1, 2], sample=0, noise_epoch=0)
        for _ in range(10):
            proposals = search.propose(np.array([handle]), np.array([8]), np.array([0]))
            count = proposals.counts[0]
            assert 0 <= count <= 8
            tokens = proposals.tokens[0, :count]
            assert ((tokens >= 0) & (tokens <= max(PROMPT))).all(), "words about blocks are no text"
            assert (proposals.parents[0, :count] < np.arange(count)).all()
            found += count
            made = random.integers(0, 3, 3).astype(np.int32)
            search.extend(np.array([handle]), made, np.array([0, 3]))
    assert found > 100
