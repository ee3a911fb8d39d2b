"""A tree's tokens see the sequence and their ancestors: each as if its path were all there is."""

import random

import pytest
import torch

from rhymeflow.engine.native import engine as engine_module
from rhymeflow.engine.native.sampler import sample
from rhymeflow.histospec.draft import Draft
from tests.engine.drafters import FakeDrafter
from tests.engine.models import VOCABULARY, make_engine, make_requests, sampling, tiny_model

LENGTHS = (1, 5, 17, 60)


def random_tree(size, rng):
    return Draft(
        [rng.randrange(VOCABULARY) for _ in range(size)],
        [rng.randint(max(-1, node - 4), node - 1) for node in range(size)],
    )


def path_tokens(draft, node):
    return [] if node < 0 else [*path_tokens(draft, draft.parents[node]), draft.tokens[node]]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("sizes", [(6, 6, 6, 6), (1, 14, 3, 30), (45, 2, 60, 9), (33, 32, 0, 5)])
def test_logits_of_a_tree_are_those_of_its_paths(sizes, kind, monkeypatch):
    """In float64 (but for norms and rotations, float32 in the model), against the plain model on
    each path. Trees of several shapes and widths at once,
    those above 32 tokens attended to by themselves."""
    rng = random.Random(5)
    trees = dict(zip(LENGTHS, [random_tree(size, rng) for size in sizes], strict=True))
    requests = make_requests(LENGTHS, sampling(max_new_tokens=200))
    by_prompt = {(tuple(r.prompt_ids), r.noise_key.sample): len(r.prompt_ids) for r in requests}
    drafter = FakeDrafter(lambda length, at, room, rng: trees[length], by_prompt)
    engine = make_engine(
        tiny_model(kind).double(), max_prefill_tokens=10**4, drafter=drafter, max_num_seqs=4
    )
    for request in requests:
        engine.submit(request)
    engine.step()
    seen = {}

    def remembered(logits_RV, draws):
        rows = logits_RV.split([len(draw.positions) for draw in draws])
        seen.update({draw.stream: part for draw, part in zip(draws, rows, strict=True)})
        return sample(logits_RV, draws)

    streams = {s.request.id: s.stream for s in engine._scheduler.running}
    known = {r.id: r.prompt_ids + r.tokens for r in requests}
    monkeypatch.setattr(engine_module, "sample", remembered)
    # a single-token prompt is ready in the first iteration, so its tree has been run once already
    engine.step()
    plain = tiny_model(kind, "eager").double()
    for request in requests:
        draft, logits = trees[len(request.prompt_ids)], seen[streams[request.id]]
        assert len(logits) == 1 + len(draft.tokens)
        for node in range(-1, len(draft.tokens)):
            ids = torch.tensor([known[request.id] + path_tokens(draft, node)])
            with torch.no_grad():
                expected = plain(ids).logits[0, -1].float()
            torch.testing.assert_close(logits[node + 1], expected, rtol=1e-5, atol=1e-5)
