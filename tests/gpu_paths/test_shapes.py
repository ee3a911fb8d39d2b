"""Models of 7 to 32 billion parameters, of few layers, on a device whose tensors have shapes only:
FSDP2 over 8 ranks, the plan's memory of a pass, and FlexAttention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import flex_attention as flex
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)
from transformers.initialization import no_init_weights

from rhymeflow import memory
from rhymeflow.config import Config, ModelConfig
from rhymeflow.config.load import build_config
from rhymeflow.learner import attention
from rhymeflow.learner.logprobs import TokenScorer, recompute_layers
from rhymeflow.learner.optimizer import Optimizer
from rhymeflow.learner.packing import PackedRow, pack
from rhymeflow.learner.policy import Shards
from rhymeflow.learner.ranks import Ranks
from rhymeflow.learner.sample import Sample
from rhymeflow.models import load
from rhymeflow.models.adapter_files import adapter_of
from rhymeflow.models.attention import NAME, Weighing
from rhymeflow.models.lora import attach
from tests.gpu_paths.simcuda import tensors_in

pytestmark = pytest.mark.usefixtures("fake")
MODELS = ("Qwen2.5-7B", "Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B")
TOKENS = 8192
QWEN25_7B = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
}  # fmt: skip
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def shapes_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlashAttention, which torch chooses by the device; and what depends on values is left out."""

    def flash(q, k, v, *, attn_mask, is_causal, scale, enable_gqa):
        assert attn_mask is None
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(q, k, v, 0.0, is_causal, False, scale=scale)[0]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", flash)
    unpacked = "transformers.masking_utils.find_packed_sequence_indices"
    monkeypatch.setattr(unpacked, lambda positions: None)
    monkeypatch.setattr(Optimizer, "_norm", lambda self: 1.0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def config_of(name: str) -> PreTrainedConfig:
    if name == "Qwen2.5-7B":
        return Qwen2Config(**QWEN25_7B)
    if name == "SmolLM2-135M":
        return LlamaConfig(**SMOLLM2)
    return load.architecture(ModelConfig(name=f"Qwen/{name}"))


def model_of(name: str, num_layers: int, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    config = config_of(name)
    config.num_hidden_layers = num_layers
    config.layer_types = ["full_attention"] * num_layers
    with no_init_weights(), torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    return made.eval()


def row_of(*lengths: int) -> PackedRow:
    samples = [
        Sample(i, [3] * 50, [5] * (n - 50), [-1.0] * (n - 50), [0] * (n - 50), 1.0, False)
        for i, n in enumerate(lengths)
    ]
    [row] = pack(samples, range(len(samples)), sum(lengths))
    return row


def scorer_of(model: PreTrainedModel, config: Config, **more: object) -> TokenScorer:
    if config.learner.gradient_checkpointing:
        recompute_layers(model)
    return TokenScorer(model, config.rollout, config.learner.logits_chunk_size, **more)


# -- FSDP2 -----------------------------------------------------------------------------------------


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(0, 8, torch.device("cuda", 0))
    with unset_fake_temporarily():
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        made.mesh = init_device_mesh("cuda", (8,))
    yield made
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-32B", "Qwen3-30B-A3B"])
def test_a_rank_of_eight_takes_a_step(name: str, recomputes: bool, ranks: Ranks) -> None:
    given = {"num_ranks": 8, "gradient_checkpointing": recomputes, "max_grad_norm": None}
    config = build_config(given, where="test")
    model = model_of(name, 2, torch.float32)
    whole = {name: each.shape for name, each in model.named_parameters()}
    shards = Shards(model, ranks, torch.bfloat16, offload=False, read=None)
    optimizer = Optimizer(model, config.learner, torch.bfloat16, ranks)
    scorer, row = scorer_of(model, config, forward=shards.run), row_of(3000, 5000)
    for scores in (scorer.score(row), scorer.backward(row, lambda logprob_C, _: logprob_C.sum())):
        assert [(x.device.type, x.dtype) for x in scores] == [("cuda", torch.float32)] * 2
    for each in model.parameters():
        local = ranks.local(each.grad)
        assert (local.device.type, local.dtype) == ("cuda", torch.float32)
        assert local.shape == ranks.local(each).shape
    optimizer.step(1e-6)
    for name, _, rows in optimizer.state():
        shape = whole[name.split(".", 1)[1]]
        assert rows.device.type == "cuda"
        assert rows.shape == (len(range(shape[0])[ranks.rows(shape[0])]), *shape[1:])


# -- memory ----------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """Most bytes of tensors that were there at once, but for those that are `known`."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.most = 0
        self._known = {each.untyped_storage()._cdata for each in known}
        self._others = WeakValueDictionary[int, torch.UntypedStorage]()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if tensor.is_cuda and storage._cdata not in self._known:
                self._others[storage._cdata] = storage
        # All of them each time: FSDP frees what it has gathered by changing sizes.
        self.most = max(self.most, sum(each.nbytes() for each in self._others.values()))
        return result


def peak_of_pass(name: str, num_layers: int, config: Config) -> int:
    """Without gradients of parameters, but for the head's where ranks sum it."""
    model = model_of(name, num_layers)
    head = model.get_output_embeddings().weight if config.learner.num_ranks > 1 else None
    for each in model.parameters():
        if each is not head:
            each.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    scorer, row = scorer_of(model, config), row_of(TOKENS)
    with Peak(model.parameters()) as peak:
        scorer.backward(row, lambda logprob_C, _: logprob_C.sum())
    return peak.most


def peak_of_rank(name: str, num_layers: int, config: Config, ranks: Ranks) -> int:
    """Of a further pass, beside the rank's rows of weights and gradients."""
    model = model_of(name, num_layers, torch.float32)
    shards = Shards(model, ranks, torch.bfloat16, offload=False, read=None)
    scorer, row = scorer_of(model, config, forward=shards.run), row_of(TOKENS)
    scorer.backward(row, lambda logprob_C, _: logprob_C.sum())
    with Peak(ranks.local(x) for each in model.parameters() for x in (each, each.grad)) as peak:
        scorer.backward(row, lambda logprob_C, _: logprob_C.sum())
    return peak.most


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_has_the_memory_of_a_pass(name: str, recomputes: bool) -> None:
    given = {"gradient_checkpointing": recomputes, "window": "off"}
    config = build_config(given, where="test")
    few, more = (peak_of_pass(name, num_layers, config) for num_layers in (2, 4))
    size = memory.model_of(config_of(name), torch.bfloat16, "cuda")
    found = few + (size.num_layers - 2) * (more - few) / 2
    said = memory.total(memory.of_pass(config, size, TOKENS))
    assert said == pytest.approx(found, rel=0.12)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize(
    ("name", "recomputes"),
    [("Qwen2.5-7B", False), ("Qwen3-32B", True), ("Qwen3-30B-A3B", True)],
)
def test_the_plan_has_the_memory_of_a_rank_of_eight(
    name: str, recomputes: bool, ranks: Ranks
) -> None:
    given = {"num_ranks": 8, "gradient_checkpointing": recomputes, "window": "off"}
    config = build_config({**given, "max_tokens_per_microbatch": TOKENS}, where="test")
    few, more = (peak_of_rank(name, num_layers, config, ranks) for num_layers in (3, 4))
    size = memory.model_of(config_of(name), torch.bfloat16, "cuda")
    found = few + (size.num_layers - 3) * (more - few)
    parts = memory.of_rank(config, size, TOKENS // 2)
    assert any(f"of {TOKENS:,} tokens" in each.what for each in parts)
    assert memory.total(parts) == pytest.approx(found, rel=0.15)


def memory_of_adapted_step(name: str, num_layers: int, config: Config) -> int:
    """Of the second step: the first makes the moments."""
    model = model_of(name, num_layers)
    attach(model, adapter_of(config.model.lora))
    optimizer = Optimizer(model, config.learner, torch.bfloat16)
    scorer, row = scorer_of(model, config), row_of(TOKENS)
    for _ in range(2):
        kept = [*model.parameters(), *(rows for _, _, rows in optimizer.state())]
        with Peak(kept) as peak:
            scorer.backward(row, lambda logprob_C, _: logprob_C.sum())
            optimizer.step(1e-5)
    return peak.most + sum(each.nbytes for each in kept)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen3-8B"])
def test_the_plan_has_the_memory_of_a_step_with_an_adapter(name: str, recomputes: bool) -> None:
    given = {"gradient_checkpointing": recomputes, "window": "off", "max_grad_norm": None}
    given |= {"max_tokens_per_microbatch": TOKENS, "model.lora.rank": 16}
    config = build_config(given, where="test")
    few, more = (memory_of_adapted_step(name, num_layers, config) for num_layers in (2, 3))
    of_model = memory.model_of(config_of(name), torch.bfloat16, "cuda")
    size = memory.with_adapter(of_model, config_of(name), config)
    found = few + (size.num_layers - 2) * (more - few)
    prompt = TOKENS - config.rollout.max_completion_length
    parts = [*memory.of_optimizer(config, size), *memory.of_rank(config, size, prompt)]
    assert memory.total(parts) == pytest.approx(found, rel=0.07)


@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.parametrize(
    "shaping", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 50}]
)
def test_the_plan_has_the_memory_of_the_head(num_ranks: int, shaping: dict) -> None:
    """Of many rows, beside which what the layers take does not count."""
    given = {"num_ranks": num_ranks, "logits_chunk_size": 4096, **shaping}
    config = build_config({**given, "gradient_checkpointing": True}, where="test")
    size = memory.model_of(config_of("Qwen2.5-7B"), torch.bfloat16, "cuda")
    found = peak_of_pass("Qwen2.5-7B", 1, config)
    assert memory.head_bytes(config, size) == pytest.approx(found, rel=0.12)


# -- FlexAttention ---------------------------------------------------------------------------------


def test_flex_has_the_shapes_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_compiled", lambda: flex.flex_attention)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    prompt = np.arange(40)
    sequences = [np.r_[prompt, 40:300], np.r_[prompt, 300:420], np.r_[420:700]]
    sizes, given = ((8, 700, 64), (2, 700, 64), (2, 700, 64)), {"dtype": torch.bfloat16}
    leaves = [torch.empty(s, device="cuda", requires_grad=True, **given) for s in sizes]
    flexible = attention.FlexAttention(sequences, 700, torch.device("cuda"))
    made = flexible.attend(0, *leaves, Weighing(0.3))
    assert (made.shape, made.dtype, made.device.type) == ((700, 8, 64), torch.bfloat16, "cuda")
    made.sum().backward()
    assert [tuple(each.grad.shape) for each in leaves] == list(sizes)
