"""Modules that compute by the kernels against the modules' own forwards."""

import copy

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from rhymeflow.learner.fused import _Rotary, _SwiGLU, fuse

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "head_dim": 8,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
IDS = torch.randint(50, (1, 1500), generator=torch.Generator().manual_seed(0))
"""More rows than one call of a kernel takes."""


def model(kind: str = "Llama", **more):
    """With norms whose weights are not 1, and without the kernels."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for name, weight in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, -1.0, 2.0)
    return made


def own_rotary(of):
    """The function of the model's family, as transformers has it."""
    source = transformers.models
    for part in type(of).__module__.split(".")[2:]:
        source = getattr(source, part)
    found = source.apply_rotary_pos_emb
    return source, found.own if isinstance(found, _Rotary) else found


def logits_and_gradients(of, ids=IDS[:, :40]):
    of.zero_grad()
    logits = of(ids, use_cache=False).logits
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).reshape(logits.shape)
    (logits * weights).sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in of.parameters())]


def fused_parts(of) -> set[str]:
    return {type(m).__name__ for m in of.modules() if "forward" in vars(m)}


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("Llama", {"LlamaRMSNorm", "LlamaMLP"}),
        ("Qwen2", {"Qwen2RMSNorm", "Qwen2MLP"}),
        ("Qwen3", {"Qwen3RMSNorm", "Qwen3MLP"}),  # norms of queries and keys too
        ("Mistral", {"MistralRMSNorm", "MistralMLP"}),
        ("Gemma", set()),  # 1 + weight, and another activation
        ("GPTNeoX", set()),
    ],
)
def test_a_family_computes_the_same(kind: str, parts: set[str], monkeypatch: pytest.MonkeyPatch):
    plain = model(kind)
    source, own = own_rotary(plain)
    monkeypatch.setattr(source, "apply_rotary_pos_emb", own)
    expected = logits_and_gradients(plain)
    fuse(plain)
    assert fused_parts(plain) == parts
    for a, b in zip(logits_and_gradients(plain), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def test_an_mlp_that_does_more_is_left_alone():
    plain = model()
    mlp = plain.model.layers[0].mlp

    class Scaled(type(mlp)):
        def forward(self, x):
            return 2 * super().forward(x)

    mlp.__class__ = Scaled
    fuse(plain)
    assert "forward" not in vars(mlp)
    assert "forward" in vars(plain.model.layers[1].mlp)


def test_rotary_positions_of_one_row_are_fused_and_others_are_its_own():
    plain = model()
    fuse(plain)
    source, own = own_rotary(plain)
    fused = source.apply_rotary_pos_emb
    assert isinstance(fused, _Rotary)
    fuse(model())  # another model of the family
    assert source.apply_rotary_pos_emb is fused
    for count in (1, 2):
        q, k = torch.randn(count, 4, 30, 8), torch.randn(count, 2, 30, 8)
        angles = torch.randn(count, 30, 4).repeat(1, 1, 2)
        given = (q, k, angles.cos(), angles.sin())
        for a, b in zip(fused(*given), own(*given), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            assert count == 1 or torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_computed_as_before(dtype: torch.dtype):
    plain = model().to(dtype)
    expected = logits_and_gradients(plain)
    fuse(plain)
    for a, b in zip(logits_and_gradients(plain), expected, strict=True):
        assert torch.equal(a, b)


def test_a_row_does_not_depend_on_the_others_nor_on_threads():
    fused = model(num_hidden_layers=1)
    fuse(fused)
    norm = fused.model.norm
    x, gate, up = (torch.randn(1, 5000, 32, requires_grad=True) for _ in range(3))
    results = []
    before = torch.get_num_threads()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        y, z = norm(x), _SwiGLU.apply(gate, up)
        results.append([y, z, *torch.autograd.grad((y * z).sum(), (x, gate, up, norm.weight))])
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    assert torch.equal(norm(x[:, 7:9]), results[0][0][:, 7:9])
    assert torch.equal(_SwiGLU.apply(gate[:, 7:9], up[:, 7:9]), results[0][1][:, 7:9])


def test_a_copy_computes_with_its_own_weights():
    first = model()
    fuse(first)
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.model.norm.weight.zero_()
    assert float(second(IDS[:, :5], use_cache=False).logits.abs().max()) == 0.0
    assert float(first(IDS[:, :5], use_cache=False).logits.abs().max()) > 0.0


def test_long_rows_equal_short_ones_together():
    """Gradients of weights are sums over blocks of rows."""
    fused, plain = model(), model()
    fuse(fused)
    source, own = own_rotary(plain)
    found = logits_and_gradients(fused, IDS)
    fused_rotary, source.apply_rotary_pos_emb = source.apply_rotary_pos_emb, own
    expected = logits_and_gradients(plain, IDS)
    source.apply_rotary_pos_emb = fused_rotary
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def test_what_is_no_number_is_seen():
    fused = model()
    fuse(fused)
    x = torch.ones(1, 3, 32)
    x[0, 1, 5] = torch.nan
    for module in (fused.model.norm, fused.model.layers[0].mlp):
        assert module(x).isnan().any(-1).tolist() == [[False, True, False]]
