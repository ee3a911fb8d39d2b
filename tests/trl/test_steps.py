"""TRL's batches and ours: the same responses for each optimizer step."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.errors import UserError
from rhymeflow.trl.translate import Steps, steps_in, steps_per_epoch
from tests.refused import refusal

small = st.integers(1, 6)


def steps_of(batch: int, accumulation: int, generations: int, each: int, times: int = 1) -> Steps:
    return steps_in({
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation,
        "num_generations": generations, "steps_per_generation": each, "num_iterations": times,
    })  # fmt: skip


@given(st.tuples(small, small, st.integers(2, 4), small, small), st.integers(1, 60))
def test_steps_and_epochs_have_the_responses_that_they_have_in_trl(numbers, num_rows):
    batch, accumulation, generations, each_time, iterations = numbers
    try:
        steps = steps_of(*numbers)
    except UserError:
        return
    ours = steps.groups_per_batch * generations / steps.num_minibatches
    assert ours == batch * accumulation
    trained = batch * each_time * iterations * steps.generation_batches
    assert steps.per_version == trained / (batch * accumulation)
    # Of an epoch, as TRL's sampler deals out prompts, one micro-batch after the other.
    prompts = batch * each_time // generations
    parts = len(range(0, num_rows - prompts + 1, prompts)) * each_time * iterations
    if num_rows >= prompts:
        assert steps_per_epoch(steps, num_rows) == math.ceil(parts / accumulation)
    else:
        told = refusal(steps_per_epoch, steps, num_rows)
        assert f"{num_rows} rows, fewer than the {prompts} prompts" in told


@pytest.mark.parametrize(
    ("numbers", "part"),
    [
        ((8, 1, 1, 1, 1), "num_generations = 1, must be at least 2"),
        ((3, 1, 2, 1, 1), "num_generations = 2.* divide the 3"),
        ((8, 2, 4, 3, 1), "steps_per_generation = 3"),
        ((8, 4, 4, 2, 2), "num_iterations = 2 an optimizer step would"),
        ((1, 4, 8, 8, 1), "4 responses, which are no whole groups"),
    ],
)
def test_what_cannot_be_is_said(numbers, part):
    assert re.search(part, refusal(steps_of, *numbers))
