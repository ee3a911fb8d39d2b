"""What is handed in as objects, written down in `RUN_DIR/inputs` so that other processes can load
it, and the run can be repeated.

    model/            a model and its tokenizer
    tokenizer/        a tokenizer for a model that is named
    reward_model/     a reward model and its tokenizer, numbered where there are several
    train.jsonl       rows
    objects.pickle    functions and classes that no module has

Holds true: nothing is written before `write`, which is for a run directory that belongs to this
run. What a run that is gone on with was begun with stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from copy import copy
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rhymeflow.errors import UserError
from rhymeflow.trainer import rows
from rhymeflow.trainer.importable import name_of, title_of
from rhymeflow.utils import pickled


class Inputs:
    """The inputs of one run directory. The methods that take an object say where it will be."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "inputs"
        self._models: list[tuple[str, Any]] = []
        """Models and tokenizers, by the folder that each is saved to."""
        self._texts: dict[str, str] = {}
        """Rows, by the file."""
        self._objects: dict[str, Any] = {}
        self._pickled = b""
        self.tokenizer_of_model: Any = None
        """Of a model that is an object."""
        self._num_reward_models = 0

    def model(self, model: Any, processing_class: Any) -> str:
        """Of a model's name or object; its directory has the tokenizer too."""
        if isinstance(model, str | os.PathLike):
            return os.fspath(model)
        if not hasattr(model, "save_pretrained"):
            raise UserError(f"Trainer: model is a {type(model).__name__}, not a name or a model")
        if hasattr(model, "peft_config"):
            raise UserError("Trainer: model has adapters: LoRA is not there; merge_and_unload() it")
        self.tokenizer_of_model = processing_class or _tokenizer_of(model, "model")
        return self._saved("model", model, self.tokenizer_of_model)

    def tokenizer(self, processing_class: Any) -> str:
        """Of a tokenizer that goes with a model that is named."""
        return self._saved("tokenizer", processing_class)

    def reward_model(self, model: Any, processing_class: Any) -> str:
        """Of a reward model's name or object, perhaps with a tokenizer of its own."""
        if isinstance(model, str):
            if processing_class is None:
                return model
            raise UserError(
                f"Trainer: the reward model {model!r} has a tokenizer of its own in "
                "reward_processing_classes; load the model, and give both as objects"
            )
        self._num_reward_models += 1
        number = self._num_reward_models
        name = f"reward_model_{number}" if number > 1 else "reward_model"
        tokenizer = processing_class or _tokenizer_of(model, "the reward model")
        return self._saved(name, model, tokenizer)

    def rows(self, dataset: Any, name: str, most: int | None = None) -> tuple[str, int | None]:
        """Of a dataset: the file, and how many rows there are, if they were counted.

        Raises:
            UserError: it is empty, or a row holds what cannot be written.
        """
        if isinstance(dataset, str | os.PathLike):
            given = os.fspath(dataset)
            is_file = Path(given).exists() or ":" in given or Path(given).suffix
            if is_file or given.count("/") != 1:
                return given, None
            dataset = rows.from_hub(given, f"{name}_dataset")
        lines = rows.lines_of(dataset, f"{name}_dataset", most)
        file = f"{quote(name, safe=' ()')}.jsonl"  # a name may have slashes
        self._texts[file] = "".join(f"{line}\n" for line in lines)
        return str(self.folder / file), len(lines)

    def name(self, given: Any, what: str) -> str:
        """Of a function or a class: its name, or where it will be by value.

        Raises:
            UserError: it holds something that is of this process only.
        """
        if isinstance(given, str):
            return given
        if not callable(given):
            raise UserError(f"Trainer: {what} is a {type(given).__name__}, not a function")
        found = name_of(given)
        if found is not None:
            return found
        title = key = title_of(given)
        number = 1
        while key in self._objects:
            number += 1
            key = f"{title}_{number}"
        self._objects[key] = given
        self._pickled = pickled.dumped(self._objects)
        return f"{self.folder / 'objects.pickle'}:{key}"

    @property
    def by_value(self) -> list[str]:
        """What is written by value."""
        return list(self._objects)

    def write(self, *, begun: bool = False) -> None:
        """Write all of it, if there is anything; `begun`: the run goes on, and has it already."""
        if begun:
            for name, text in self._texts.items():
                _check_same(self.folder / name, text)
        if self._models or self._texts or self._objects:
            self.folder.mkdir(parents=True, exist_ok=True)
        for name, part in () if begun else self._models:
            part.save_pretrained(self.folder / name)
        for name, text in self._texts.items():
            (self.folder / name).write_text(text, encoding="utf-8")
        if self._objects:
            (self.folder / "objects.pickle").write_bytes(self._pickled)

    def at(self, folder: Path) -> Inputs:
        """The same, to be written elsewhere."""
        other = copy(self)
        other.folder = folder
        return other

    def _saved(self, name: str, *parts: Any) -> str:
        self._models += ((name, part) for part in parts)
        return str(self.folder / name)


def frozen_in(model: Any) -> list[str]:
    """Names of the parameters of a model object that are not to be trained."""
    if isinstance(model, str | os.PathLike):
        return []
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def _tokenizer_of(model: Any, what: str) -> Any:
    """The tokenizer of where a model was loaded from."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not name:
        raise UserError(f"Trainer: {what} is an object that was not loaded by name; give its "
                        "tokenizer as processing_class")  # fmt: skip
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"Trainer: {what} needs its tokenizer as processing_class; {name} has none: {text}"
        ) from None


def _check_same(path: Path, text: str) -> None:
    """Rows that a run began with are the same, or nothing goes on with that run."""
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UserError(
            f"Trainer: {path} has other rows than the dataset that is given; a run goes on with "
            "the dataset that it began with"
        )


Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
"""What a dataset may be."""
