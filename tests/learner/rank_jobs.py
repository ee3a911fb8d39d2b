"""Ranks in processes of their own, and what they are asked to do in `test_ranks.py`."""

import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from transformers import PreTrainedModel

from rhymeflow.config import LoraConfig, ModelConfig
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.ranks import Ranks, address_of, meeting_place
from rhymeflow.learner.sample import Sample
from rhymeflow.models.adapter_files import adapter_of
from rhymeflow.models.frozen_base import PARTS
from rhymeflow.models.lora import attach, load_policy, policy_rows, unversioned
from rhymeflow.models.rows import WeightRows
from rhymeflow.runtime import processes
from rhymeflow.store.checkpoint_dirs import CheckpointDir, CheckpointPlace
from rhymeflow.weights.proof import ChecksumMismatch
from tests.learner.builders import VOCAB, learner_config, made_up_batch, rollout_config, tiny_model

TIMEOUT = 60.0


def checkpoint_at(where: Path | str) -> CheckpointDir:
    """In a directory, or below a URL."""
    if isinstance(where, Path):
        return CheckpointDir(where)
    url, _, version = where.rpartition("/step-")
    return CheckpointPlace(url).at(int(version))


def on_ranks(
    num_ranks: int, job: Callable[..., Any], *args: Any, timeout: float = TIMEOUT
) -> list[Any]:
    """`job(ranks, *args)` on every rank; `job` is at the top level of a module."""
    processes.prepare()
    pipes, workers = [], []
    for rank in range(num_ranks):
        ours, theirs = processes.context().Pipe()
        worker = processes.context().Process(
            target=_enter, args=(theirs, rank, num_ranks, job, args)
        )
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    deadline = time.monotonic() + timeout
    try:
        address = _receive(pipes[0], deadline)
        for pipe in pipes[1:]:
            pipe.send(address)
        answers = [_receive(pipe, deadline) for pipe in pipes]
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        return answers
    finally:
        for worker in workers:
            worker.kill()


def _send(pipe: Connection, kind: str, value: Any) -> None:
    pipe.send_bytes(pickle.dumps((kind, value)))  # `send` would have tensors shared, not copied


def _receive(pipe: Connection, deadline: float) -> Any:
    assert pipe.poll(max(0.0, deadline - time.monotonic())), "the ranks hang"
    kind, value = pickle.loads(pipe.recv_bytes())
    assert kind == "ok", value
    return value


