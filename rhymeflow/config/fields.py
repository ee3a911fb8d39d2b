"""Validates configurations as nested values, and finds fields by name.

A mistake is reported in one line: its place, the field's path, the value, and what is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from rhymeflow.config import Config, Section
from rhymeflow.config.yaml import DEEPEST
from rhymeflow.errors import UserError, closest, suggestion


@dataclass(frozen=True)
class Origin:
    """Where values come from: a YAML text with this name, and fields from the command line."""

    name: str
    node: Node | None = None
    overridden: frozenset[str] = frozenset()

    def place(self, path: str) -> str:
        """Return where the field `path` was given, for messages: `--path` or `file:line: path`."""
        if any(path == name or path.startswith(f"{name}.") for name in self.overridden):
            return f"--{path}"
        if not path:
            return self.name
        line = self._line(path)
        below = min((name for name in self.overridden if name.startswith(f"{path}.")), default=None)
        if line is None:
            return f"--{below}: {path}" if below else f"{self.name}: {path}"
        return f"{self.name}:{line}{f' and --{below}' if below else ''}: {path}"

    def _line(self, path: str) -> int | None:
        """Return the line of the field, or of the innermost of its parents that the text has."""
        node, line = self.node, None
        for part in path.split("."):
            if isinstance(node, MappingNode):
                entry = next(((k, v) for k, v in node.value if k.value == part), None)
                if entry is None:
                    return line
                line, node = entry[0].start_mark.line + 1, entry[1]
            elif isinstance(node, SequenceNode) and part.isdigit():
                node = node.value[int(part)]
                line = node.start_mark.line + 1
            else:
                return line
        return line


def validate(values: dict[str, Any], origin: Origin) -> Config:
    """Return nested values as a `Config`. Raises a `UserError` that lists every mistake."""
    text = json.dumps(written_out(plain(values, origin), Config))
    try:
        # JSON rules let lists stand for tuples and still refuse `true` for a number.
        config = Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        messages = [message(dict(details), origin) for details in error.errors()]
        raise UserError("; ".join(messages)) from None
    config.sft.model_fields_set.clear()  # a file may have what only `rhymeflow sft` reads
    return config


def plain(value: Any, origin: Origin, path: str = "", depth: int = 0) -> Any:
    """Return a value, which may have been made in Python, as a file would give it: with lists for
    tuples. Raises `UserError` for what no file can have, such as a set or a key that is no text."""
    if depth > DEEPEST:
        raise UserError(f"{origin.place(path)[:200]}: nested more than {DEEPEST} levels deep")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"{origin.place(path)}: the key {key!r} is not text")
        at = f"{path}." if path else ""
        return {k: plain(v, origin, f"{at}{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, origin, f"{path}.{n}", depth + 1) for n, v in enumerate(value)]
    if not isinstance(value, str | int | float | None):
        what = f"given {value!r:.60}, a {type(value).__name__}"
        raise UserError(
            f"{origin.place(path)}: {what}, should be text, a number, a list or a mapping"
        )
    return value


def check_effect(config: Config, origin: Origin) -> None:
    """Raise `UserError` if a field has no effect, as nothing turns on what it belongs to."""
    for path, needs in config.effectless:
        raise UserError(f"{origin.place(path)}: has no effect without {needs}")


def check_unread(config: Config, where: str) -> None:
    """Raise `UserError` if a field of `rhymeflow sft` was set by name, or in Python."""
    given = config.sft.model_dump(exclude_unset=True, exclude_defaults=True)
    for name in given:
        raise UserError(f"{where}: sft.{name}: has no effect in a run; `rhymeflow sft` reads it")


def as_written(config: Config, where: str) -> Config:
    """Return a configuration, which may have been made in Python, as a run's `config.yaml` gives
    it: lists in `options` for tuples. Raises `UserError` if that would be refused there."""
    config = validate(config.model_dump(), Origin(where))
    check_effect(config, Origin(where))
    return config


def written_out(value: Any, kind: Any) -> Any:
    """Expand abbreviations in a value of the type `kind`.

    A single value in place of a list becomes a list of one. Text in place of a section becomes a
    mapping with the section's `by_name` field."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not type(None)]
        return value if value is None or len(kinds) > 1 else written_out(value, kinds[0])
    if get_origin(kind) is Annotated:
        return written_out(value, get_args(kind)[0])
    if get_origin(kind) is tuple and value is not None:
        values = value if isinstance(value, list | tuple) else [value]
        return [written_out(each, get_args(kind)[0]) for each in values]
    if (section := section_of(kind)) is None:
        return value
    if isinstance(value, str) and section.by_name is not None:
        value = {section.by_name: value}
    if not isinstance(value, dict):
        return value
    known = section.model_fields
    return {k: written_out(v, known[k].annotation) if k in known else v for k, v in value.items()}


