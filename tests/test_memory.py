"""The one estimate of memory: by hand, against recorded measurements, and refused in one line."""

import os
from dataclasses import replace

import pytest
import torch
from transformers import HunYuanMoEV1Config, Qwen3NextConfig

from rhymeflow import check, cli, memory
from rhymeflow.cli.dry_run import placement
from rhymeflow.config import Config
from rhymeflow.config.load import build_config, parse_config, read_config
from rhymeflow.engine.native.sampler import sampling_bytes
from rhymeflow.errors import UserError

TINY = memory.ModelSize(
    num_parameters=1000, num_outside=200, num_layers=2, num_attending=2, num_heads=6,
    num_kv_heads=3, head_size=5, hidden_size=10, intermediate_size=9, num_experts=0,
    experts_per_token=0, normalises_heads=False, vocab_size=7, max_positions=100, reach=0,
    dtype=torch.bfloat16, device="cpu",
)  # fmt: skip
FLOAT32 = replace(TINY, dtype=torch.float32)


def parts(model: memory.ModelSize, **given: object) -> dict[tuple[str, str], float]:
    config = build_config(given, where="test")
    found = memory.here(config, model, 10)
    return {(who, part.what.split(",")[0].split(" (")[0]): part.num_bytes for who, part in found}


def test_parts_are_counted_process_by_process():
    found = parts(
        TINY, max_num_seqs=4, max_completion_length=20, groups_per_batch=2, num_instances=2,
        beta=0.1, logits_chunk_size=11, window="off",
    )  # fmt: skip
    assert found == {
        ("weight store", "weights"): 2 * 2000,
        ("2 x rollout", "weights"): 2 * 2000,
        ("2 x rollout", "KV cache"): 2 * 4 * 30 * (2 * 2 * 3 * 5) * 2,
        ("learner", "master weights"): 4000,
        ("learner", "weights"): 2000,
        ("learner", "gradients"): 4000,
        ("learner", "AdamW moments"): 8000,
        # 2 prompts of 10 tokens, 8 responses of 20 to each: norms, attention, MLP of 2 layers,
        # and what one is differentiated with, which is more than 11 rows of logits.
        ("learner", "activations of 340 tokens"): (
            1.25 * 340 * 2 * (2 * 8 * 10 + 2 * 2 * 9 * 5 + 2 * 4 * 9)
        ),
        ("learner", "backward pass of one layer"): 1.25 * 340 * 2 * (40 + 36),
        ("learner", "reference model"): 2000,
    }


def test_ranks_share_the_learners_memory_and_each_gathers_some():
    one, four = (parts(FLOAT32, num_ranks=n, window="off") for n in (1, 4))
    assert one["learner", "master weights"] == four["4 x learner", "master weights"] == 4000
    gathered = four["4 x learner", "gathered: embeddings"]
    assert gathered == 4 * 2 * (200 + 800) * 4
    config = build_config({"num_ranks": 2, "learner.cpus": [0, 1, 2]}, where="test")
    places = dict(placement(config, "cpu"))
    assert places["learner"].endswith("pinned to cores 0")
    assert places["learner rank 1"].endswith("pinned to cores 1, 2")


def test_moments_are_those_of_the_optimizer():
    found = {name: parts(FLOAT32, optimizer=name, window="off") for name in ("adamw_8bit", "muon")}
    assert found["adamw_8bit"]["learner", "AdamW moments"] == 2000 + 2000 * 4 // 256
    assert found["muon"]["learner", "Muon moments"] == 4 * 800 + 8 * 200


def test_what_drafts_come_from_is_counted_where_there_are_drafts():
    without = parts(FLOAT32, window="off")
    few, many = (parts(FLOAT32, history_tokens=n) for n in (10_000, 1_000_000))
    assert len(few) == len(many) == len(without) + 2
    assert check.LEAST_HISTORY < (sum(many.values()) - sum(few.values())) / 990_000 < 80, "bytes"


def test_drafts_are_sampled_for_on_gpus():
    """As many rows as there may be; the sampler's own tests say what they take."""
    for window, rows in (("off", 4), ("cost", 4 * 17)):
        config = build_config({"max_num_seqs": 4, "window": window, "max_draft": 16}, where="test")
        *_, part = memory.of_instance(config, replace(TINY, device="cuda"), 10)
        assert part.what == f"sampling, {rows} rows x 7"
        assert part.num_bytes == sampling_bytes(rows, 7, 4, truncates=False)


