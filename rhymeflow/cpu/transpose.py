"""Rows of a matrix as columns, transposed in registers, on a CPU.

`transpose(out, o, out_row, held, a, held_row)` sets, for i < 16 and the elements k of 16 bytes,

    out[o + k * out_row + i] = held[a + i * held_row + k]

over one-dimensional arrays; `out` is float32, `held` float32 or the bits of bfloat16 as uint16.
Four by four elements are transposed in a quarter of a vector, four times at once (for bfloat16
four by four pairs), which takes two shuffles for each vector of the result. It is LLVM's own vector
arithmetic, as in `tiles.py`; a loop over array elements would read or write them one at a time.
Holds true: numbers arrive unchanged. No index is checked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rhymeflow.cpu.tiles import LANES

BYTES = 16
"""Of each row."""
_WORDS = 4
"""Of 32 bits in as many bytes."""
_WORD = ir.IntType(32)
_QUARTER = ir.VectorType(_WORD, _WORDS)
_INT = ir.IntType(64)


@intrinsic
def transpose(typing, out, o, out_row, held, a, held_row):
    """See the module."""
    of_index = [types.intp] * 2
    signature = types.void(out, *of_index, held, *of_index)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, held = (
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 3)
        )
        _, o, out_row, _, a, held_row = args
        columns = _columns(
            builder, [_sixteen(builder, held, a, held_row, r) for r in range(_WORDS)]
        )
        if not isinstance(signature.args[3].dtype, types.Float):
            columns = [half for pair in columns for half in _two(builder, pair)]
        for k, column in enumerate(columns):
            target = builder.gep(out, [builder.add(o, builder.mul(out_row, _INT(k)))])
            builder.store(column, builder.bitcast(target, column.type.as_pointer())).align = 4
        return context.get_dummy_value()

    return signature, generate


def _sixteen(builder: Any, held: Any, a: Any, held_row: Any, first: int) -> Any:
    """16 bytes each of rows `first`, `first` + 4, + 8 and + 12, side by side."""
    parts = []
    for row in range(first, LANES, _WORDS):
        source = builder.gep(held, [builder.add(a, builder.mul(held_row, _INT(row)))])
        part = builder.load(builder.bitcast(source, _QUARTER.as_pointer()))
        part.align = 2
        parts.append(part)
    while len(parts) > 1:
        both = range(2 * parts[0].type.count)
        parts = [
            _shuffled(builder, *pair, both) for pair in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _columns(builder: Any, rows: list[Any]) -> list[Any]:
    """Each quarter of four vectors is a 4 by 4 matrix: transpose all four."""
    low, high = (0, LANES, 1, LANES + 1), (2, LANES + 2, 3, LANES + 3)
    mixed = [
        [_in_quarters(builder, *rows[i : i + 2], mask) for mask in (low, high)] for i in (0, 2)
    ]
    low, high = (0, 1, LANES, LANES + 1), (2, 3, LANES + 2, LANES + 3)
    return [
        _in_quarters(builder, one, other, mask)
        for one, other in zip(*mixed, strict=True)
        for mask in (low, high)
    ]


def _two(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """The lower and the upper of two bfloat16 in a word, as float32."""
    lower = builder.shl(pairs, ir.Constant(pairs.type, [16] * LANES))
    upper = builder.and_(pairs, ir.Constant(pairs.type, [0xFFFF0000] * LANES))
    return lower, upper


def _in_quarters(builder: Any, a: Any, b: Any, mask: tuple[int, ...]) -> Any:
    return _shuffled(builder, a, b, [q + i for q in range(0, LANES, _WORDS) for i in mask])


def _shuffled(builder: Any, a: Any, b: Any, mask: Any) -> Any:
    indices = ir.Constant(ir.VectorType(_WORD, len(mask)), list(mask))
    return builder.shuffle_vector(a, b, indices)