def every_field(
    section: type[Section] = Config, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield dotted path and definition of each field; a section comes before its fields."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        inner = section_of(field.annotation)
        if inner is not None:
            yield from every_field(inner, f"{prefix}{name}.")


def field_paths() -> list[str]:
    """Return the dotted path of every field of `Config`."""
    return [path for path, _ in every_field()]


def is_field_like(name: str) -> bool:
    """Whether an option looks like a field: it has a dot, or is a field outside of sections."""
    top = Config.model_fields
    is_outside = name in top and section_of(top[name].annotation) is None
    return is_outside or re.fullmatch(r"\w[\w-]*(\.[\w-]+)+", name) is not None


def takes_as_typed(name: str, text: str) -> bool:
    """Whether text on the command line is the field's value as it is, and not parsed as YAML: the
    field can be text, and this is none of the words for its other values."""
    field = dict(every_field()).get(name)
    kind = None if field is None else field.annotation
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = {"null", *(("true", "false") if bool in kinds else ())}
    return str in kinds and text not in words


def only_path(name: str, where: str) -> str:
    """Return the path of the only field with this name outside section `sft`. Raises `UserError` if
    no field has this name, or several do; the message begins with `where`."""
    paths = [path for path in field_paths() if not path.startswith("sft.")]
    matches = [path for path in paths if path.rpartition(".")[2] == name]
    if name in matches:  # a field outside of sections
        return name
    if not matches:
        raise UserError(f"{where}: there is no field {name!r}{nearest_field(name)}")
    if len(matches) > 1:
        raise UserError(f"{where}: {name!r} could be {' or '.join(matches)}; give the whole name")
    return matches[0]


_OTHER_NAMES = {
    "learning_rate": "lr", "lr_scheduler_type": "lr_scheduler warmup_style lr_decay_style",
    "warmup_steps": "warmup lr_warmup_steps lr_warmup_iters",
    "min_lr_rate": "min_lr min_lr_ratio lr_scheduler_kwargs",
    "groups_per_batch": "bs batch_size train_batch_size per_device_train_batch_size "
    "rollout_batch_size num_prompts_per_step",
    "max_steps": "epochs num_epochs num_train_epochs steps num_steps total_steps max_num_steps "
    "total_training_steps total_train_steps total_epochs total_train_epochs max_epochs num_rollout",
    "max_completion_length": "max_tokens max_new_tokens max_length max_response_length "
    "max_completion_tokens max_generate_length rollout_max_response_len",
    "num_generations": "group_size num_samples n n_samples n_samples_per_prompt "
    "num_generations_per_prompt",
    "temperature": "temp rollout_temperature", "weight_decay": "wd",
    "algorithm": "adv_estimator advantage_estimator", "loss_type": "loss_agg_mode loss_reduction",
    "beta": "kl kl_coef kl_loss_coef kl_ctl reference_policy_kl_penalty",
    "epsilon": "clip_range clip_ratio clip_ratio_low eps_clip eps_clip_low ratio_clip_min",
    "epsilon_high": "clip_ratio_high eps_clip_high eps_clip_higher ratio_clip_max",
    "dual_clip": "clip_ratio_c eps_clip_c c_clip ratio_clip_c", "entropy_coef": "entropy_coeff",
    "num_iterations": "ppo_epochs update_epochs_per_batch", "num_minibatches": "ppo_n_minibatches "
    "ppo_mini_batch_size policy_mini_batch_size global_batch_size train_global_batch_size",
    "max_grad_norm": "grad_clip gradient_clipping clip_grad", "num_ranks": "num_gpus gpus",
    "max_staleness": "async_level max_head_offpolicyness max_off_policy_steps "
    "max_trajectory_age_steps",
    "data.source": "dataset dataset_name train_file train_files train_data prompt_data",
    "data.eval_source": "val_files val_data eval_dataset eval_prompt_data",
    "prompt_column": "prompt_key input_key", "model.name": "model_path model_name_or_path "
    "hf_checkpoint", "reward.functions": "reward_funcs reward_fn rm_type custom_rm_path remote_url "
    "custom_reward_function",
    "output_dir": "output out save_dir", "report_to": "logger wandb",
    "project": "project_name wandb_project", "tags": "wandb_tags",
    "entity": "wandb_entity wandb_org", "run_group": "wandb_group wandb_run_group",
    "save_steps": "save_freq save_interval ckpt_interval save_period",
    "eval_steps": "eval_freq test_freq eval_interval val_period",
}  # fmt: skip
USUAL = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}
"""Other trainers' names for fields; suggested in messages, never accepted."""

