"""A consumed batch, split into optimizer steps and packed into each rank's micro-batches.

A group is in one optimizer step; groups keep the order of the batch. Every sample in the loss is in
one micro-batch of its step, on one rank; a sample with zero gradient is only scored. The split is a
pure function of the batch, so ranks need no communication for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rhymeflow.config import LearnerConfig, RolloutConfig
from rhymeflow.learner.algorithms.losses import TokenInputs
from rhymeflow.learner.algorithms.normalisations import scales, weights
from rhymeflow.learner.algorithms.surrogates import Responses
from rhymeflow.learner.packing import PackedRow, added_tokens, empty_row, pack
from rhymeflow.learner.ranks import ALONE, Ranks
from rhymeflow.learner.sample import Sample, by_response, owners


@dataclass
class MicroBatch:
    """One packed row and the loss inputs of its response tokens."""

    row: PackedRow
    inputs: TokenInputs
    needs_grad: bool  # false if the gradient is exactly 0 and the row is only scored
    for_teacher: PackedRow
    """The same response tokens in the same order, after the prompts that a teacher reads."""
    gradient_R: Tensor | None = None
    """The loss's gradient by the log-probabilities, if it is computed before them."""

    @property
    def is_empty(self) -> bool:
        """Whether it has no sample and only lets a rank make as many passes as the others."""
        return not self.row.members


def split(
    batch: Sequence[Sample],
    advantages: np.ndarray | list[np.ndarray],
    learner: LearnerConfig,
    rollout: RolloutConfig,
    device: torch.device,
    ranks: Ranks = ALONE,
    *,
    counts_copies: bool = False,
) -> list[list[MicroBatch]]:
    """Return this rank's micro-batches for each optimizer step of one pass over `batch`. All ranks
    have equally many; in each step those that need a gradient come first. `advantages`: of samples,
    [N], or of each one's tokens. See `packing.pack`."""
    lengths = lengths_in_loss(batch, learner)
    of_responses = response_lengths(batch, learner), rollout.max_completion_length
    weight_N = np.array(weights(learner.loss_type, *of_responses))[owners(batch)]
    steps, max_tokens = [], learner.max_tokens_per_microbatch
    place = ranks.rank, ranks.count
    for members in _by_whole_groups(batch, learner.num_minibatches):
        in_loss = [i for i in members if lengths[i]]
        # Without these terms a token's gradient is a multiple of its advantage.
        all_have = learner.kl_weight > 0.0 or learner.entropy_coef > 0.0
        all_have |= learner.distillation.is_used
        with_grad = [i for i in in_loss if np.any(advantages[i]) or all_have]
        without_grad = [i for i in in_loss if i not in set(with_grad)]
        steps.append(
            [
                MicroBatch(
                    row,
                    _inputs(batch, row, advantages, weight_N, device),
                    needs_grad,
                    _for_teacher(batch, row),
                )
                for chosen, needs_grad in ((with_grad, True), (without_grad, False))
                for row in pack_for_rank(
                    batch, chosen, max_tokens, *place, counts_copies=counts_copies
                )
            ]
        )
    return steps


def step_scales(
    batch: Sequence[Sample], learner: LearnerConfig, rollout: RolloutConfig
) -> list[float]:
    """Return the gradient's factor in each optimizer step of one pass over the whole `batch`."""
    steps = [
        response_lengths([batch[i] for i in members], learner)
        for members in _by_whole_groups(batch, learner.num_minibatches)
    ]
    return scales(learner.loss_type, steps, rollout.max_completion_length)


def lengths_in_loss(batch: Sequence[Sample], learner: LearnerConfig) -> list[int]:
    """Return how many tokens of each sample are in the loss."""
    masks = learner.mask_truncated_completions
    return [0 if masks and each.truncated else each.num_sampled for each in batch]


def response_lengths(batch: Sequence[Sample], learner: LearnerConfig) -> list[int]:
    """Return how many tokens of each response are in the loss, in all its sequences."""
    return [int(n) for n in by_response(batch, lengths_in_loss(batch, learner))]


def _by_whole_groups(batch: Sequence[Sample], num_minibatches: int) -> list[list[int]]:
    """Return the indices of each optimizer step's samples, with groups in order and whole."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(batch):
        groups.setdefault(sample.group, []).append(index)
    shares = np.array_split(np.arange(len(groups)), num_minibatches)
    members = list(groups.values())
    return [[i for g in share for i in members[g]] for share in shares]


def _inputs(
    batch: Sequence[Sample],
    row: PackedRow,
    advantages: np.ndarray | list[np.ndarray],
    weight_N: np.ndarray,
    device: torch.device,
) -> TokenInputs:
    def per_token(values: np.ndarray | list[np.ndarray]) -> Tensor:
        pairs = zip(row.members, row.lengths, strict=True)
        value_R = np.concatenate([np.broadcast_to(values[i], length) for i, length in pairs])
        return torch.from_numpy(value_R.astype(np.float32)).to(device)

    if not row.members:  # zero factors give a zero loss and gradient
        zero_R = torch.zeros(len(row.targets_R), device=device)
        return TokenInputs(zero_R, zero_R, zero_R, responses=Responses((len(zero_R),)))
    behaviour = np.concatenate([batch[i].sampled(batch[i].logprobs) for i in row.members])
    return TokenInputs(
        advantage_R=per_token(advantages),
        weight_R=per_token(weight_N),
        behaviour_R=torch.from_numpy(behaviour.astype(np.float32)).to(device),
        responses=Responses(row.lengths),
    )


def _for_teacher(batch: Sequence[Sample], row: PackedRow) -> PackedRow:
    """Return the row with the teacher's prompts, in one piece however long these are."""
    samples = [batch[i] for i in row.members]
    prompts = [each.teacher_prompt_ids or each.prompt_ids for each in samples]
    if all(s.prompt_ids is ids for s, ids in zip(samples, prompts, strict=True)):
        return row
    read = [replace(s, prompt_ids=ids) for s, ids in zip(samples, prompts, strict=True)]
    (whole,) = pack(read, range(len(read)), 1 << 62)
    return whole


def pack_for_rank(
    samples: Sequence[Sample],
    members: Sequence[int],
    max_tokens: int,
    rank: int,
    num_ranks: int,
    *,
    counts_copies: bool = False,
) -> list[PackedRow]:
    """Pack the `samples[i]` for `i` in `members` into rows of at most `max_tokens` tokens for each
    rank; return those of `rank`. All ranks get equally many rows, some of them empty, since every
    pass has collectives."""
    parts = [list(members)] if num_ranks == 1 else cut(samples, members, num_ranks)
    rows = [pack(samples, part, max_tokens, counts_copies=counts_copies) for part in parts]
    return rows[rank] + [empty_row()] * (max(map(len, rows)) - len(rows[rank]))


def cut(samples: Sequence[Sample], members: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Split members over ranks in order, so only groups at a cut are divided.

    Each rank has an equal share of the tokens, in order; a sample goes to the rank in whose share
    its middle token is. So a rank's tokens differ from the mean by at most one sample's, plus those
    shared across a cut."""
    tokens_N = np.array(added_tokens(samples, members), dtype=np.int64)
    end_N = tokens_N.cumsum()
    total = int(end_N[-1]) if len(members) else 1
    rank_N = ((end_N - tokens_N / 2) * num_ranks / max(total, 1)).astype(int)
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    for member, rank in zip(members, rank_N, strict=True):
        parts[min(int(rank), num_ranks - 1)].append(member)
    return parts
