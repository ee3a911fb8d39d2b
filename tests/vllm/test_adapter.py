"""An adapter in vLLM after pulls: log-probabilities are the learner's, and what differs is found.

Each case is in a process of its own: two engines of vLLM do not go into one.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from rhymeflow.config.load import read_config
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.vllm.weights import _pack_layer
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.packing import pack
from rhymeflow.learner.sample import Sample
from rhymeflow.models.frozen_base import PARTS
from rhymeflow.models.lora import load_policy
from rhymeflow.weights.proof import ChecksumMismatch
from rhymeflow.weights.publish import make_store
from tests.engine.drafters import answers_of
from tests.learner.builders import learner_config, made_up_batch, rollout_config
from tests.vllm.sameness import Knowing, drain, in_a_process, needs_vllm, requests_of

pytestmark = [needs_vllm, pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_TOKENS = 20
LORA = {"model.lora.rank": "6", "model.lora.alpha": "9"}  # narrower than vLLM's place
FEW = {"model.lora.target_modules": "[layers.1.self_attn.q_proj, v_proj, up_proj, mlp.down_proj]"}


class Adapted:
    """A learner with an adapter, what it publishes, and vLLM."""

    def __init__(self, folder, options):
        from rhymeflow.workers.rollout import make_engine, prepare

        fixed = {
            "model.dtype": "float32",
            "model.device": "cpu",
            "rollout.engine": "vllm",
            "rollout.max_num_seqs": "16",
            "rollout.vllm_kv_cache_gb": "0.6",
        }
        self.config = read_config("demo", fixed | LORA | options)
        cpu = torch.device("cpu")
        model = load_policy(self.config.model, dtype=torch.float32, device=cpu, seed=5)
        self.vocabulary = model.config.vocab_size
        settings = learner_config(learning_rate=0.02)
        self.learner = Learner(model, None, settings, rollout_config(), torch.float32)
        self.store = make_store(self.config, self.learner.manifest(), Path(folder))
        self.store.publish(0, self.learner.rows())
        prepare(self.config)
        self.reader = self.store.handle.open()
        self.vllm = make_engine(self.config, self.reader, "vllm")

    def next_version(self, *, keep_cache=False):
        version = self.learner.version + 1
        self.learner.train(made_up_batch(seed=version), version - 1)
        checksum = self.store.publish(version, self.learner.rows())
        pulled = self.vllm.install(self.reader, version, keep_cache=keep_cache)
        assert pulled == (version, checksum)

    def answers(self):
        """Sampled as they are: without temperature, top-k and top-p."""
        requests = requests_of(self, NUM_TOKENS)
        for each in requests:
            each.sampling = replace(each.sampling, temperature=1.0, top_p=1.0, top_k=0)
        drain(self.vllm, requests)
        return requests

    def scores(self, requests):
        """The learner's log-probabilities of responses."""
        samples = [
            Sample(0, r.prompt_ids, r.tokens, r.logprobs, [0] * len(r.tokens), 0.0, truncated=False)
            for r in requests
        ]
        (row,) = pack(samples, range(len(samples)), 1 << 20)
        return self.learner._policy.score(row)[0].tolist()


def names_of_adapters():
    """A list to which vLLM adds the adapter that each request names, or None."""
    from vllm.v1.engine.llm_engine import LLMEngine

    names, add = [], LLMEngine.add_request

    def noted(self, *arguments, lora_request=None, **named):
        names.append(lora_request and lora_request.lora_int_id)
        return add(self, *arguments, lora_request=lora_request, **named)

    LLMEngine.add_request = noted
    return names


def read_a_long_prompt_anew(rig):
    """Under each version it is computed once, and kept for the next request: a block is 128 tokens.
    Keys and values of a request that runs may be kept; those of prompts are of one version."""
    prompt = [3 + 7 * i % (rig.vocabulary - 3) for i in range(150)]
    for keep_cache in (False, True):
        rig.next_version(keep_cache=keep_cache)
        for computed in (150, 150 - 128):
            how = Sampling(1.0, 1.0, 0, max_new_tokens=8, stop_token_ids=frozenset())
            request = Request(0, list(prompt), NoiseKey(0, 0, 0), how)
            rig.vllm.submit(request)
            rig.vllm.poll(0.0)
            assert rig.vllm._scheduled.total_num_scheduled_tokens == computed
            drain(rig.vllm)
            assert request.logprobs == pytest.approx(rig.scores([request]), abs=1e-4)


