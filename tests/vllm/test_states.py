"""Models whose layers carry a state, in vLLM: its log-probabilities are the model's own."""

import pytest
import torch

from tests.characters import make_tokenizer
from tests.families.cases import eager, save
from tests.families.checks import logprobs_of
from tests.vllm.sameness import Rig, drain, in_a_process, needs_vllm, requests_of

pytestmark = [pytest.mark.vllm, needs_vllm]


def test_vllm_computes_short_convolutions_as_transformers_does(tmp_path):
    sizes = {"hidden_size": 256, "conv_dim": 256, "block_dim": 256}
    save("lfm2", tmp_path, **sizes, tie_word_embeddings=True)
    make_tokenizer("0123456789+", 100).save_pretrained(tmp_path)
    in_a_process(compare, tmp_path)


def compare(directory):
    rig = Rig("demo", "float32", model__name=str(directory), drafting__window="off")
    try:
        requests = requests_of(rig, 24)
        drain(rig.engine("vllm"), requests)
        plain = eager(directory)
        hows = [(each.sampling.temperature, each.sampling.top_p) for each in requests]
        compared = [r for r, how in zip(requests, hows, strict=True) if how == (1.0, 1.0)]
        assert compared
        for request in compared:
            with torch.no_grad():
                expected = logprobs_of(plain, request.prompt_ids, request.tokens)
            difference = torch.tensor(request.logprobs) - expected
            assert float(difference.abs().max()) < 1e-3
    finally:
        rig.close()
