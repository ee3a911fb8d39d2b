"""Objects that a `Trainer` is given, written to `RUN_DIR/inputs` so that other processes can load
them and the run can be repeated.

    model/            a model and its tokenizer
    tokenizer/        a tokenizer that was given with a model's name
    teacher/          a teacher and its tokenizer
    reward_model/     a reward model and its tokenizer, numbered where there are several
    train.jsonl       rows
    objects.pickle    functions and classes that cannot be imported by name
    objects.json      their digests

Until `write`, objects are only collected.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rhymeflow.config import Config, RewardFunction
from rhymeflow.data.prompts import plain
from rhymeflow.environments.judged import judged_by, wants_environments
from rhymeflow.errors import UserError
from rhymeflow.utils import child, user_modules
from rhymeflow.utils.code_digest import DIGESTS, digest_of_object

Environments = str | Callable[..., Any] | Mapping[str, Callable[..., Any]]
Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any]]

OBJECTS = "objects.pickle"


class Inputs:
    """The inputs of one run directory. Methods collect an object and return its future path."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "inputs"
        self.by_value: dict[str, Any] = {}
        """Functions and classes that cannot be imported by name, by their key in the pickle."""
        self.tokenizer_of_model: Any = None
        """Set if the model is given as an object."""
        self._models: list[tuple[str, Any]] = []
        self._files: dict[str, bytes] = {}

    def model(self, model: Any, processing_class: Any) -> str:
        """Return a model's name, or the future path of an object, saved with its tokenizer."""
        if isinstance(model, str | os.PathLike):
            return os.fspath(model)
        if not hasattr(model, "save_pretrained"):
            raise UserError(f"Trainer: model is a {type(model).__name__}, not a name or a model")
        if hasattr(model, "peft_config"):
            raise UserError(
                "Trainer: model has LoRA adapters: merge_and_unload() it, or give the model "
                "without them, and a peft_config (rhymeflow.trl)"
            )
        self.tokenizer_of_model = processing_class or _tokenizer_of(model, "model")
        return self.saved("model", model, self.tokenizer_of_model)

    def teacher(self, model: Any, processing_class: Any) -> str:
        """Return a teacher's name, or collect an object as `reward_model` does."""
        if isinstance(model, str | os.PathLike):
            return os.fspath(model)
        return self.saved("teacher", model, processing_class or _tokenizer_of(model, "the teacher"))

    def reward_model(self, model: Any, processing_class: Any) -> str:
        """Collect a reward model object, with the tokenizer given or the one it was loaded with."""
        name = _free_name("reward_model", [folder for folder, _ in self._models])
        tokenizer = processing_class or _tokenizer_of(model, "the reward model")
        return self.saved(name, model, tokenizer)

    def saved(self, folder: str, *parts: Any) -> str:
        """Collect models and tokenizers that are saved in one folder."""
        self._models += ((folder, part) for part in parts)
        return str(self.folder / folder)

    def rows(self, dataset: Any, name: str, most: int | None = None) -> tuple[str, int | None]:
        """Collect the first `most` rows of a dataset, or all; return the path of its file and the
        number of rows (None for a dataset given by name, which is not read).

        Raises:
            UserError: there are no rows, or a value cannot be written as JSON.
        """
        what = f"{name}_dataset"
        if isinstance(dataset, str | os.PathLike):
            given = os.fspath(dataset)
            is_file = Path(given).exists() or ":" in given or Path(given).suffix
            if is_file or given.count("/") != 1:
                return given, None
            dataset = from_hub(given, what)  # OWNER/NAME
        lines = [_line(row, f"{what}, row {i}") for i, row in enumerate(islice(dataset, most))]
        if not lines:
            raise UserError(f"Trainer: {what} is empty")
        file = f"{quote(name, safe=' ()')}.jsonl"  # a name may have slashes
        self._files[file] = "".join(f"{line}\n" for line in lines).encode()
        return str(self.folder / file), len(lines)

    def name(self, given: Any, what: str) -> str:
        """Return the name by which to import a function or class, or its future pickle and key."""
        if isinstance(given, str):
            return given
        if not callable(given):
            raise UserError(f"Trainer: {what} is a {type(given).__name__}, not a function")
        name = name_of(given)
        if name is not None:
            return name
        key = _free_name(title_of(given), self.by_value)
        self.by_value[key] = given
        self._files[OBJECTS] = user_modules.dumped(self.by_value)
        digests = {each: digest_of_object(x) for each, x in self.by_value.items()}
        self._files[DIGESTS] = json.dumps(digests).encode()
        return f"{self.folder / OBJECTS}:{key}"

    def write(self, folder: Path | None = None, *, begun: bool = False) -> None:
        """Write everything, by default to the paths that were returned. `begun`: the run is resumed
        and has it already.

        Raises:
            UserError: the resumed run began with other rows, another teacher or reward model.
        """
        folder = folder or self.folder
        for name, data in self._files.items():
            path, is_rows = folder / name, name not in (OBJECTS, DIGESTS)
            if is_rows and begun and path.exists() and path.read_bytes() != data:
                raise UserError(
                    f"Trainer: {path} has other rows than the dataset that is given; a run resumes "
                    "with the dataset that it began with"
                )
        for name, part in self._models if begun else ():
            if name != "model" and hasattr(part, "state_dict") and _is_other(part, folder / name):
                raise UserError(
                    f"Trainer: {folder / name} has other weights than the {name} that is given; a "
                    "run resumes with the one that it began with"
                )
        if self._models or self._files:
            folder.mkdir(parents=True, exist_ok=True)
        if not begun:
            for name, part in self._models:
                part.save_pretrained(folder / name)
        for name, data in self._files.items():
            (folder / name).write_bytes(data)


