"""Rows that are exported: trajectories, rows to fine-tune on, preference pairs.

    trajectories   one row a response, with all that is stored of it
    sft            {prompt, completion}, as `rhymeflow sft` and TRL read them
    preferences    {prompt, chosen, rejected}, as TRL reads them

Holds true: of `sft` and `preferences` the prompt is what the policy was given, with the system
message and the examples before it; a completion is text where the prompt is text and nothing was
answered in between, else messages; what an environment answered is never the assistant's. Rows are
made one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rhymeflow.config import Config
from rhymeflow.core.types import TrajectoryId
from rhymeflow.data.encode import messages_of
from rhymeflow.data.prompts import Message, Prompt
from rhymeflow.export.candidates import UNFINISHED, Candidate, Choice, groups
from rhymeflow.export.turns import TurnReader, turns_of
from rhymeflow.store import codec
from rhymeflow.store.reader import TrajectoryDetails, TrajectoryReader

Row = dict[str, Any]
Text = str | list[Message]

UNREADABLE = "whose answers of the environment are no messages"
UNEQUAL = "without a better or worse one in their group"


class Rows:
    """Makes rows of a run's responses.

    `turns`: of a run whose responses have turns; `None`: none of them has.
    """

    def __init__(
        self, reader: TrajectoryReader, config: Config, choice: Choice, turns: TurnReader | None
    ) -> None:
        self._reader, self._config, self._choice, self._turns = reader, config, choice, turns

    # -- trajectories -----------------------------------------------------------------------------

    def trajectories(self, *, with_tokens: bool) -> Iterator[Row]:
        """One row a response; `with_tokens`: its tokens and what goes with each, too."""
        for members in groups(self._reader):
            for each in self._choice.of_group(members):
                with self._reader.one_state():
                    details = self._reader.details(each.trajectory)
                    assert details is not None, f"{each.trajectory} was there"
                    prompt = self._prompt_tokens(each.group) if with_tokens else None
                row = _trajectory(details)
                if self._turns is not None:
                    row["turns"] = self._turns.shown(turns_of(details.segments))
                yield row | (_tokens(details, prompt) if prompt is not None else {})

    def _prompt_tokens(self, group: int) -> list[int]:
        ((blob,),) = self._reader.query(
            "SELECT prompt_tokens FROM groups WHERE group_id = ?", group
        )
        tokens: list[int] = np.frombuffer(blob, "<i4").tolist()
        return tokens

    # -- to learn from ----------------------------------------------------------------------------

    def sft(self) -> Iterator[Row]:
        """One row a complete response, whatever its reward."""
        for members in groups(self._reader):
            for each in self._choice.of_group(members):
                said = self._said(each.trajectory)
                if said is None:
                    self._choice.left_out[UNREADABLE] += 1
                else:
                    yield {"prompt": said[0], "completion": said[1]}

    def preferences(self) -> Iterator[Row]:
        """One row a group that has rewards that differ: its best complete response, its worst."""
        for members in groups(self._reader):
            taken = [
                each
                for each in self._choice.of_group(members, may_be_cut=True)
                if self._has_reward(each)
            ]
            pair = _extremes(taken)
            self._choice.left_out[UNEQUAL] += len(taken) if pair is None else 0
            if pair is None:
                continue
            chosen, rejected = (self._said(each.trajectory) for each in pair)
            if chosen is None or rejected is None:
                self._choice.left_out[UNREADABLE] += len(taken)
                continue
            yield {
                "prompt": chosen[0],
                "chosen": chosen[1],
                "rejected": rejected[1],
                "chosen_reward": pair[0].reward,
                "rejected_reward": pair[1].reward,
                "group": pair[0].group,
                "chosen_member": pair[0].member,
                "rejected_member": pair[1].member,
            }

    def _has_reward(self, each: Candidate) -> bool:
        self._choice.left_out["without reward"] += each.reward is None
        return each.reward is not None

    def _said(self, trajectory: TrajectoryId) -> tuple[Text, Text] | None:
        """What the policy was given, and what followed; `None`: it is no text."""
        with self._reader.one_state():
            details = self._reader.details(trajectory)
        assert details is not None, f"{trajectory} was there"
        begun, prompt = _begun(self._given(details), self._config.data.assistant_prefix)
        if self._turns is None:
            text = begun + (details.text or "")
            is_text = isinstance(prompt, str)
            return prompt, text if is_text else [{"role": "assistant", "content": text}]
        turns = turns_of(details.segments)
        said = self._turns.messages(turns, is_chat=not isinstance(prompt, str))
        if not said:  # no messages, or deleted since it was looked at
            return None
        said[0] = said[0] | {"content": begun + said[0]["content"]}
        return prompt, said

    def _given(self, details: TrajectoryDetails) -> Text:
        """The prompt as the chat template was given it, or as text."""
        stored = codec.prompt_of(details.prompt)
        if isinstance(stored, str) and not self._config.data.chat_template:
            return stored
        return messages_of(Prompt(details.row, stored, details.columns), self._config.data)


def _begun(prompt: Text, prefix: str | None) -> tuple[str, Text]:
    """What the response had been begun with before the policy went on, and the prompt before it."""
    begun = prefix or ""
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        return prompt[-1]["content"] + begun, prompt[:-1]
    return begun, prompt


def _extremes(members: list[Candidate]) -> tuple[Candidate, Candidate] | None:
    """The best response that is complete, and the worst; `None` if no reward is less."""
    whole = [each for each in members if not each.is_cut]
    if not whole:
        return None
    best = max(whole, key=lambda each: (each.reward, -each.member))
    worst = min(members, key=lambda each: (each.reward, each.member))
    assert best.reward is not None
    assert worst.reward is not None
    return (best, worst) if worst.reward < best.reward else None


def _trajectory(details: TrajectoryDetails) -> Row:
    versions = [segment.version for segment in details.segments]
    first, trained = min(versions, default=None), details.trained
    return {
        "group": details.trajectory.group,
        "member": details.trajectory.member,
        "row": details.row,
        "epoch": details.epoch,
        "prompt": codec.prompt_of(details.prompt),
        "response": details.text,
        "columns": details.columns,
        "reward": details.reward,
        "components": details.components,
        "ending": ending_of(details),
        "ending_reason": details.ending_reason,
        "reason": details.reason,
        "length": sum(segment.length for segment in details.segments),
        "step": None if trained is None else trained + 1,
        "first_version": first,
        "last_version": max(versions, default=None),
        "staleness": None if trained is None or first is None else trained - first,
    }


def ending_of(details: TrajectoryDetails) -> str:
    """One of `ENDINGS`."""
    if details.trained is not None:
        return "consumed"
    return "aborted" if details.ending == "consumed" else details.ending or UNFINISHED


def _tokens(details: TrajectoryDetails, prompt: list[int]) -> Row:
    """Values for each token; `None` where tokens were deleted, as log-probability of an answer."""
    names = ("tokens", "logprobs", "versions", "observed")
    if any(not segment.tokens for segment in details.segments):
        return {"prompt_tokens": prompt} | dict.fromkeys(names)
    found: Row = {"prompt_tokens": prompt, **{name: [] for name in names}}
    for segment in details.segments:
        is_observed = segment.is_observed
        found["tokens"] += segment.tokens
        found["logprobs"] += [None] * segment.length if is_observed else segment.logprobs
        found["versions"] += [segment.version] * segment.length
        found["observed"] += [is_observed] * segment.length
    return found


__all__ = ["Row", "Rows", "ending_of"]
