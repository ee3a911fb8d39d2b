"""What ranks are asked to do in `test_ranks.py`."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter

from rhymeflow.config import ModelConfig
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.ranks import Ranks
from rhymeflow.models.rows import WeightRows
from tests.learner.builders import learner_config, made_up_batch, rollout_config, tiny_model


def a_learner(
    ranks: Ranks, *, dtype: torch.dtype = torch.float32, kind: str = "llama", tied=True, **changes
) -> Learner:
    model, reference = (tiny_model(kind, tied=tied) for _ in "12")
    return Learner(
        model, None, learner_config(**changes), rollout_config(), dtype, ranks, reference=reference
    )


def whole_weights(learner: Learner) -> dict[str, torch.Tensor]:
    gathered = {}
    for block in learner.weights().blocks():
        gathered |= {name: each.clone() for name, each in block.items()}
    return gathered


def perform(ranks: Ranks, options: dict, script: list[tuple]) -> tuple[list[dict], dict]:
    """The metrics of each step that was trained, and the weights at the end."""
    learner, rows, snapshot = a_learner(ranks, **options), [], None
    for what, given in script:
        match what:
            case "train":
                rows.append(learner.train(made_up_batch(seed=given), given))
            case "train early":  # among it, at first, fewer groups than there are ranks
                batch = made_up_batch(seed=given)
                learner.accumulate(batch[:4])
                learner.accumulate(batch[4:12])
                rows.append(learner.train(batch[12:], given))
            case "train on equal rewards":  # no rank has anything to differentiate
                batch = [sample for sample in made_up_batch() if sample.group == 1]
                rows.append(learner.train(batch * 2, given))
            case "copy":
                snapshot = learner.snapshot()
            case "write":  # what came since the copy must not be in it
                snapshot.write(given)
            case "restore":
                directory, version = given
                assert learner.restore(directory) == version
    return rows, whole_weights(learner)


def break_a_gradient(ranks: Ranks) -> tuple[str, bool]:
    learner = a_learner(ranks)
    before = whole_weights(learner)
    if ranks.rank == 1:  # only one of them sees it
        parameter = list(learner.model.parameters())[-1]
        step = learner._optimizer.step

        def spoiled(rate: float, scale: float) -> float:
            parameter.grad.to_local().fill_(torch.nan)
            return step(rate, scale)

        learner._optimizer.step = spoiled
    learner.train(made_up_batch(), 0)
    after = whole_weights(learner)
    return learner.skipped[0], all(torch.equal(before[n], after[n]) for n in before)


def publish_by_demand(ranks: Ranks) -> tuple[dict, list[int]]:
    """The parameters, and how much rank 0 held at a time."""
    weights = a_learner(ranks, dtype=torch.bfloat16).weights()
    if not ranks.is_lead:
        weights.give()
        return {}, []
    found, held = {}, []
    for name, tensor in weights.items():
        found[name] = tensor.clone()
        held.append(sum(each.numel() for each in weights._block.values()))
    return found, held


def fill_from_files(ranks: Ranks, model: Path) -> tuple[dict, bool]:
    rows = WeightRows(ModelConfig(name=str(model)))
    learner = Learner(
        rows.skeleton(), None, learner_config(), rollout_config(), torch.float32, ranks,
        read=rows.read,
    )  # fmt: skip
    return whole_weights(learner), rows._whole is None


def save_where_no_room_is(ranks: Ranks, directory: Path) -> str:
    """Rank 1 cannot write its part."""
    snapshot = a_learner(ranks).snapshot()
    if ranks.rank == 1:
        FileSystemWriter.write_data = _no_room
    try:
        snapshot.write(directory)
    except OSError as error:
        return str(error)
    return ""


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def lose_a_rank(ranks: Ranks) -> tuple[str, float]:
    learner = a_learner(ranks)
    started = time.monotonic()
    if ranks.rank == 1:
        return "", 0.0  # its process ends
    try:
        learner.train(made_up_batch(), 0)
    except RuntimeError as error:
        return type(error).__name__, time.monotonic() - started
    return "it trained alone", 0.0
