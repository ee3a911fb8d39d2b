"""A small float32 weight laid out for the CPU's registers, and products by it.

oneDNN's products take 15 microseconds from Python before they begin. The demo's weights are 64 to
400 KB: a product of 8 rows is 2 to 11 microseconds by tiles in registers (`utils/gemm.py`), 17 to
27 by oneDNN; of 128 rows they are as fast (docs/lab-log.md).

Holds true: a row's result depends on the row alone, whatever their number. Later changes of the
weight are not seen.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from rhymeflow.utils.gemm import LANES, ROWS, tile_32

COLUMNS = 2 * LANES
"""Of one tile."""
_LARGEST = 1 << 18
"""Elements of a weight, a megabyte: it is read once for every `ROWS` rows, from the core's own
cache."""


class Tiled:
    """A linear map without bias, with its own copy of the weight, for rows by the `ROWS`."""

    def __init__(self, weight_OI: Tensor) -> None:
        columns, depth = weight_OI.shape
        self._columns, self._depth = columns, depth
        tiles = weight_OI.numpy().reshape(-1, COLUMNS, depth).transpose(0, 2, 1)
        self._tiles = np.ascontiguousarray(tiles).reshape(-1)

    @staticmethod
    def serves(weight_OI: Tensor, bias_O: Tensor | None) -> bool:
        """Whether this is the quickest for such a weight."""
        is_small = weight_OI.numel() <= _LARGEST and weight_OI.shape[0] % COLUMNS == 0
        is_float = weight_OI.dtype == torch.float32 and weight_OI.device.type == "cpu"
        return is_small and is_float and bias_O is None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight^T; `x` [R, I] with R a multiple of `ROWS`."""
        rows = x.shape[0]
        assert rows % ROWS == 0, f"{rows} rows"
        out = torch.empty(rows, self._columns)
        into = out.view(-1).numpy()
        _product(x.reshape(-1).numpy(), self._tiles, self._depth, self._columns, into)
        return out


@njit(cache=True, nogil=True)
def _product(x, tiles, depth, columns, out):
    """`out` [R * O] from `x` [R * I] and `tiles` [O / 32 * I * 32]."""
    for row in range(0, len(x) // depth, ROWS):
        for column in range(0, columns, COLUMNS):
            at = row * columns + column
            tile_32(
                out, at, columns, x, row * depth, depth, 1, tiles, column * depth, COLUMNS, depth
            )


__all__ = ["COLUMNS", "Tiled"]
