"""The proof of copies of the weights, which products read in their place (law 5).

On CPUs weights are laid out anew for the processor, and the checksum is of the weights themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rhymeflow.models.lora import keeps_base
from rhymeflow.weights.proof import ChecksumMismatch, bytes_of, digest

if TYPE_CHECKING:
    from rhymeflow.models.lm_head import LMHead

Own = tuple[nn.Module, str, Tensor]
"""A module, its parameter's name, and rows."""

WHOLE, ADAPTER, KEPT = 64, 4, 16
"""Versions after which all copies have been compared: of weights that each version changes, of an
adapter; or hashed again: of weights that none changes."""
_PIECE = 1 << 20  # bytes that are hashed together
_library = torch.ops.mkldnn


class Copy(NamedTuple):
    """What products read in the place of parameters."""

    held: Tensor  # rows of the parameters, one after another
    own: Callable[[], Iterable[Own]]
    """Returns the parameters and what rows they should have there."""

    def compared(self) -> Iterator[tuple[tuple[nn.Module, str], bool]]:
        """Yield parameters, some more than once, and whether rows are as they should be."""
        rows, start = self.held.to_dense() if self.held.is_mkldnn else self.held, 0
        for module, name, own in self.own():
            yield (module, name), _is_same(rows[start : start + len(own)], own)
            start += len(own)

    def memory(self) -> np.ndarray:
        """Return the bytes as they lie in memory, [n], for as long as `held` is not replaced."""
        if not self.held.is_mkldnn:
            return bytes_of(self.held)
        size, address = (get(self.held) for get in (_library._nbytes, _library.data_ptr))
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


class _Seal:
    """Digests of copies, by which a change in place is found until they are made anew."""

    def __init__(self, copies: Iterable[Copy]) -> None:
        self._pieces = [
            (copy, memory[start : start + _PIECE])
            for copy, memory in ((copy, copy.memory()) for copy in copies)
            for start in range(0, len(memory), _PIECE)
        ]
        self._digests = [digest(memory) for _, memory in self._pieces]

    def broken(self, part: slice) -> list[Copy]:
        """Return the copies of which a piece of this part has changed."""
        pairs = zip(self._pieces[part], self._digests[part], strict=True)
        return [copy for (copy, memory), before in pairs if digest(memory) != before]


class _Copying(Protocol):
    def copies(self) -> Iterable[Copy]:
        """Return the copies of the model's weights, which change when products are made anew."""

    def adapter_copies(self) -> Iterable[Copy]:
        """Return those of the adapter's matrices."""


class CopyProof:
    """Proves the copies of the weights that no version changes, or all without an adapter (`base`),
    and of the `adapter`. All methods raise `ChecksumMismatch`."""

    def __init__(self, model: PreTrainedModel, head: LMHead, body: _Copying) -> None:
        self._model, self._head, self._body = model, head, body
        self._keeps_base, self._num_checked = keeps_base(model), 0
        self._base_seal = _Seal(self._base() if self._keeps_base else ())
        self._adapter_seal = _Seal(self._adapter())

    def require_all(self) -> None:
        """Compare all copies with the weights."""
        self._require_same([*self._base(), *self._adapter()])

    def require_next(self) -> None:
        """After copies were made anew compare the next part of them, and hash the next part of what
        was kept."""
        adapter = self._adapter()
        base = [] if self._keeps_base else self._base()
        compared = adapter[self._next(ADAPTER)] if self._num_checked else adapter
        self._require_same([*base[self._next(WHOLE)], *compared])
        self._require_sealed(self._base_seal, self._next(KEPT))
        self._adapter_seal = _Seal(adapter)
        self._num_checked += 1

    def require_adapter(self) -> None:
        """Hash the adapter's copies again, before others are made."""
        self._require_sealed(self._adapter_seal, slice(None))

    def _base(self) -> list[Copy]:
        return [*self._head.copies(), *self._body.copies()]

    def _adapter(self) -> list[Copy]:
        return [*self._body.adapter_copies()]

    def _next(self, count: int) -> slice:
        return slice(self._num_checked % count, None, count)

    @torch.inference_mode()
    def _require_same(self, copies: Sequence[Copy]) -> None:
        found = dict[tuple[nn.Module, str], bool]()
        for copy in copies:
            for key, is_same in copy.compared():
                found[key] = is_same and found.get(key, True)
        if changed := [key for key, is_same in found.items() if not is_same]:
            raise self._mismatch(changed, len(found))

    def _require_sealed(self, seal: _Seal, part: slice) -> None:
        if broken := seal.broken(part):
            self._require_same(broken)  # which names the tensor
            raise self._mismatch([(m, n) for m, n, _ in broken[0].own()], len(broken))

    def _mismatch(self, changed: Sequence[tuple[nn.Module, str]], count: int) -> ChecksumMismatch:
        names = {module: name for name, module in self._model.named_modules()}
        module, name = changed[0]
        return ChecksumMismatch(
            f"{len(changed)} of {count} tensors have changed in place since they were proved, or "
            f"differ in the copy that products read, first {names[module]}.{name}"
        )


def _is_same(held: Tensor, own: Tensor) -> bool:
    """Return whether values are the same to the bit, but for a zero's sign, which sums lose."""
    count = 8 // held.element_size()
    if any(n % count for n in (held.shape[-1], held.storage_offset(), own.storage_offset())):
        return torch.equal(held, own)
    long = torch.int64  # takes a quarter of the time
    return torch.equal(held.view(long), own.view(long)) or torch.equal(held, own)