SECTIONS_OF_OTHERS = {
    "actor_rollout_ref": "verl", "gconfig": "AReaL", "orchestrator": "prime-rl", "grpo": "NeMo-RL",
    "generator": "SkyRL",
}  # fmt: skip
"""Sections by which other trainers' configurations are known."""


def path_named(name: str, section: str = "") -> str | None:
    """Return the path of the field with this name, here or in other trainers, or None.

    If there are several, one in `section` is preferred, then the first."""
    name = name.replace("-", "_")
    name = USUAL.get(name, name)
    paths = field_paths()
    matches = [path for path in paths if f".{path}".endswith(f".{name}")]
    matches = matches or [path for path in paths if path.replace(".", "_") == name]
    return min(matches, key=lambda path: not path.startswith(f"{section}."), default=None)


def nearest_field(path: str, preferred: str = "") -> str:
    """Return `; did you mean X?`, or "" if no field is similar.

    X has the same name in another section, in `preferred` if that has it, or a similar name."""
    paths = field_paths()
    section, _, name = path.rpartition(".")
    if (elsewhere := path_named(name, preferred or section)) is not None:
        return f"; did you mean {elsewhere}?"
    if section:
        siblings = [known for known in paths if known.rpartition(".")[0] == section]
        if hint := suggestion(path, siblings) or suggestion(path, paths):
            return hint
    # Reversed, so that the first of several fields with one last name stays: a run's own.
    last_names = {path.rpartition(".")[2]: path for path in reversed(paths)}
    similar = closest(name, last_names)
    return f"; did you mean {last_names[similar]}?" if similar else ""


def brief(value: Any) -> str:
    """Return the value as JSON, shortened to 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def message(details: dict[str, Any], origin: Origin) -> str:
    """Return one of pydantic's errors as a line for the user."""
    path = ".".join(str(part) for part in details["loc"])
    place = origin.place(path)
    mistake, given = details["type"], brief(details["input"])
    if mistake == "extra_forbidden":
        if below := sorted(name for name in origin.overridden if name.startswith(f"{path}.")):
            return "; ".join(
                f"--{each}: there is no such field{nearest_field(each)}" for each in below
            )
        return f"{place}: there is no such field (given {given}){nearest_field(path)}"
    if mistake == "missing":
        return f"{place}: is missing"
    if mistake == "value_error":
        return f"{place}: {details['ctx']['error']}"
    if mistake == "model_type":
        return f"{place}: given {given}, should be a section: a mapping of fields"
    if mistake == "literal_error":
        names = re.findall(r"'([^']*)'", details["ctx"]["expected"])
        hint = suggestion(str(details["input"]), names)
        return f"{place}: given {given}, allowed: {', '.join(names)}{hint}"
    return f"{place}: given {given}, {_allowed(details['msg'])}"


def _allowed(message: str) -> str:
    """Return pydantic's sentence in YAML's terms."""
    for jargon, plain in (
        ("Input ", ""),
        ("String ", ""),
        ("a valid integer", "an integer"),
        ("a valid array", "a list"),
        ("an object", "a mapping"),
        ("a valid ", "a "),
    ):
        message = message.replace(jargon, plain)
    return message


def section_of(annotation: Any) -> type[Section] | None:
    """Return the annotation if it is a section, else None."""
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation if is_section else None
