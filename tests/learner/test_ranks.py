"""A learner of many ranks is the learner of one, however batches, rows and tensors are cut."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from rhymeflow.config import LoraConfig, ModelConfig
from rhymeflow.config.algorithms import ALGORITHMS
from rhymeflow.learner.ranks import ALONE
from rhymeflow.models.lora import adapter_in, draw_adapter, load_policy, save_adapter, versioned
from tests.learner import rank_jobs
from tests.learner.builders import tiny_model
from tests.learner.rank_jobs import on_ranks, perform

OWN = {"step_time", "packing/computed_share"}  # what depends on how a batch is cut


def same(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) < tolerance, name


def same_rows(found: list[dict], expected: list[dict], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in other.keys() - OWN:
            assert one[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name


def steps(first: int, end: int, what: str = "train") -> list[tuple]:
    return [(what, step) for step in range(first, end)]


FROZEN = {
    "algorithm": "ppo",  # with a critic, of which nothing is frozen
    "critic_learning_rate": 0.01,
    "kind": "qwen2",
    "tied": False,
    "frozen_parameters": ["model.embed_tokens.weight", "model.layers.0.*"],
}
MUCH = {
    "kind": "qwen2",
    "tied": False,
    "beta": 0.1,
    "num_minibatches": 2,
    "num_iterations": 2,
    "max_tokens_per_microbatch": 33,
    "logits_chunk_size": 7,
    "gradient_checkpointing": True,
}
RESPONSES = {
    "algorithm": "gspo",
    "off_policy_correction": "tis",
    "epsilon": 0.2,
    "normalize_importance_weights": True,
    "top_entropy_quantile": 0.5,
    "entropy_coef": 0.01,
    "beta": 0.1,
    "kl_in": "reward",
    "off_policy_level": "sequence",
    "num_minibatches": 2,
    "max_tokens_per_microbatch": 33,
}
CASES = {
    "plain": ({}, steps(0, 20)),
    "everything at once": (MUCH, steps(0, 5)),
    "experts": ({"kind": "qwen3_moe", "optimizer": "adamw_8bit"}, steps(0, 2)),
    "frozen": (FROZEN, steps(0, 2)),
    "whole responses": (RESPONSES, steps(0, 2)),
    "groups ahead of their batch": ({"loss_type": "grpo"}, steps(0, 5, "train early")),
    "adapter": (MUCH | {"lora": 4}, steps(0, 2)),
    "bfloat16": ({"dtype": torch.bfloat16}, steps(0, 4)),
}


CORRECTIONS = [
    {"off_policy_correction": how, "off_policy_level": level, "importance_sampling_floor": 0.1}
    for how in ("tis", "decoupled")
    for level in ("token", "sequence", "geometric_mean")
] + [
    {"off_policy_correction": "none"},
    {"off_policy_correction": "proximal", "delta": 1.5},
    {"dual_clip": 3.0, "advantage": "best_of_group"},
    {"advantage": "length_weighted", "scale_rewards": "batch"},
    {"off_policy_masks": {"token_k2": 1.0, "seq_mean_k3": 0.9, "veto": 1e-4}},
    {"off_policy_mask_threshold": 0.1},
    {"overlong_buffer": 8, "reward_clip": 0.8, "advantage_clip": 1.0},
]


def test_every_algorithm_and_correction_on_two_ranks_is_that_of_one():
    """Groups are cut over ranks, and rows over micro-batches, two of them before the step."""
    given = [{"algorithm": name} for name in ALGORITHMS] + CORRECTIONS
    expected = rank_jobs.each(ALONE, given)
    found, _ = on_ranks(2, rank_jobs.each, given)
    for options, (row, weights), (other, once) in zip(given, found, expected, strict=True):
        try:
            same_rows([row], [other], 1e-4)
            same(weights, once, 1e-5)
        except AssertionError as error:
            raise AssertionError(options) from error


@pytest.mark.parametrize("case", CASES)
def test_steps_on_two_ranks_are_those_of_one(case):
    options, script = CASES[case]
    (rows, weights), _ = on_ranks(2, perform, options, script)
    expected_rows, expected = perform(ALONE, options, script)
    close = 0.02 if case == "bfloat16" else 1e-5
    for one, other in zip(rows, expected_rows, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=close, abs=close)
    same(weights, expected, close)
    assert {each.dtype for each in weights.values()} == {options.get("dtype", torch.float32)}
    if case == "bfloat16":  # rounding hides the rest
        return
    same_rows(rows, expected_rows, 1e-4)  # among it are exponentials of what differs
    begun = rank_jobs.whole_weights(rank_jobs.a_learner(ALONE, **options))
    moved = {name for name in begun if float((weights[name] - begun[name]).abs().max()) > 1e-3}
    frozen = {n for n in begun if "embed_tokens" in n or ".0." in n} if case == "frozen" else set()
    assert moved
    assert all(torch.equal(weights[name], begun[name]) == (name in frozen) for name in begun)


def test_ranks_with_nothing_to_differentiate_take_the_step_together():
    script = [("train on equal rewards", 0)]
    first, second = on_ranks(3, perform, {"num_minibatches": 2}, script)[:2]
    assert first[0][0]["grad_norm"] == second[0][0]["grad_norm"] == 0.0
    assert first[0][0]["loss"] == 0.0
    assert first[0][0]["entropy"] > 0.0


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all():
    for said, is_unchanged in on_ranks(2, rank_jobs.break_a_gradient):
        assert "the gradient is not finite" in said
        assert "in 1 of 20 parameters" in said
        assert is_unchanged


def test_rows_come_from_the_models_files(tmp_path):
    tiny_model("qwen2", tied=False).save_pretrained(tmp_path)
    (found, critics, is_by_rows), _ = on_ranks(2, rank_jobs.fill_from_files, tmp_path)
    assert is_by_rows
    expected = dict(tiny_model("qwen2", tied=False).named_parameters())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    expected["lm_head.weight"] = torch.zeros(1, 32)
    assert all(torch.equal(critics[name], value) for name, value in expected.items())


@pytest.fixture
def adapters(tmp_path):
    """Models with adapters: new, with a head that is trained whole, and that one from files."""
    tiny_model("qwen2", tied=False).save_pretrained(tmp_path / "model")
    new, whole, given = (
        ModelConfig(name=str(tmp_path / "model"), lora=LoraConfig(**fields))
        for fields in (
            {"rank": 3},
            {"rank": 2, "modules_to_save": ("lm_head",)},
            {"adapter": str(tmp_path / "adapter")},
        )
    )
    model = load_policy(whole, dtype=torch.float32, device=torch.device("cpu"), seed=1)
    draw_adapter(model)
    with torch.no_grad():
        model.lm_head.weight *= 1.1
    (tmp_path / "adapter").mkdir()
    save_adapter(tmp_path / "adapter", adapter_in(model), whole.name, versioned(model))
    return new, whole, given


def test_an_adapter_on_two_ranks_is_that_of_one(adapters):
    """The checksums say that its values and the model under it are, to the bit."""
    given = list(zip(adapters, (torch.bfloat16, torch.float32, torch.float32), strict=True))
    expected = rank_jobs.train_adapters(ALONE, given)
    found = zip(*on_ranks(2, rank_jobs.train_adapters, given), strict=True)
    for (_, dtype), (checksum, size, loss), (one, other) in zip(
        given, expected, found, strict=True
    ):
        assert one[0] == other[0] == checksum
        assert one[1] + other[1] == size
        assert one[2] == pytest.approx(loss, abs=0.02 if dtype == torch.bfloat16 else 1e-4)


def test_rows_under_an_adapter_that_were_changed_are_found(adapters):
    well, said = on_ranks(2, rank_jobs.spoil_the_base, adapters[0])
    assert not well
    assert "changed in place" in said
    assert "first model.layers.1.mlp.down_proj.weight" in said


# -- checkpoints ----------------------------------------------------------------------------------

HALF = 3


@pytest.fixture(scope="module", params=["plain", "frozen", "adapter", "of one rank"])
def saved(request, tmp_path_factory):
    """Options, a checkpoint after half of the steps, and the other half."""
    directory = tmp_path_factory.mktemp("checkpoint") / f"step-{HALF}"
    where = f"file://{directory}" if request.param == "plain" else directory
    options = {"frozen": FROZEN, "adapter": {"lora": 4}}.get(request.param, {})
    script = [*steps(0, HALF), ("copy", None), *steps(HALF, 2 * HALF), ("write", where)]
    if request.param == "of one rank":
        rows, weights = perform(ALONE, options, script)
    else:
        rows, weights = on_ranks(2, perform, options, script)[0]
    return options, where, rows[HALF:], weights, request.param


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_was_saved_goes_on_on_any_number_of_ranks(saved, num_ranks):
    options, where, rows, weights, by = saved
    script = [("restore", (where, HALF)), *steps(HALF, 2 * HALF)]
    if num_ranks == 1:
        found_rows, found = perform(ALONE, options, script)
    else:
        found_rows, found = on_ranks(num_ranks, perform, options, script)[0]
    tolerance = 1e-12 if num_ranks == (1 if by == "of one rank" else 2) else 1e-5
    same_rows(found_rows, rows, tolerance)
    same(found, weights, tolerance)


def test_what_was_saved_loads_in_plain_transformers(saved):
    options, where, *_, by = saved
    _, weights = perform(ALONE, options, [("restore", (where, HALF))])
    if by == "adapter":
        plain = peft.PeftModel.from_pretrained(tiny_model(), where).base_model.model
        weights = {f"{name}.default.weight": value for name, value in weights.items()}
    else:
        plain = AutoModelForCausalLM.from_pretrained(str(where).removeprefix("file://"))
    for name, value in weights.items():
        assert torch.equal(plain.get_parameter(name), value), name


def test_if_one_rank_cannot_write_nobody_has_written(tmp_path):
    for said in on_ranks(2, rank_jobs.save_where_no_room_is, tmp_path / "step-1"):
        assert "No space left on device" in said
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_gone_is_noticed_at_once():
    (said, seconds), _ = on_ranks(2, rank_jobs.lose_a_rank)
    assert "Error" in said
    assert seconds < 10
