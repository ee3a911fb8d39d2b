"""Our sampler on tensors, without vLLM: what stands is what decoding one by one would draw."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.engine.base import Sampling
from rhymeflow.engine.native.sampler import Draws, sample
from rhymeflow.engine.vllm import sampler
from rhymeflow.engine.vllm.sampler import PLACEHOLDER, CounterSampler, arguments, draws_of, verify

VOCABULARY = 130
HOWS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    max_new_tokens=st.just(9),
    stop_token_ids=st.just(frozenset()),
)
REQUESTS = st.lists(
    st.tuples(HOWS, st.integers(0, 2**64 - 1), st.integers(1, 9), st.integers(0, 5)),
    min_size=1,
    max_size=5,
)


def logits_of(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(count, VOCABULARY, generator=generator)


@given(REQUESTS, st.integers(0, 99), st.randoms(use_true_random=False))
def test_tokens_stand_up_to_the_first_wrong_draft(requests, seed, rng):
    logits = logits_of(sum(1 + size for *_, size in requests), seed)
    draws, drafts, expected, first = [], [], [], 0
    for how, stream, position, size in requests:
        rows = logits[first : first + size + 1]
        first += size + 1
        # One by one: each token from its own row, with its own position's noise.
        alone = [
            sample(row[None], [Draws(how, stream, [position + i])]) for i, row in enumerate(rows)
        ]
        tokens = [token for (token,), _ in alone]
        right = rng.randrange(size + 1)
        draft = tokens[:right] + [(token + 1) % VOCABULARY for token in tokens[right:size]]
        drafts.append(draft)
        draws.append(draws_of(arguments(how, stream, 20), 20 + position, size + 1))
        expected.append([(token, logprob) for (token,), (logprob,) in alone[: right + 1]])
    drawn = verify(logits, draws, drafts)
    for i, due in enumerate(expected):
        count = len(due)
        assert drawn.tokens_NW[i].tolist()[:count] == [token for token, _ in due]
        assert set(drawn.tokens_NW[i].tolist()[count:]) <= {PLACEHOLDER}
        torch.testing.assert_close(
            drawn.logprobs_NW[i, :count], torch.tensor([logprob for _, logprob in due])
        )


def test_a_prompt_that_is_being_prefilled_draws_something():
    how = Sampling(1.0, 1.0, 0, 5, frozenset())
    assert draws_of(arguments(how, 1, 20), 0, 1).positions == [0]


def test_logits_of_lower_precision_are_drawn_from_in_float32():
    how = Sampling(1.0, 1.0, 0, 5, frozenset())
    logits = logits_of(1, 0).bfloat16()
    drawn = verify(logits, [Draws(how, 7, [3])], [[]])
    token, logprob = sample(logits.float(), [Draws(how, 7, [3])])
    assert drawn.tokens_NW.tolist() == [token]
    assert drawn.logprobs_NW.tolist() == [logprob]


def test_it_reads_the_runner(monkeypatch):
    """Both ways in which vLLM calls it, with a runner that has what is read of it."""
    monkeypatch.setattr(sampler, "output", lambda drawn, device: drawn)
    how = Sampling(1.0, 1.0, 0, 50, frozenset())
    extras = [arguments(how, stream, 10) for stream in (5, 6)]
    runner = SimpleNamespace(
        requests={
            name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
            for name, extra in zip("ab", extras, strict=True)
        },
        input_batch=SimpleNamespace(req_ids=["b", "a"], num_tokens_no_spec=[13, 30]),
    )
    ours = CounterSampler(runner)
    logits = logits_of(3, 1)
    plain = ours(logits=logits[:2], sampling_metadata=None)
    expected = [
        sample(logits[:1], [Draws(how, 6, [3])])[0],
        sample(logits[1:2], [Draws(how, 5, [20])])[0],
    ]
    assert plain.tokens_NW.tolist() == expected
    metadata = SimpleNamespace(draft_token_ids=torch.tensor(expected[0]), num_draft_tokens=[1, 0])
    drafted = ours(metadata, None, logits[[0, 2, 1]], None)
    second = sample(logits[2:3], [Draws(how, 6, [4])])[0]
    assert drafted.tokens_NW.tolist() == [expected[0] + second, expected[1] + [PLACEHOLDER]]
    assert ours.num_calls == 2
