"""Layers that carry a state, in vLLM on a CPU: its log-probabilities are the model's own.

Prompts are prefilled in parts, and two of them are the same.
"""

import pytest
import torch

from tests.characters import make_tokenizer
from tests.families.cases import eager, save
from tests.families.checks import logprobs_of
from tests.vllm.sameness import closing_rig, drain, in_a_process, needs_vllm, requests_of

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.timeout(900)]

SIZES = {
    "falcon_h1": {"hidden_size": 128, "head_dim": 32, "mamba_d_ssm": 128, "mamba_n_heads": 8},
    "granitemoehybrid": {"hidden_size": 128, "mamba_d_head": 64, "mamba_n_groups": 1},
    "lfm2": {"hidden_size": 256, "conv_dim": 256, "block_dim": 256, "tie_word_embeddings": True},
    "nemotron_h": {
        "hidden_size": 128, "head_dim": 32, "mamba_head_dim": 32, "intermediate_size": 128,
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "time_step_min": 1e-9,
    },
}  # fmt: skip
"""vLLM's kernels for CPUs want heads of 32 numbers at least and gated experts, and its LFM2 ties
the head. It has no least step, and normalises by groups where transformers' Granite does not."""


@pytest.mark.parametrize("name", SIZES)
def test_vllm_computes_the_model(name, tmp_path):
    save(name, tmp_path, **SIZES[name])
    make_tokenizer("0123456789+", 100).save_pretrained(tmp_path)
    in_a_process(compare, tmp_path)


def compare(directory):
    options = {"drafting__window": "off", "rollout__max_prefill_tokens": "16"}
    with closing_rig("demo", "float32", model__name=str(directory), **options) as rig:
        requests = requests_of(rig, 24)
        drain(rig.engine("vllm"), requests)
        plain, whole = eager(directory), (1.0, 1.0, 0)
        hows = [(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in requests]
        compared = [r for r, how in zip(requests, hows, strict=True) if how == whole]
        assert len(compared) > 1
        for request in compared:
            with torch.no_grad():
                expected = logprobs_of(plain, request.prompt_ids, request.tokens)
            torch.testing.assert_close(torch.tensor(request.logprobs), expected, rtol=0, atol=1e-3)