def _is_other(model: Any, directory: Path) -> bool:
    """Whether a saved model has other weights."""
    import torch
    from safetensors import safe_open

    own = model.state_dict()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in own.keys() & {*file.keys()}:
                if not torch.equal(file.get_tensor(name).to(own[name]), own[name]):
                    return True
    return False


def _free_name(title: str, taken: Collection[str]) -> str:
    """Return the first of `title`, `title_2`, `title_3`, ... that is not in `taken`."""
    names = (title if number == 1 else f"{title}_{number}" for number in count(1))
    return next(each for each in names if each not in taken)


def frozen_in(model: Any) -> list[str]:
    """Return the names of a model object's frozen parameters (`requires_grad` is false)."""
    if isinstance(model, str | os.PathLike):
        return []
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def _tokenizer_of(model: Any, what: str) -> Any:
    """Load the tokenizer from where a model object was loaded."""
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


def from_hub(name: str, what: str) -> Any:
    """Load the split `train` of a dataset of the Hugging Face hub."""
    import datasets  # slow

    try:
        return datasets.load_dataset(name, split="train")
    except (OSError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"Trainer: {what} = {name!r}: is no file, and the hub: {text}") from None


def _line(row: Any, where: str) -> str:
    if not isinstance(row, Mapping):
        raise UserError(f"Trainer: {where}: is a {type(row).__name__}, should be a mapping")
    where = f"Trainer: {where}"
    plain(dict.fromkeys(row), where)  # names of columns are text
    values = {name: plain(each, f"{where}: column {name!r}") for name, each in row.items()}
    return json.dumps(values, ensure_ascii=False)


def name_of(given: Callable[..., Any]) -> str | None:
    """Return `module.name` or `path/to/file.py:name` of a function or a class; None if it must be
    pickled by value: a lambda, a closure, a method, an object, or one typed at a Python prompt."""
    name = getattr(given, "__qualname__", "")
    is_named = inspect.isroutine(given) or inspect.isclass(given)
    if not is_named or not name.isidentifier():
        return None
    module = sys.modules.get(getattr(given, "__module__", None) or "")
    if module is None or getattr(module, name, None) is not given:
        return None
    if module.__name__ == "__main__":
        file = child.guarded_file(name)
        return None if file is None else f"{file}:{name}"
    path = getattr(module, "__file__", None)
    in_package = "." in module.__name__ or (path is not None and Path(path).stem == "__init__")
    if in_package or path is None or Path(path).suffix != ".py":  # it may import its neighbours
        return f"{module.__name__}.{name}"
    return f"{Path(path).resolve()}:{name}"


def title_of(given: Any) -> str:
    """Return the name of a function, class or object for metrics: its own, or that of its class."""
    while hasattr(given, "func") and not hasattr(given, "__name__"):  # of a functools.partial
        given = given.func
    name = getattr(given, "__name__", type(given).__name__)
    return str(name).strip("<>").replace(".", "_").replace(":", "_")


# -- fields of the configuration -------------------------------------------------------------------