def compare_with_the_learner(options):
    names = names_of_adapters()
    with TemporaryDirectory() as folder:
        rig = Adapted(folder, options)
        seen = []
        for _ in range(3):
            rig.next_version()
            requests = rig.answers()
            found = [x for each in requests for x in each.logprobs]
            assert found == pytest.approx(rig.scores(requests), abs=1e-4)
            seen.append(found)
        assert max(abs(a - b) for a, b in zip(seen[0], seen[2], strict=True)) > 0.05
        rig.vllm.draft_with(Knowing(answers_of(requests), rig.vocabulary, most=9, right=0.85))
        again = rig.answers()
        assert [each.tokens for each in again] == [each.tokens for each in requests]
        assert sum(each.drafted for each in again) > 0
        rig.vllm.draft_with(None)
        read_a_long_prompt_anew(rig)
        assert len(names) > 40, "those of the self-test, too"
        assert set(names) == {1}, "beside others vLLM gives an adapter to those without"
        if rig.config.rollout.vllm_tensor_parallel_size == 1:
            refuse_what_differs(rig)
        rig.vllm.close()
        rig.store.close()


def refuse_what_differs(rig):
    """Another model under the adapter, and an adapter that was changed in place."""
    rows = dict(rig.learner.rows())
    rows["base_checksum"] = rows["base_checksum"] + 1
    version = rig.learner.version
    rig.store.publish(version + 1, rows)
    with pytest.raises(ChecksumMismatch, match="under the adapter are not the learner's"):
        rig.vllm.install(rig.reader, version + 1, keep_cache=False)
    rig.store.publish(version + 2, rig.learner.rows())
    rig.vllm.install(rig.reader, version + 2, keep_cache=False)
    runner = rig.vllm._llm.model_executor.driver_worker.worker.model_runner
    layer = runner.lora_manager._adapter_manager.modules["model.layers.1.mlp.down_proj"]
    layer.lora_b_stacked[0][0, 0, 0, 0] += 1e-3
    rig.store.publish(version + 3, rig.learner.rows())
    with pytest.raises(ChecksumMismatch, match=r"in model\.layers\.1\.mlp\.down_proj .* in place"):
        rig.vllm.install(rig.reader, version + 3, keep_cache=False)
    layer.lora_b_stacked[0][0, 0, 0, 0] -= 1e-3
    find_what_changes_under_it(rig, runner.model, version + 3)


def find_what_changes_under_it(rig, model, version):
    """Within as many versions as there are parts: a norm in place, and a product that is packed
    anew of other weights, as a merge would do."""

    def pull_all_parts():
        for number in range(version + 1, version + 1 + PARTS):
            rig.store.publish(number, rig.learner.rows())
            rig.vllm.install(rig.reader, number, keep_cache=False)

    pull_all_parts()
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    version += PARTS
    with pytest.raises(ChecksumMismatch, match=r"changed in place .*first model\.norm\.weight"):
        pull_all_parts()
    with torch.no_grad():
        model.model.norm.weight[0] -= 1e-3
    learners = rig.learner.model.model.layers[0].mlp
    both = torch.cat([learners.gate_proj.weight, learners.up_proj.weight]).detach() + 1e-3
    _pack_layer(model.model.layers[0].mlp.gate_up_proj.base_layer, {"weight": both})
    version += PARTS
    with pytest.raises(
        ChecksumMismatch, match=r"first model\.layers\.0\.mlp\.gate_up_proj\.weight"
    ):
        pull_all_parts()


@pytest.mark.parametrize(
    "options", [{}, FEW | {"rollout.vllm_tensor_parallel_size": "2"}], ids=["all", "few, two"]
)
def test_log_probabilities_are_the_learners_after_three_versions(options):
    in_a_process(compare_with_the_learner, options)
