import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rhymeflow.learner.logprobs import TokenScorer, into_gradient, log_softmax_scores
from rhymeflow.learner.packing import pack
from rhymeflow.learner.sample import Sample
from rhymeflow.models import attention
from rhymeflow.models.logits import shaped
from tests.learner.builders import close, made_up_batch, rollout_config, tiny_learner, tiny_model

SAMPLINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.8},
    {"top_k": 7, "top_p": 0.9},
]


def _plain(model, batch, rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sample alone through the plain Hugging Face model, all logits at once."""
    logprobs, entropies = [], []
    for sample in batch:
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        targets = torch.tensor(sample.completion_ids)
        sampled = ~torch.tensor(sample.observed or [False] * len(targets))
        x = shaped(
            logits,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            keep_R=targets,
        )
        log_p = F.log_softmax(x, dim=1)
        logprobs.append(log_p.gather(1, targets[:, None])[sampled, 0])
        p = log_p.exp()
        entropies.append(-(p * log_p).where(p > 0, 0.0).sum(1)[sampled])
    return torch.cat(logprobs), torch.cat(entropies)


def begun_alike(batch: list[Sample]) -> list[Sample]:
    """The first sample again, and the second with another half."""
    end = len(batch[1].completion_ids) // 2
    other = [(token + 1) % 7 for token in batch[1].completion_ids[end:]]
    ids = batch[1].completion_ids[:end] + other
    return [batch[0], dataclasses.replace(batch[1], completion_ids=ids)]


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        *((kind, sampling) for kind in ("llama", "qwen2") for sampling in SAMPLINGS),
        ("qwen3_moe", {}),
        *((kind, {"temperature": 0.6, "top_k": 20}) for kind in ("cohere", "granite", "nanochat")),
    ],
    ids=str,
)
@pytest.mark.parametrize(("turns", "chunk_size"), [(False, 7), (True, 1000), (True, 1)])
def test_packed_equals_plain_with_gradients(kind, sampling, turns, chunk_size):
    """Untied on purpose for qwen2: the head's own gradient is seen."""
    rollout = rollout_config(**sampling)
    plain, packed = (
        tiny_model(kind, attn=attn, tied=kind == "llama") for attn in ("eager", attention.NAME)
    )
    batch = made_up_batch(turns=turns)
    batch += begun_alike(batch)
    (row,) = pack(batch, range(len(batch)), 10**6)
    assert len(set(row.predictors_R.tolist())) < len(row.predictors_R)
    assert len(row.tokens_T) < sum(len(s.prompt_ids + s.completion_ids) - 1 for s in batch)

    logprob, entropy = _plain(plain, batch, rollout)
    probe = torch.randn(len(logprob), generator=torch.Generator().manual_seed(1))
    (logprob * probe).sum().backward()
    scorer = TokenScorer(packed, rollout, chunk_size)
    found = scorer.backward(row, lambda x, chunk: (x * probe[chunk]).sum())
    torch.testing.assert_close(found[0], logprob.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], entropy.detach(), rtol=1e-4, atol=1e-5)
    close(
        {n: p.grad for n, p in packed.named_parameters()},
        {n: p.grad for n, p in plain.named_parameters()},
        1e-4,
    )
    for a, b in zip(scorer.score(row), found, strict=True):
        assert torch.equal(a, b)


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_tokens_times_vocabulary_never_exists():
    """A vocabulary so large that it outgrows everything else in the model."""
    model = tiny_model()
    model.resize_token_embeddings(1000)
    model.requires_grad_(True)
    batch = made_up_batch(groups=4, members=8)
    (row,) = pack(batch, range(len(batch)), 10**6)
    num_responses = len(row.targets_R)
    assert num_responses > 250
    bodies = []
    model.model.register_forward_hook(lambda m, i, out: bodies.append(out[0].shape[1]))
    scorer = TokenScorer(model, rollout_config(), chunk_size=50)
    with _Largest() as largest:
        scorer.backward(row, lambda x, chunk: x.sum())
        assert bodies == [len(row.tokens_T)], "once, whatever the chunks of the head"
        logprob, _ = scorer.score(row)
    assert logprob.shape == (sum(len(s.completion_ids) for s in batch),)
    # The greatest allowed: one chunk of the head, or the model's own weights and activations.
    assert largest.elements == max(50 * 1000, 1000 * 32)
    with _Largest() as largest:
        TokenScorer(model, rollout_config(), chunk_size=10**6).score(row)
    assert largest.elements == num_responses * 1000