def test_changes_and_contexts():
    config = build_config({"transport": "delta", "max_staleness": 3}, where="test")
    [part] = memory.of_changes(config, TINY)
    assert part == ("changes to 5 versions, at most", 5 * 2000 / 4)
    assert memory.longest(Config(), TINY, 10) == 100, "the model's context"
    near, seqs = replace(TINY, max_positions=9000, reach=600), Config().rollout.max_num_seqs
    long = build_config({"rollout.max_completion_length": 5000}, where="test")
    assert memory.kv_tokens(long, near, 10) == seqs * 1024, "a slot that has room for 600 and more"
    assert memory.kv_tokens(Config(), near, 10) == seqs * memory.longest(Config(), near, 10)


SMOLLM2 = replace(
    FLOAT32, num_parameters=134_515_008, num_outside=49152 * 576, num_layers=30,
    num_attending=30, num_heads=9, num_kv_heads=3, head_size=64, hidden_size=576,
    intermediate_size=1536, vocab_size=49152, max_positions=8192,
)  # fmt: skip


def test_layers_that_carry_a_state_have_no_keys_and_values():
    kinds = [*["linear_attention"] * 3, "full_attention"] * 2
    hybrid = Qwen3NextConfig(layer_types=kinds, num_hidden_layers=8, num_experts=4)
    size = memory.model_of(hybrid, torch.bfloat16, "cpu")
    assert (size.num_layers, size.num_attending) == (8, 2)
    assert size.kv_token == 2 * 2 * hybrid.num_key_value_heads * hybrid.head_dim * 2


def test_of_sizes_for_each_layer_the_largest_counts():
    sizes = {"num_hidden_layers": 2, "head_dim": 4, "vocab_size": 9, "num_experts": 4}
    mixture = HunYuanMoEV1Config(moe_topk=[2, 3], moe_intermediate_size=[5, 7], **sizes)
    size = memory.model_of(mixture, torch.bfloat16, "cpu")
    assert (size.experts_per_token, size.intermediate_size) == (3, 21)


PEAKS = [
    # recipe, tokens of the micro-batch, MB at the peak of a step in float32 on a CPU:
    # benchmarks/results/learner-memory.md is a later measurement
    ("demo", 4000, 318.8),
    ("demo", 8000, 567.7),
    ("smollm2", 500, 2933),
    ("smollm2", 2000, 5570),
]


@pytest.mark.parametrize(("recipe", "tokens", "peak"), PEAKS)
def test_the_learners_peaks_are_within_a_fifth(recipe, tokens, peak):
    config = read_config(recipe, {"model.dtype": "float32", "model.device": "cpu"})
    model = memory.model_here(config) if recipe == "demo" else SMOLLM2
    taken = [*memory.of_optimizer(config, model), *memory.of_pass(config, model, tokens)]
    assert memory.total(taken) / 1e6 == pytest.approx(peak, rel=0.2)


TOO_MUCH = [
    # field, value, what the message must hold
    ("learner.cpus", "[99999]", "learner.cpus: there is no core 99999; cores are 0 to "),
    ("learner.cpus", "[]", "learner.cpus: names no core; null pins nothing"),
    ("learner.num_ranks", "1000000", "learner.num_ranks = 1,000,000: so many processes take"),
    ("rollout.cpus", "[[99999]]", "rollout.cpus.0: there is no core 99999"),
    ("rollout.num_instances", "100000", "rollout.num_instances = 100,000: so many processes take"),
    ("rollout.max_num_seqs", f"{10**12}", "rollout.max_num_seqs = 1,000,000,000,000: "),
    ("drafting.history_tokens", f"{10**15}", "their index takes at least 58,000,000 GB"),
]


@pytest.mark.parametrize(("field", "value", "said"), TOO_MUCH)
def test_more_than_there_is(field, value, said, refused):
    assert said in refused("train", "demo", "--dry-run", f"--{field}", value)


@pytest.mark.parametrize("field", ["rollout.max_num_seqs", "drafting.history_tokens"])
@pytest.mark.parametrize("value", [10**15, 2**62])
def test_a_plan_may_be_for_another_machine_but_not_for_none(field, value, refused, capsys):
    plan = ["train", "demo", "--dry-run=plan"]
    assert cli.main([*plan, "--learner.cpus", "[99999]"]) == 0
    capsys.readouterr()
    assert f"{field} = {value:,}" in refused(*plan, f"--{field}", str(value))


def test_what_there_is_passes(monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    check.check_machine(parse_config("", {"learner.cpus": str(cores)}))
    history = {"drafting.history_tokens": f"{10**15}", "drafting.window": "off"}
    check.check_machine(parse_config("", history))
    monkeypatch.delattr(os, "sched_setaffinity")
    check.check_machine(Config())
    with pytest.raises(UserError, match=r"rollout\.cpus\.0: this system cannot pin"):
        check.check_machine(parse_config("", {"rollout.cpus": "[[0]]"}))