def reward_fields(
    inputs: Inputs,
    reward_funcs: Any,
    weights: Sequence[float] | None,
    tokenizers: Any,
    environments: Environments | None,
) -> dict[str, Any]:
    """Return the fields of sections `reward` and `environment` for these functions and classes."""
    rewards = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    rewards = [reward for reward in rewards if reward is not None]
    all_weights: Sequence[float | None] = [None] * len(rewards) if weights is None else weights
    tokenizers = tokenizers if isinstance(tokenizers, list) else [tokenizers] * len(rewards)
    per_function = {"reward_weights": all_weights, "reward_processing_classes": tokenizers}
    for name, values in per_function.items():
        if len(values) != len(rewards):
            raise UserError(
                f"Trainer: {len(values)} {name} are given for {len(rewards)} reward_funcs"
            )
    judged_inside: list[tuple[Any, float]] = []
    functions = []
    for reward, weight, tokenizer in zip(rewards, all_weights, tokenizers, strict=True):
        if environments is not None and wants_environments(reward):
            judged_inside.append((reward, 1.0 if weight is None else weight))
        else:
            functions.append(reward_function(reward, inputs, weight, tokenizer))
    fields: dict[str, Any] = {}
    if rewards:
        fields["reward.functions"] = [f.model_dump() for f in functions]
    if environments is not None:
        fields["environment.classes"] = _environments(inputs, environments, judged_inside)
    return fields


def _environments(
    inputs: Inputs, given: Environments, judged_inside: list[tuple[Any, float]]
) -> list[dict[str, Any]]:
    entries = []
    for name, factory in given.items() if isinstance(given, Mapping) else [(None, given)]:
        if judged_inside:
            if isinstance(factory, str):
                raise UserError(
                    f"Trainer: environment_factory {factory!r} is a name; give the class itself "
                    "where a reward function takes `environments`"
                )
            factory = judged_by(factory, judged_inside)
            if len(judged_inside) == 1 and name is None:
                name = title_of(judged_inside[0][0])
        spec = inputs.name(factory, "environment_factory")
        entries.append({"environment": spec} | ({} if name is None else {"name": name}))
    return entries


def reward_function(
    given: Any, inputs: Inputs, weight: float | None = None, tokenizer: Any = None
) -> RewardFunction:
    """Return the entry of `reward.functions` for a reward function or model, or the name of one.
    Keywords of a `functools.partial` become `options`."""
    if isinstance(given, RewardFunction):
        named = given
        if named.function == "reward_model" and tokenizer is not None:
            raise UserError(
                f"Trainer: the reward model {named.options.get('model')!r} has a tokenizer of its "
                "own in reward_processing_classes; load the model, and give both as objects"
            )
    elif isinstance(given, str):
        named = RewardFunction(function=given)
    elif hasattr(given, "save_pretrained"):
        model = inputs.reward_model(given, tokenizer)
        named = RewardFunction(function="reward_model", options={"model": model})
    elif isinstance(given, partial) and not given.args and _is_json(given.keywords):
        inner = reward_function(given.func, inputs)
        named = inner.model_copy(update={"options": inner.options | given.keywords})
    else:
        named = RewardFunction(function=inputs.name(given, "the reward function"))
    return named if weight is None else named.model_copy(update={"weight": float(weight)})


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except TypeError:
        return False


def train_fields(inputs: Inputs, dataset: Rows, config: Config) -> dict[str, Any]:
    """Return fields of section `data` for a training set; of a streaming one, only needed rows."""
    datasets = sys.modules.get("datasets")
    streams = datasets is not None and isinstance(dataset, datasets.IterableDataset)
    needed = config.learner.max_steps * config.learner.groups_per_batch
    source, _ = inputs.rows(dataset, "train", needed if streams else None)
    return {"data.source": source, "data.options": {}, "data.eval_size": 0}


def eval_fields(
    inputs: Inputs, dataset: Rows | Mapping[str, Rows], config: Config
) -> dict[str, Any]:
    """Return the fields for a held-out dataset, or for several by name: each becomes a suite."""
    if not isinstance(dataset, Mapping):
        path, num_rows = inputs.rows(dataset, "eval")
        return {"data.eval_source": path, "data.eval_size": num_rows or config.data.eval_size}
    suites = []
    for name, each in dataset.items():
        path, _ = inputs.rows(each, f"eval-{name}")
        steps = config.run.eval_steps or config.learner.max_steps  # as for held-out prompts
        suites.append({"name": str(name), "source": path, "steps": steps})
    return {"data.eval_size": 0, "eval.suites": suites}
