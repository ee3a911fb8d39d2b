"""vLLM under new weights: the tokens of the native engine after each pull, whatever the model, over
one process or two, by either of its runners, with drafts and without.

Each case is in a process of its own: two engines of vLLM do not go into one.
"""

import importlib.util
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from rhymeflow.config.load import read_config
from rhymeflow.models.tokenizer import load_tokenizer
from tests.characters import make_tokenizer
from tests.engine.models import VOCABULARY
from tests.families.cases import save
from tests.learner.builders import tiny_model
from tests.models.test_load import add_to_config, in_fp8
from tests.vllm.sameness import (
    assert_same,
    closing_rig,
    compare_with_native,
    drain,
    in_a_process,
    needs_vllm,
    requests_of,
)

pytestmark = [needs_vllm, pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A directory with a model of six experts, of which each token takes two."""
    path = tmp_path_factory.mktemp("mixture")
    tokenizer = load_tokenizer(read_config("demo").model)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    more = {"head_dim": 32, "vocab_size": len(tokenizer), "max_position_embeddings": 256}
    model = tiny_model("qwen3_moe", tied=False, attn="sdpa", **sizes, **more)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("recipe", "processes", "num_tokens", "change"),
    [
        ("demo", "2", 40, 0.02),
        ("smollm2", "1", 32, 0.01),
        ("mixture", "1", 20, 0.1),
        ("mixture", "2", 20, 0.1),
    ],
)
def test_same_tokens_as_the_native_engine(mixture, recipe, processes, num_tokens, change):
    options = {"rollout__vllm_tensor_parallel_size": processes}
    if recipe == "mixture":
        recipe, options["model__name"] = "demo", mixture
    in_a_process(compare_with_native, recipe, options, num_tokens, change)


@pytest.mark.parametrize("name", ["granitemoe", "qwen3"])
def test_same_tokens_of_granites_experts_and_of_a_model_whose_files_are_quantized(name, tmp_path):
    tokenizer = load_tokenizer(read_config("demo").model)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": len(tokenizer)}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # of 32 numbers
    save(name, tmp_path, **sizes, **heads, **({"head_dim": 32} if name == "qwen3" else {}))
    tokenizer.save_pretrained(tmp_path)
    if name == "qwen3":
        file = tmp_path / "model.safetensors"
        save_file(in_fp8(load_file(file)), file, metadata={"format": "pt"})
        add_to_config(
            tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]}
        )
    in_a_process(compare_with_native, "demo", {"model__name": str(tmp_path)}, 20, 0.1)


GEMMA4 = {
    "hidden_size": 128, "head_dim": 32, "global_head_dim": 64, "num_experts": None,
    "enable_moe_block": False, "attention_k_eq_v": False, "num_global_key_value_heads": 2,
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip


def test_same_tokens_of_layers_that_share_keys_and_differ_in_sizes(tmp_path):
    save("gemma4", tmp_path, **GEMMA4)
    make_tokenizer("0123456789+", 100).save_pretrained(tmp_path)
    prefill = {"rollout__max_prefill_tokens": "16"}  # a prompt takes several iterations
    in_a_process(compare_with_native, "demo", {"model__name": str(tmp_path), **prefill}, 24, 0.05)


NUM_TOKENS = 20
ATTENTION, MLP = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"
STEPS = [ATTENTION, MLP, "model.embed_tokens.weight", "model.norm.weight", ATTENTION]


def compare_after_changes(processes):
    given = {"rollout__vllm_tensor_parallel_size": processes}
    with closing_rig("demo", "float32", weights__transport="delta", **given) as rig:
        native, vllm = rig.engine("native"), rig.engine("vllm")
        readers = {engine: rig.store.handle.open() for engine in (native, vllm)}
        rig.publish_some(1, ATTENTION, 0.0)
        vllm.install(readers[vllm], 1, keep_cache=False)  # is told of changes: all anew, and kept
        readers[vllm].pull = None
        answers = []
        for version, name in enumerate(STEPS, 2):
            rig.publish_some(version, name, 0.05)
            found = []
            for engine, reader in readers.items():
                pulled = engine.install(reader, version, keep_cache=False)
                assert pulled == (version, rig.checksums[version])
                found.append(requests_of(rig, NUM_TOKENS))
                drain(engine, found[-1])
            assert_same(found[1], found[0], 1e-3)
            answers.append([request.tokens for request in found[1]])
        assert len(set(map(str, answers))) >= len(STEPS) - 1  # weights were others each time
        vllm.close()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_same_tokens_if_weights_come_as_changes(processes):
    in_a_process(compare_after_changes, processes)


def compare_in_the_interpreter():
    """vLLM's CPU build has no backend for the second runner's kernels, which are Triton's: Triton
    interprets them, a hundred times slower and with the same meaning."""
    from triton.backends import backends

    backends.clear()
    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    vllm = compare_with_native("demo", {"rollout__vllm_model_runner": "v2"}, 16, 0.01)
    runner = vllm._llm.model_executor.driver_worker.worker.model_runner
    assert type(runner).__module__ == "vllm.v1.worker.cpu.model_runner"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_same_tokens_by_the_second_runner(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # before the process imports what loads Triton
    in_a_process(compare_in_the_interpreter)


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_same_tokens_on_a_gpu(runner):
    options = {
        "model__device": "cuda",
        "rollout__vllm_gpu_memory_utilization": "0.3",
        "rollout__vllm_model_runner": runner,
    }
    in_a_process(compare_with_native, "demo", options, 40, 0.01)
