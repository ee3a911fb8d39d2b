"""The native engine and vLLM side by side under the same published weights.

One vLLM engine to a process, so each file of tests that uses this runs in a process of its own
(`make test-vllm`)."""

import contextlib
import importlib.util
import multiprocessing
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from rhymeflow.config.load import read_config
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.histospec.drafter import drafter_of
from rhymeflow.models.buffers import published_buffers
from rhymeflow.weights.manifest import manifest_of
from rhymeflow.weights.publish import make_store
from tests.engine.drafters import FakeDrafter, answers_of, noisy

IS_THERE = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(
    not IS_THERE, reason="vLLM is not installed here: python3 scripts/install_vllm.py"
)

HOWS = [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.8, 0), (1.2, 1.0, 7)]
"""Temperature, top-p and top-k."""


class Rig:
    """Published weights of a recipe's model, and engines that pull them."""

    def __init__(self, recipe, dtype, **overrides):
        given = {name.replace("__", "."): value for name, value in overrides.items()}
        self.config = read_config(
            recipe,
            {
                "model.dtype": dtype,
                "model.device": "cpu",
                "rollout.max_num_seqs": "16",
                "rollout.engine": "vllm",
                "rollout.vllm_kv_cache_gb": "0.6",
                **given,
            },
        )
        from rhymeflow.models.load import load_model
        from rhymeflow.models.precision import resolve_device

        model = load_model(
            self.config.model, dtype=getattr(torch, dtype), device=resolve_device(self.config.model)
        )
        dtype = getattr(torch, dtype)
        self.parameters = {**dict(model.named_parameters()), **published_buffers(model, dtype)}
        self.vocabulary = model.config.vocab_size
        self._folder = TemporaryDirectory()  # what the store is named after
        manifest = manifest_of(self.parameters)
        self.store = make_store(self.config, manifest, Path(self._folder.name))
        self.checksums = {0: self.store.publish(0, self.parameters)}

    def engine(self, kind):
        config = self.config.model_copy(
            update={"rollout": self.config.rollout.model_copy(update={"engine": kind})}
        )
        from rhymeflow.workers.rollout import make_engine, prepare

        prepare(config)
        return make_engine(config, self.store.handle.open(), kind)

    def drafter(self, index, limits):
        return drafter_of(self.config, index, limits.max_length, limits.stop_token_ids)

    @torch.no_grad()
    def publish(self, version, change):
        """Publish weights that differ from the first ones by this share."""
        torch.manual_seed(version)
        changed = {
            name: each + change * each.std(correction=0) * torch.randn_like(each)
            for name, each in self.parameters.items()
        }
        self.checksums[version] = self.store.publish(version, changed)

    @torch.no_grad()
    def publish_some(self, version, name, share):
        """Publish weights that differ from the first ones in this share of one tensor."""
        torch.manual_seed(version)
        changed = self.parameters[name].clone()
        flat = changed.view(-1)
        flat[torch.randperm(len(flat))[: int(share * len(flat))]] += 0.5 * changed.std()
        self.checksums[version] = self.store.publish(version, {**self.parameters, name: changed})

    def close(self):
        self.store.close()
        self._folder.cleanup()


def requests_of(rig, num_tokens, *, count=10, stop=()):
    """Requests of every kind; the first two have the same prompt, as siblings do."""
    rng = random.Random(0)
    found = []
    prompt = []
    for i in range(count):
        if i != 1:
            length = rng.randrange(5, 90)
            prompt = [rng.randrange(3, rig.vocabulary) for _ in range(length)]
        how = Sampling(
            *HOWS[i % len(HOWS)],
            max_new_tokens=num_tokens - i,
            stop_token_ids=frozenset(stop if i % 2 else ()),
        )
        found.append(Request(i, list(prompt), NoiseKey(i // 2, 3, i % 2), how))
    return found


def drain(engine, requests=()):
    """Submit and run to the end; return reasons by id."""
    for request in requests:
        engine.submit(request)
    reasons = {}
    while engine.has_work:
        reasons.update({request.id: reason for request, reason in engine.poll(0.01)})
    return reasons


class Knowing(FakeDrafter):
    """A drafter that knows the answers; each drafted token is right with chance `right`."""

    def __init__(self, answers, vocabulary, *, most, right):
        super().__init__(noisy(right, most, vocabulary), answers)

    def observe(self, handles, generated, *, rows, kv_tokens, seconds, other_rows):
        assert 0 <= rows - len(handles) - other_rows <= self.num_drafted
        self.pending = None
        super().observe(handles, generated, rows=rows, kv_tokens=kv_tokens, seconds=seconds)


def assert_same(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens, (one.id, one.sampling)
        assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)


@contextlib.contextmanager
def closing_rig(*args, **overrides):
    rig = Rig(*args, **overrides)
    try:
        yield rig
    finally:
        rig.close()


def compare_with_native(recipe, options, num_tokens, change):
    """Assert that vLLM answers as the native engine, without drafts and with, and so after pulls;
    return vLLM's engine, which is closed."""
    with closing_rig(recipe, "float32", **options) as rig:
        native, vllm = rig.engine("native"), rig.engine("vllm")
        assert vllm.checksum == rig.checksums[0]
        for version in (0, 1, 2):
            if version:
                rig.publish(version, change)
                for engine in (native, vllm):
                    pulled = engine.install(rig.store.handle.open(), version, keep_cache=False)
                    assert pulled == (version, rig.checksums[version])
            expected = requests_of(rig, num_tokens)
            drain(native, expected)
            knowing = Knowing(answers_of(expected), rig.vocabulary, most=9, right=0.85)
            for drafter in (None, knowing):
                vllm.draft_with(drafter)
                requests = requests_of(rig, num_tokens)
                drain(vllm, requests)
                assert_same(requests, expected, 1e-3)
            saved = sum(len(request.tokens) - request.steps for request in requests)
            assert sum(request.drafted for request in requests) > saved > num_tokens
            vllm.draft_with(None)
        vllm.close()
    return vllm


def in_a_process(work, *args):
    """Two engines of vLLM do not go into one."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=args)
    process.start()
    process.join(800)
    assert process.exitcode == 0