def _enter(pipe: Connection, rank: int, num_ranks: int, job: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    try:
        store = meeting_place(num_ranks) if rank == 0 else None
        if store is not None:
            _send(pipe, "ok", address_of(store))
        ranks = Ranks.meet(store or pipe.recv(), rank, num_ranks, torch.device("cpu"), TIMEOUT)
        _send(pipe, "ok", job(ranks, *args))
    except BaseException:  # noqa: BLE001 - the test is to say what it was
        _send(pipe, "error", traceback.format_exc())


def a_learner(
    ranks: Ranks,
    *,
    dtype: torch.dtype = torch.float32,
    kind: str = "llama",
    tied: bool = True,
    lora: int = 0,
    **changes,
) -> Learner:
    model, reference = (tiny_model(kind, tied=tied) for _ in "12")
    if lora:
        attach(model, adapter_of(LoraConfig(rank=lora)), seed=5)
    return Learner(
        model, None, learner_config(**changes), rollout_config(), dtype, ranks, reference=reference
    )


def whole_weights(learner: Learner) -> dict[str, torch.Tensor]:
    gathered = {}
    for block in learner.snapshot()._weights.blocks():
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
                snapshot.write(checkpoint_at(given))
            case "restore":
                directory, version = given
                assert learner.restore(checkpoint_at(directory)) == version
    return rows, whole_weights(learner)


def each(ranks: Ranks, given: list[dict]) -> list[tuple[dict, dict]]:
    """Metrics and weights of a step of two minibatches with each of these options."""
    small = {"max_tokens_per_microbatch": 33, "num_minibatches": 2, "adam_epsilon": 1e-3}
    found = []
    for options in given:
        (row,), weights = perform(ranks, small | options, [("train", 0)])
        found.append((row, weights))
    return found


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


def fill_from_files(ranks: Ranks, model: Path) -> tuple[dict, dict, bool]:
    """Also what the critic has, but for its head, which is not in them."""
    rows = WeightRows(ModelConfig(name=str(model)))
    learner = Learner(
        rows.skeleton(), None, learner_config(algorithm="ppo"), rollout_config(), torch.float32,
        ranks, read=rows.read, critic=rows.skeleton(),
    )  # fmt: skip
    critics = {n: p.full_tensor() for n, p in learner._critic.optimizer._parameters.items()}
    return whole_weights(learner), critics, rows._whole is None


def train_adapters(ranks: Ranks, given: list[tuple[ModelConfig, torch.dtype]]) -> list[tuple]:
    """Of each: the first version's checksum, numbers with a state here, and the last loss."""
    found = []
    for config, dtype in given:
        common = learner_config(learning_rate=0.05, beta=0.1), rollout_config(), dtype, ranks
        if ranks.count == 1:
            device = torch.device("cpu")
            model, read = load_policy(config, dtype=dtype, device=device, seed=5), None
        else:
            model, read = policy_rows(config, dtype=dtype, seed=5)
        learner = Learner(model, None, *common, read=read)
        first, base = learner.checksum(), unversioned(model)
        before = {name: ranks.local(each).clone() for name, each in base.items()}
        for step in range(3):
            loss = learner.train(made_up_batch(seed=step), step)["loss"]
        assert {each.dtype for each in before.values()} == {dtype}
        assert all(torch.equal(ranks.local(base[name]), each) for name, each in before.items())
        found.append((first, sum(each.numel() for *_, each in learner._optimizer.state()), loss))
    return found


def spoil_the_base(ranks: Ranks, model: ModelConfig) -> str:
    """Rank 1's rows of a matrix under the adapter change."""
    made, read = policy_rows(model, dtype=torch.float32, seed=5)
    learner = Learner(
        made, None, learner_config(), rollout_config(), torch.float32, ranks, read=read
    )
    if ranks.rank == 1:
        ranks.local(made.model.layers[1].mlp.down_proj.weight)[0, 0] += 1e-3
    try:
        for _ in range(PARTS):
            learner.rows()
    except ChecksumMismatch as error:
        return str(error)
    return ""


def save_where_no_room_is(ranks: Ranks, directory: Path) -> str:
    """Rank 1 cannot write its part."""
    snapshot = a_learner(ranks).snapshot()
    if ranks.rank == 1:
        FileSystemWriter.write_data = _no_room
    try:
        snapshot.write(CheckpointDir(directory))
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


def teacher(**options: Any) -> PreTrainedModel:
    """A model with more tokens than the policy has."""
    return tiny_model(seed=5, vocab_size=VOCAB + 6, **options)


def learn(ranks: Ranks, cases: list[dict], batches: list[list[Sample]]) -> list[tuple[float, dict]]:
    """Loss and weights after a step with each teacher."""
    found = []
    for distillation, batch in zip(cases, batches, strict=True):
        small = {"max_tokens_per_microbatch": 40, "logits_chunk_size": 3, "adam_epsilon": 1e-3}
        config = learner_config(distillation=distillation, gradient_checkpointing=True, **small)
        loaded = {"teacher": teacher()} if "/" in distillation["teacher"] else {}
        learner = Learner(
            tiny_model(), None, config, rollout_config(), torch.float32, ranks,
            reference=tiny_model(), **loaded,
        )  # fmt: skip
        found.append((learner.train(batch, 0)["loss"], whole_weights(learner)))
    return found
