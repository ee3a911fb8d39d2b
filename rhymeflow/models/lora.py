"""Adapters in a model: low-rank products beside its linear layers (LoRA, arXiv 2106.09685).

Engine and learner compute them alike and apart from the layer's own product. Added to the weights
they would be rounded with them: in bfloat16 that moves log-probabilities by 0.07 nats on average,
and a learning step may change nothing. Parameters of the model keep their names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rhymeflow.config import ModelConfig
from rhymeflow.errors import UserError
from rhymeflow.models.adapter_files import (
    ALL_LINEAR,
    CONFIG,
    WEIGHTS,
    Adapter,
    adapter_for,
    as_fields,
)
from rhymeflow.models.families import FAMILIES, ModelFamily
from rhymeflow.models.load import load_config, load_model, shapes_of
from rhymeflow.models.nf4 import NF4Linear, library
from rhymeflow.models.rows import WeightRows

_PREFIX = "base_model.model."
"""What peft puts before the names of a model's modules."""


class LoraLinear(nn.Linear):
    """x -> x weight^T + bias + scale (x A^T) B^T, of which A and B are trained.

    It takes the place of a linear layer and has its parameters. A new B is zero.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = base.in_features, base.out_features, scale
        self._share(base)
        self.is_at_start = False
        self.start: tuple[Tensor, Tensor] | None = None
        """A and B as training started, if they changed something."""
        device = next(chain(self.parameters(), self.buffers())).device
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, input: Tensor) -> Tensor:
        """See the class; inside `at_start` with the values of then."""
        out = self._base(input)
        values = self.start if self.is_at_start else (self.lora_A, self.lora_B)
        if values is None:
            return out
        A, B = values
        narrow = F.linear(input.to(A.dtype), A)  # a router may be in float32
        return torch.add(out, F.linear(narrow, B), alpha=self.scale)

    def _share(self, base: nn.Linear) -> None:
        self.weight, self.bias = base.weight, base.bias

    def _base(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class LoraNF4Linear(LoraLinear, NF4Linear):
    """`LoraLinear` beside weights of 4 bits."""

    def _share(self, base: nn.Linear) -> None:
        assert isinstance(base, NF4Linear)
        self.share(base)

    def _base(self, input: Tensor) -> Tensor:
        return NF4Linear.forward(self, input)


def quantize(
    model: PreTrainedModel, adapter: Adapter, read: Callable[[str, int], Tensor] | None = None
) -> None:
    """Have linear layers keep weights of 4 bits, before `attach`. `read`, given if the model has no
    values yet, returns those of a parameter: one layer at a time is whole."""
    layers = quantizable(model, adapter)
    for layer in layers.values() if read is not None else ():
        del layer.weight  # else what is freed later lies between what is kept
    for name, layer in layers.items():
        if read is not None:
            values = read(f"{name}.weight", layer.out_features)
            layer.weight = nn.Parameter(values, requires_grad=False)
            del values
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, NF4Linear(layer))
        del layer.weight


def quantizable(model: PreTrainedModel, adapter: Adapter) -> dict[str, nn.Linear]:
    """Return the layers whose weights `model.quantization` is of: but the output head, all that are
    not trained whole."""
    head = model.get_output_embeddings()
    return {name: each for name, each in _not_whole(model, adapter).items() if each is not head}


def attach(model: PreTrainedModel, adapter: Adapter, seed: int = 0) -> PreTrainedModel:
    """Put an adapter into the model, and freeze all that it does not train; return the model.

    New values are drawn from `seed` alone, in float32, as peft draws them (Kaiming's uniform).

    Raises:
        UserError: a name is that of no such layer, or the adapter's files do not fit the model.
    """
    model.requires_grad_(False)
    for name, module in _saved_modules(model, adapter):
        _check_untied(model, name, module)
        module.requires_grad_(True)
    layers = _targets(model, adapter)
    names = _names_of(model, layers)
    widest = max(min(each.in_features, each.out_features) for each in layers.values())
    if adapter.directory is None and adapter.rank > widest:
        raise UserError(
            f"model.lora.rank = {adapter.rank:,}: no layer that is adapted has a rank above "
            f"{widest:,}; give at most that"
        )
    draw = torch.Generator().manual_seed(seed)
    for name, layer in layers.items():
        make = LoraNF4Linear if isinstance(layer, NF4Linear) else LoraLinear
        adapted = make(layer, adapter.rank, adapter.scale)
        bound = 1 / math.sqrt(layer.in_features)
        if not adapted.lora_A.is_meta:
            values = torch.empty(adapted.lora_A.shape).uniform_(-bound, bound, generator=draw)
            adapted.lora_A.data.copy_(values)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, adapted)
    resolved = replace(adapter, target_modules=names)  # as other programs read it
    model._rhymeflow_adapter = resolved  # type: ignore[assignment]
    if adapter.directory is not None:
        _load(model, adapter.directory)
    return model


def adapter_in(model: nn.Module) -> Adapter | None:
    """Return the model's adapter, if it has one."""
    return getattr(model, "_rhymeflow_adapter", None)


def resolved_adapter(config: ModelConfig) -> Adapter | None:
    """Return the model's adapter, if it has one, with names that fit its layers and no others.
    Reads no weights of the model. Raises `UserError` as `attach` does, and if the weights under it
    cannot be quantized as it says."""
    if (adapter := adapter_for(config)) is None:
        return None
    shapes = shapes_of(load_config(config))
    if adapter.quantization:
        library()
        for name, each in shapes.named_parameters():
            if each.ndim > 2 and min(each.shape) > 1:
                raise UserError(
                    f"model.quantization = {adapter.quantization!r}: {name} has the shape "
                    f"{list(each.shape)}; only linear layers are quantized, no experts of a mixture"
                )
    return adapter_in(attach(shapes, adapter))


def versioned(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters that a version of the policy consists of, by name, tied ones once: all,
    or with an adapter those that belong to it."""
    parameters = dict(model.named_parameters())
    if (adapter := adapter_in(model)) is None:
        return parameters
    saved = {
        id(each) for _, module in _saved_modules(model, adapter) for each in module.parameters()
    }
    return {n: p for n, p in parameters.items() if id(p) in saved or n.endswith(NARROW)}


NARROW = (".lora_A", ".lora_B")


def unversioned(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters that no version changes; none without an adapter."""
    own = versioned(model)
    return {name: each for name, each in model.named_parameters() if name not in own}


def keeps_base(model: PreTrainedModel) -> bool:
    """Whether versions differ in the adapter's narrow matrices alone."""
    adapter = adapter_in(model)
    return adapter is not None and not adapter.modules_to_save


def keep_start(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Keep the values of the adapter, if it has any from files, for `at_start`."""
    adapter = adapter_in(model)
    for layer in _adapted(model) if adapter and adapter.directory else []:
        A, B = (each.detach().to(device, dtype, copy=True) for each in (layer.lora_A, layer.lora_B))
        layer.start = (A, B)


@contextmanager
def at_start(model: PreTrainedModel) -> Iterator[None]:
    """Have the model compute what it did when `keep_start` was called; if it kept nothing, what the
    model does without its adapter."""
    layers = _adapted(model)
    for each in layers:
        each.is_at_start = True
    try:
        yield
    finally:
        for each in layers:
            each.is_at_start = False


def call_at_start(
    model: PreTrainedModel, call: Callable[[Callable[[], Any]], Any], work: Callable[[], Any]
) -> Any:
    """Have `call` call `work`, which computes with the model, inside `at_start`."""
    with at_start(model):
        return call(work)


def _adapted(model: PreTrainedModel) -> list[LoraLinear]:
    return [each for each in model.modules() if isinstance(each, LoraLinear)]


def save_adapter(
    directory: Path, adapter: Adapter, base: str, tensors: Mapping[str, Tensor]
) -> None:
    """Write an adapter's directory for peft; `tensors` are `versioned`, `base` names the model. A
    relative path is made absolute: elsewhere it might be another model's."""
    name = str(Path(base).absolute()) if Path(base).is_dir() else base
    text = json.dumps(as_fields(adapter, name), indent=2)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")
    values = {_in_file(name): each.detach().contiguous() for name, each in tensors.items()}
    save_file(values, directory / WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def draw_adapter(model: PreTrainedModel) -> None:
    """Give the adapter some values that change what the model computes."""
    draw = torch.Generator().manual_seed(0)
    for layer in _adapted(model):
        layer.lora_B.copy_(torch.empty(layer.lora_B.shape).normal_(0.0, 0.1, generator=draw))


@torch.no_grad()
def merge(model: PreTrainedModel) -> PreTrainedModel:
    """Add the adapter to the weights, which are rounded once, and remove it; return the model."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLinear | NF4Linear):
            plain = nn.Linear(layer.in_features, layer.out_features, device="meta")
            plain.weight, plain.bias = nn.Parameter(layer.weight), layer.bias
            if isinstance(layer, LoraLinear):
                change = layer.scale * (layer.lora_B.float() @ layer.lora_A.float())
                plain.weight.copy_(plain.weight.float() + change)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, plain)
    model._rhymeflow_adapter = None  # type: ignore[assignment]
    return model


def _linear(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the layers that can be adapted, and the output head."""
    modules, kind = model.named_modules(), model.config.model_type
    kinds = (nn.Linear, NF4Linear)
    linear = {n: m for n, m in modules if isinstance(m, nn.Linear) and type(m) in kinds}
    unused = FAMILIES.get(kind, ModelFamily()).not_called
    return {n: m for n, m in linear.items() if unused is None or not _is_named(n, unused)}


def _names_of(model: PreTrainedModel, layers: Mapping[str, nn.Linear]) -> tuple[str, ...]:
    """Return the last parts of the layers' names; their whole names if others have these too."""
    ends = {name.rpartition(".")[2] for name in layers}
    others = _linear(model).keys() - layers.keys()
    is_shared = any(_is_named(name, end) for name in others for end in ends)
    return tuple(sorted(layers if is_shared else ends))


def _targets(model: PreTrainedModel, adapter: Adapter) -> dict[str, nn.Linear]:
    """Return the layers that are adapted, in the model's order; as in peft, none that is trained
    whole."""
    head, names = model.get_output_embeddings(), adapter.target_modules
    linear = _not_whole(model, adapter)
    found: dict[str, nn.Linear] = {}
    if names == (ALL_LINEAR,):
        if not (found := {name: each for name, each in linear.items() if each is not head}):
            kind = model.config.model_type
            raise UserError(f"model.lora: a model of type {kind!r} has no linear layers to adapt")
        return found
    for target in names:
        matching = {name: each for name, each in linear.items() if _is_named(name, target)}
        if not matching:
            raise UserError(
                f"model.lora.target_modules: {target!r} is the end of no linear layer's name; they "
                f"are as {next(iter(linear), None)!r}"
            )
        found |= matching
    if head in found.values():
        raise UserError("model.lora.target_modules: the output head is not adapted")
    return {name: each for name, each in linear.items() if name in found}


def _not_whole(model: PreTrainedModel, adapter: Adapter) -> dict[str, nn.Linear]:
    whole = {id(each) for _, module in _saved_modules(model, adapter) for each in module.modules()}
    return {name: each for name, each in _linear(model).items() if id(each) not in whole}


def _saved_modules(model: PreTrainedModel, adapter: Adapter) -> list[tuple[str, nn.Module]]:
    found = []
    for target in adapter.modules_to_save:
        matching = [each for each in model.named_modules() if _is_named(each[0], target)]
        if not matching:
            raise UserError(
                f"model.lora.modules_to_save: {target!r} is the end of no module's name"
            )
        found += matching
    return found


def _check_untied(model: PreTrainedModel, name: str, module: nn.Module) -> None:
    """Raise `UserError` if other modules have the same parameters, which peft would separate."""
    own = {id(each) for each in module.parameters()}
    users = model.named_parameters(remove_duplicate=False)
    for other in [each for each, p in users if id(p) in own and not each.startswith(f"{name}.")]:
        raise UserError(f"model.lora.modules_to_save: {name!r} is tied to {other!r}")


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _in_file(name: str) -> str:
    return _PREFIX + name + (".weight" if name.endswith(NARROW) else "")


@torch.no_grad()
def _load(model: PreTrainedModel, directory: Path) -> None:
    """Load an adapter's values. Raises `UserError` if they are not those of this model's."""
    where = f"adapter '{directory}': {WEIGHTS}"
    try:
        values: dict[str, Any] = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{where} cannot be read: {error}") from None
    for name, parameter in versioned(model).items():
        value = values.pop(_in_file(name), None)
        if value is None:
            raise UserError(f"{where} has no {_in_file(name)}, which this model needs")
        if value.shape != parameter.shape:
            shapes = f"{list(value.shape)}, in this model {list(parameter.shape)}"
            raise UserError(f"{where}: {_in_file(name)} is {shapes}")
        if not value.isfinite().all():
            raise UserError(f"{where}: {_in_file(name)} has numbers that are NaN or infinite")
        parameter.copy_(value)
    if values:
        raise UserError(f"{where} has {min(values)}, which this model has not")


def load_policy(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int | None = None
) -> PreTrainedModel:
    """Load a model with its adapter, if it has one. To be trained, an adapter is float32: with
    `seed`, from which a new one is drawn. Raises `UserError` as `load_model` and `attach` do."""
    adapter = resolved_adapter(config)  # refused, if it is, before the model is read
    if adapter is None:
        return load_model(config, dtype=dtype, device=device)
    if adapter.quantization:
        model = _load_quantized(config, adapter, dtype=dtype, device=device)
    else:
        model = load_model(config, dtype=dtype, device=device)
    attach(model, adapter, seed or 0)
    if seed is None:
        for each in versioned(model).values():
            each.data = each.data.to(dtype)
    return model


def policy_rows(
    config: ModelConfig, *, dtype: torch.dtype, seed: int
) -> tuple[PreTrainedModel, Callable[[str, slice], Tensor]]:
    """Create the policy with uninitialised parameters; return it and what returns rows of them. A
    new adapter is drawn from `seed`; what is under an adapter is in `dtype`, all else in float32.
    Raises `UserError` as `load_policy` does."""
    files, adapter = WeightRows(config), adapter_for(config)
    if adapter is None:
        return files.skeleton(), files.read
    if adapter.quantization:
        raise UserError(f"model.quantization = {adapter.quantization!r}: not on several ranks yet")
    model = attach(files.skeleton(dtype), adapter, seed)
    own = {
        name: each.detach()
        for name, each in versioned(model).items()
        if adapter.directory is not None or name.endswith(NARROW)  # others are in the model's files
    }
    return model, lambda name, rows: own[name][rows] if name in own else files.read(name, rows)


@torch.no_grad()
def _load_quantized(
    config: ModelConfig, adapter: Adapter, *, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Load a model, and quantize its layers as they are read."""
    files = WeightRows(config, dtype)
    model = files.skeleton(dtype)

    def read(name: str, num_rows: int) -> Tensor:
        return files.read(name, slice(0, num_rows)).to(device)

    quantize(model, adapter, read)
    for name, parameter in model.named_parameters():
        parameter.data = read(name, len(parameter))
    return model.to(device)  # type: ignore[arg-type]
