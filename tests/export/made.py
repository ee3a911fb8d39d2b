"""Made-up runs with responses of one turn and of several, text prompts and chats."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rhymeflow.config.load import build_config
from rhymeflow.core.types import TrajectoryId
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.characters import make_tokenizer, save_without_weights
from tests.store.stores import finished, group, segment

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 +=?[];<>"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>;{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def model(directory: Path, template: str | None = None) -> Path:
    """A tokenizer of characters beside a model's configuration, without weights."""
    return save_without_weights(directory, ALPHABET, 200, template)


class MadeRun:
    """Writes a run's store; responses are given by what was said."""

    def __init__(self, run_dir: Path, model_dir: Path, **fields: Any) -> None:
        run_dir.mkdir(exist_ok=True)
        self.run_dir = run_dir
        self.tokenizer = make_tokenizer(ALPHABET, 200)
        self.config = build_config({"model.name": str(model_dir), **fields}, where="test")
        self.store = SqliteTrajectoryStore(run_dir / "events.db")
        self.store.begin_attempt(
            self.config.model_dump_json(), now=0.0, started="2026-01-02T03:04:05Z"
        )

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def group(self, number: int, prompt: Any = "q?", *, row: int | None = None) -> None:
        columns = {"answer": "c", "level": 2}
        row = number if row is None else row
        group(self.store, number, row=row, prompt=prompt, prompt_tokens=[1, 2, 3], columns=columns)

    def response(
        self,
        group: int,
        member: int,
        parts: str | Sequence[str | list[int]],
        reward: float | None = 1.0,
        *,
        reason: str | None = "stop",
        version: int = 0,
    ) -> list[int]:
        """The policy's turns at even places, an environment's answers, as text or tokens, at odd
        ones; return the tokens."""
        which = TrajectoryId(group, member)
        tokens: list[int] = []
        for place, part in enumerate([parts] if isinstance(parts, str) else parts):
            ids = self.ids(part) if isinstance(part, str) else part
            made = {"start": len(tokens), "version": version}
            if place % 2:
                self.store.put_observed(which, tokens=ids, **made)
            else:
                segment(self.store, which, ids, steps=len(ids), **made)
            tokens += ids
        if reason is not None:
            components = {} if reward is None else {"right": reward}
            skips = self.config.rollout.skip_special_tokens
            text = self.tokenizer.decode(tokens, skip_special_tokens=skips)
            finished(self.store, which, len(tokens), reward, reason, text, **components)
        return tokens

    def calls(self, group: int, member: int, made: Sequence[tuple[str, int, str]]) -> None:
        """A response of an agent: what each call asks, where the turn that it follows ends, and
        the turn that answers it."""
        which, start = TrajectoryId(group, member), 0
        for asks, follows, said in made:
            asked, turn = self.ids(asks), self.ids(said)
            self.store.put_observed(which, start=start, version=0, tokens=asked, follows=follows)
            start += len(asked)
            segment(self.store, which, turn, start=start, steps=len(turn), version=0)
            start += len(turn)
        text = "".join(asks + said for asks, _, said in made)
        finished(self.store, which, start, 1.0, "stop", text, agent=1.0)

    def close(self) -> Path:
        self.store.commit()
        self.store.close()
        return self.run_dir