def test_bfloat16_logits_are_not_rounded():
    """Logits of 20 and more would be rounded to multiples of 1/8."""
    batch, model = made_up_batch(), tiny_model().bfloat16()
    (row,) = pack(batch, range(len(batch)), 10**6)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 4
    scorer = TokenScorer(model, rollout_config(), chunk_size=16)
    with torch.no_grad():
        logits_RV = scorer.hidden(row).double() @ model.get_output_embeddings().weight.double().T
    assert float(logits_RV.abs().max()) > 16
    targets_R1 = torch.from_numpy(row.targets_R)[:, None]
    exact_R = logits_RV.log_softmax(1).gather(1, targets_R1)[:, 0]
    entropy_R = torch.distributions.Categorical(logits=logits_RV).entropy()
    for logprob_R, found_R in (scorer.score(row), scorer.backward(row, lambda x, _: x.sum())):
        torch.testing.assert_close(logprob_R.double(), exact_R, atol=2e-4, rtol=0)
        torch.testing.assert_close(found_R.double(), entropy_R, atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_follows_the_weights(dtype):
    """The fused optimizer changes them without a trace that torch would show."""
    batch, learner = made_up_batch(), tiny_learner(dtype=dtype)
    learner.train(batch, 0)
    (row,) = pack(batch, range(len(batch)), 10**6)
    fresh = TokenScorer(copy.deepcopy(learner.model), rollout_config(), 64).score(row)
    assert torch.equal(learner._policy.score(row)[0], fresh[0])


# -- softmax, against the formulas in float64 ------------------------------------------------------


def random_rows(count: int, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_CV = torch.randn(count, size, generator=generator) * 6
    return x_CV, torch.randint(size, (count,), generator=generator)


@pytest.mark.parametrize(("count", "size"), [(1, 5), (70, 33), (3, 200_000)])  # the last in parts
def test_equals_the_formulas(count, size):
    x_CV, targets_C = random_rows(count, size)
    x_CV[:, 1:3] = -torch.inf  # left out by top-k
    targets_C[:] = torch.where((targets_C == 1) | (targets_C == 2), 0, targets_C)
    exact_CV = x_CV.double().log_softmax(1)
    p_CV = exact_CV.exp()
    logprob_C, entropy_C, log_sum_C = log_softmax_scores(x_CV, targets_C)
    grad_C = torch.linspace(-1, 2, count)
    found_CV = into_gradient(x_CV.clone(), log_sum_C, targets_C, grad_C)
    near = {"rtol": 1e-6, "atol": 4e-6}
    expected = exact_CV.gather(1, targets_C[:, None])[:, 0].float()
    torch.testing.assert_close(logprob_C, expected, **near)
    entropy = -(p_CV * exact_CV.masked_fill(p_CV == 0, 0)).sum(1).float()
    torch.testing.assert_close(entropy_C, entropy, rtol=2e-5, atol=4e-6)
    onehot_CV = torch.nn.functional.one_hot(targets_C, size)
    gradient = ((onehot_CV - p_CV) * grad_C[:, None]).float()
    torch.testing.assert_close(found_CV, gradient, **near)
    x_CV[-1, 4] = torch.nan
    for each_C in log_softmax_scores(x_CV, targets_C):
        assert each_C.isnan().tolist() == [False] * (count - 1) + [True]


def test_logits_whose_exponentials_are_infinite():
    x_CV = torch.tensor([[0.0, 300.0, -300.0]])
    assert log_softmax_scores(x_CV, torch.tensor([1])) == (0.0, 0.0, 300.0)
