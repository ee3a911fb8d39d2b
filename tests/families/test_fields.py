"""A field of a configuration that is changed has the effect that it has in transformers.

Each number and switch of any type's configuration is changed in one type that has it. What engine
and learner compute is then that of transformers' eager code, or one of a few is refused.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel

from rhymeflow.config import LearnerConfig, ModelConfig, RolloutConfig
from rhymeflow.errors import UserError
from rhymeflow.learner.packing import pack
from rhymeflow.learner.policy import proved_scorer
from rhymeflow.learner.sample import Sample
from rhymeflow.models import attention, proof
from rhymeflow.models.families import FAMILIES
from rhymeflow.models.load import load_config
from tests.engine.models import make_engine, make_requests, run, sampling
from tests.families.cases import GROUPS, STATES, YARN, config_of, model_of
from tests.families.checks import TOLERANCE, logprobs_of

NOT_COMPUTED = (
    *("dropout", "pdrop", "_token_id", "token_index", "initializer_range", "loss_coef", "output_"),
    *("return_dict", "use_cache", "is_decoder", "vocab_size", "max_position", "n_positions"),
    *("jitter", "is_encoder", "cross_attention", "chunk_size_feed_forward", "hidden_layers"),
    *("n_layer", "pretraining_tp", "layerdrop", "summary_", "reorder_and_upcast"),
    "index_",  # of sparse layers, which are refused
)
"""In names of fields that no forward pass in eval mode reads, and of lengths and depths."""
REFUSED = {"use_bidirectional_attention", "multi_query", "qk_head_dim"}
"""Those whose change the proof, or the attention, refuses; the last contradict other fields."""
ROPES = {
    "rope partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "rope linear": {"rope_type": "linear", "factor": 2.0},
    "rope yarn": YARN,
}


def changes_of(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a case's configuration, each with another value."""
    text = config_of(name).get_text_config()
    for key, value in text.to_dict().items():
        if any(each in key for each in NOT_COMPUTED):
            continue
        if isinstance(value, bool):
            yield key, not value
        elif isinstance(value, int):
            yield key, 2 * value or 1
        elif isinstance(value, float):
            yield key, 1.5 * value + 0.05
    if "rope_theta" in (getattr(text, "rope_parameters", None) or {}):
        for key, parameters in ROPES.items():
            yield key, {"rope_theta": 5e3, **parameters}


def in_one_case_each() -> dict[str, list[tuple[str, Any]]]:
    """The changes by the case in which each is made: the first that has the field. Those that
    `Layers` of the engine computes are made in all of its types."""
    found: set[str] = set()
    chosen: dict[str, list[tuple[str, Any]]] = {}
    for name in (each for group in GROUPS for each in group):
        if name == name.split()[0]:
            everywhere = name in ("llama", "mistral", "qwen2", "qwen3")
            here = [c for c in changes_of(name) if everywhere or c[0] not in found]
            chosen |= {name: here} if here else {}
            found |= {key for key, _ in here}
    return chosen


CHANGES = in_one_case_each()


def own_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """As transformers computes them."""
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(torch.tensor([ids]), use_cache=False).logits
    finally:
        model.set_attn_implementation(attention.NAME)


def check_sampled(model: PreTrainedModel, *, has_engine: bool) -> None:
    """Log-probabilities of some responses in engine and learner, against transformers."""
    requests = make_requests((3, 17, 40), sampling(max_new_tokens=6))
    if has_engine:
        run(make_engine(model, max_prefill_tokens=16), requests)
    samples = []
    for each in requests:
        tokens, plain = each.tokens or [5, 6, 7, 8, 9, 10], [0.0] * 6
        samples.append(Sample(0, each.prompt_ids, tokens, plain, [0] * 6, 1.0, truncated=False))
    (row,) = pack(samples, range(len(samples)), 10**6)
    learned, _ = proved_scorer(model, RolloutConfig(), LearnerConfig(max_steps=1)).score(row)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = torch.cat([logprobs_of(model, s.prompt_ids, s.completion_ids) for s in samples])
    torch.testing.assert_close(learned, own, rtol=0, atol=TOLERANCE)
    if has_engine:
        found = torch.tensor([x for each in requests for x in each.logprobs])
        torch.testing.assert_close(found, own, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_field_changes_in_transformers_it_changes_here(name):
    family, ids = FAMILIES[name], [*range(3, 60)]
    before, num_changed = own_logits(model_of(name), ids), 0
    for key, value in CHANGES[name]:
        field = "rope_parameters" if key in ROPES else key
        try:
            model = model_of(name, **{field: value})
            after = own_logits(model, ids)
        except Exception:  # noqa: BLE001 - the fields contradict each other
            continue
        num_changed += not torch.equal(before, after)
        try:
            check_sampled(model, has_engine=(family.state or family.not_native) is None)
        except UserError as error:
            if key not in REFUSED:
                raise AssertionError(f"{key} = {value}: {error}") from None
        except AssertionError as error:
            raise AssertionError(f"{key} = {value}: {error}") from None
    assert num_changed or len(CHANGES[name]) < 5


FIRST_NEAR, ALL_FULL = ["sliding_attention", "full_attention"], ["full_attention"] * 2
STRAYS: tuple[dict[str, Any], ...] = (
    {"sliding_window": 4, "use_sliding_window": False},
    {"sliding_window": 4, "use_sliding_window": False, "layer_types": FIRST_NEAR},
    {"sliding_window": 4, "layer_types": ALL_FULL},
    {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"]},
)
"""How far layers attend, in fields that some types have and transformers ignores in others."""


ATTEND = [name for group in GROUPS for name in group if name in FAMILIES and name not in STATES]


@pytest.mark.parametrize("name", ATTEND)
def test_how_far_layers_attend_is_as_in_transformers_or_refused(name, tmp_path, monkeypatch):
    """By the proof at start, on so many tokens that it fills each window."""
    monkeypatch.setattr(proof, "sequences", lambda model: [([*range(3, 60)], 3)])
    monkeypatch.setattr(proof, "check", same)
    for fields in STRAYS:
        with suppress(UserError, StrictDataclassError, ValueError):  # transformers refuses some
            config_of(name, **fields).save_pretrained(tmp_path)
            read = load_config(ModelConfig(name=str(tmp_path)))
            if read.model_type == name:  # it makes a Ministral of a Mistral with layer_types
                proved_scorer(model_of(name, **fields), RolloutConfig(), LearnerConfig(max_steps=1))


def same(model, logprob_N, expected, who):
    torch.testing.assert_close(logprob_N, expected[0], rtol=0, atol=TOLERANCE)
