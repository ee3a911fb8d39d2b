"""A learner of many ranks is the learner of one, however batches, rows and tensors are cut."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.learner import rank_jobs
from tests.learner.builders import made_up_batch, tiny_learner, tiny_model
from tests.learner.rank_pool import on_ranks

OWN = {"step_time", "packing/computed_share"}
"""What depends on how a batch is cut."""


def alone(steps: int, options: dict) -> tuple[list[dict], dict]:
    model = tiny_model(options.pop("kind", "llama"), tied=options.pop("tied", True))
    learner = tiny_learner(model=model, **options)
    rows = [learner.train(made_up_batch(seed=step), step) for step in range(steps)]
    return rows, learner.weights()


def same(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) < tolerance, name


def same_rows(found: list[dict], expected: list[dict], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in other.keys() - OWN:
            assert one[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name


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


@pytest.mark.parametrize(
    ("steps", "options"),
    [(20, {}), (5, MUCH), (2, {"kind": "qwen3_moe"})],
    ids=["plain", "everything at once", "experts"],
)
def test_steps_on_two_ranks_are_those_of_one(steps: int, options: dict):
    (rows, weights), _ = on_ranks(2, rank_jobs.train, steps, options)
    expected_rows, expected = alone(steps, dict(options))
    for one, other in zip(rows, expected_rows, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    same_rows(rows, expected_rows, 1e-4)  # among it are exponentials of what differs
    same(weights, expected, 1e-5)
    begun = tiny_model().state_dict()
    assert max(float((expected[n] - begun[n]).abs().max()) for n in begun if n in expected) > 1e-3


def test_groups_that_are_accumulated_early_are_part_of_the_batch():
    (rows, weights), _ = on_ranks(2, rank_jobs.train_early, 5, {"loss_type": "grpo"})
    expected_rows, expected = alone(5, {"loss_type": "grpo"})
    same_rows(rows, expected_rows, 1e-4)
    same(weights, expected, 1e-5)


def test_bfloat16_follows_the_single_rank_closely():
    (rows, weights), _ = on_ranks(2, rank_jobs.train, 4, {"dtype": torch.bfloat16})
    expected_rows, expected = alone(4, {"dtype": torch.bfloat16})
    same_rows(
        [{"loss": r["loss"]} for r in rows], [{"loss": r["loss"]} for r in expected_rows], 0.02
    )
    assert all(each.dtype == torch.bfloat16 for each in weights.values())
    same(weights, expected, 0.02)


def test_ranks_with_nothing_to_differentiate_take_the_step_together():
    first, second = on_ranks(3, rank_jobs.train_on_nothing)[:2]
    assert first["grad_norm"] == second["grad_norm"] == 0.0
    assert first["loss"] == 0.0
    assert first["entropy"] > 0.0


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all():
    for said, is_unchanged in on_ranks(2, rank_jobs.break_a_gradient):
        assert "the gradient is not finite" in said
        assert "in 1 of 20 parameters" in said
        assert is_unchanged


def test_rank_0_holds_a_block_at_a_time():
    (found, held), _, _ = on_ranks(3, rank_jobs.publish_by_demand)
    expected = dict(tiny_model().named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value.detach().bfloat16()), name
    layer = sum(p.numel() for n, p in expected.items() if "layers.0." in n)
    assert max(held) == layer < sum(p.numel() for p in expected.values()) / 2


def test_rows_come_from_the_models_files(tmp_path):
    tiny_model("qwen2", tied=False).save_pretrained(tmp_path)
    (found, is_by_rows), _ = on_ranks(2, rank_jobs.fill_from_files, tmp_path)
    assert is_by_rows
    expected = dict(tiny_model("qwen2", tied=False).named_parameters())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# -- checkpoints ----------------------------------------------------------------------------------

HALF = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks, and the steps after it."""
    directory = tmp_path_factory.mktemp("checkpoint") / f"step-{HALF}"
    rows, weights = on_ranks(2, rank_jobs.save_and_go_on, directory, HALF)[0]
    return directory, rows, weights


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_two_ranks_saved_goes_on_on_any_number(saved, num_ranks: int):
    directory, rows, weights = saved
    found_rows, found = on_ranks(num_ranks, rank_jobs.restore_and_go_on, directory, HALF)[0]
    tolerance = 1e-12 if num_ranks == 2 else 1e-5
    same_rows(found_rows, rows, tolerance)
    same(found, weights, tolerance)


def test_what_two_ranks_saved_goes_on_alone_and_loads_in_plain_transformers(saved):
    directory, rows, weights = saved
    learner = tiny_learner()
    assert learner.restore(directory) == HALF
    plain = AutoModelForCausalLM.from_pretrained(directory)
    for name, value in learner.weights().items():
        assert torch.equal(plain.get_parameter(name), value), name
    same_rows([learner.train(made_up_batch(seed=s), s) for s in range(HALF, 2 * HALF)], rows, 1e-5)
    same(learner.weights(), weights, 1e-5)


def test_what_one_saved_goes_on_on_two_ranks(tmp_path):
    learner = tiny_learner()
    for step in range(HALF):
        learner.train(made_up_batch(seed=step), step)
    learner.save(tmp_path / "step")
    found_rows, found = on_ranks(2, rank_jobs.restore_and_go_on, tmp_path / "step", HALF)[0]
    rows = [learner.train(made_up_batch(seed=s), s) for s in range(HALF, 2 * HALF)]
    same_rows(found_rows, rows, 1e-5)
    same(found, learner.weights(), 1e-5)


def test_if_one_rank_cannot_write_nobody_has_written(tmp_path):
    for said in on_ranks(2, rank_jobs.save_where_no_room_is, tmp_path / "step-1"):
        assert "No space left on device" in said
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_gone_is_noticed_at_once():
    (said, seconds), _ = on_ranks(2, rank_jobs.lose_a_rank)
    assert "Error" in said
    assert seconds < 10
