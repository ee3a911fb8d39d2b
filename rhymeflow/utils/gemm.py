"""Products of small matrices on a CPU, in registers from end to end.

`tile_16(out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth)` sets, for
i < 8 and j < 16,

    out[o + i * out_row + j] = sum over k < depth of
        left[a + i * left_row + k * left_step] * right[b + k * right_step + j]

over one-dimensional float32 arrays, and `tile_32` the same for j < 32; `depth` >= 1.
`add_tile_16` and `add_tile_32` add to what `out` holds. Attention is made of such products, the
engine's (`engine/native/kernels.py`) and the learner's (`learner/kernels.py`): their sums stay in
registers, where a loop over array elements would write and read them in every step. Measured on one
core of a Zen 5 with AVX-512: 120 to 150 GFLOPS, against 60 for the best loop that numba could be
led to vectorise.

It is LLVM's own vector arithmetic, emitted by a numba intrinsic, so it runs on any CPU, in whatever
width that has. A product is computed in parts of as many sums as the CPU has registers for: all 8
by 32 at once with AVX-512, 4 by 16 elsewhere. On one core with AVX2 8 by 32 at once is 22 to 27
GFLOPS, 8 by 16 29, and 4 by 16 is 80. Holds true: an element's sum is taken in the order of k,
whatever else is computed and in whatever parts. No index is checked: the caller knows that the
arrays are large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

ROWS = 8
"""Rows of one product."""
LANES = 16
"""Columns of the narrow product; a vector."""
HAS_AVX512 = bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))
"""32 registers of a vector each; elsewhere a vector takes two of 16, or four of 32."""

_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_INT = ir.IntType(64)


def _tile(vectors: int, *, adds: bool, wide: bool = HAS_AVX512) -> Any:
    """The intrinsic for `vectors` times 16 columns; `wide` computes all of them at once."""
    part_rows, part_vectors = (ROWS, vectors) if wide else (ROWS // 2, 1)

    @intrinsic
    def tile(
        typing,
        out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth,
    ):  # fmt: skip
        of_index = [types.intp] * 3
        signature = types.void(
            out, types.intp, types.intp, left, *of_index, right, types.intp, types.intp, types.intp
        )

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out, left, right = (
                context.make_array(signature.args[i])(context, builder, args[i]).data
                for i in (0, 3, 7)
            )
            _, o, out_row, _, a, left_row, left_step, _, b, right_step, depth = args
            for first_row in range(0, ROWS, part_rows):
                rows = range(first_row, first_row + part_rows)
                lefts = [_at(builder, left, a, left_row, _INT(i)) for i in rows]
                for first in range(0, vectors, part_vectors):
                    columns = [LANES * v for v in range(first, first + part_vectors)]
                    targets = [
                        _as_vector(builder, _at(builder, out, o, out_row, _INT(i), column))
                        for i in rows
                        for column in columns
                    ]

                    def rights(k: Any, columns: list[int] = columns) -> list[Any]:
                        return [_at(builder, right, b, right_step, k, column) for column in columns]

                    _part(builder, targets, lefts, left_step, rights, depth, adds)
            return context.get_dummy_value()

        return signature, generate

    return tile


def _part(
    builder: Any,
    targets: list[Any],
    lefts: list[Any],
    left_step: Any,
    rights: Callable[[Any], list[Any]],
    depth: Any,
    adds: bool,
) -> None:
    """A loop over `depth` that holds the sums of `targets`, row by row, in registers."""
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    firsts = [_load(builder, target) if adds else zero for target in targets]
    before = builder.block
    loop, after = (builder.append_basic_block(name) for name in ("loop", "after"))
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(_INT)
    sums = [builder.phi(_VECTOR) for _ in targets]
    columns = [_load(builder, _as_vector(builder, address)) for address in rights(k)]
    added = []
    for i, row in enumerate(lefts):
        value = _everywhere(builder, builder.load(_at(builder, row, _INT(0), left_step, k)))
        for v, column in enumerate(columns):
            product = builder.fmul(value, column, flags=("contract",))
            before_it = sums[i * len(columns) + v]
            added.append(builder.fadd(product, before_it, flags=("contract",)))
    following = builder.add(k, _INT(1))
    for phi, first, later in zip([k, *sums], [_INT(0), *firsts], [following, *added], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
    builder.position_at_end(after)
    for value, target in zip(added, targets, strict=True):
        builder.store(value, target).align = 4


def _at(builder: Any, base: Any, start: Any, step: Any, times: Any, more: int = 0) -> Any:
    """Address of element `start + step * times + more`."""
    place = builder.add(start, builder.mul(step, times))
    return builder.gep(base, [builder.add(place, _INT(more))])


def _as_vector(builder: Any, address: Any) -> Any:
    return builder.bitcast(address, _VECTOR.as_pointer())


def _load(builder: Any, address: Any) -> Any:
    vector = builder.load(address)
    vector.align = 4
    return vector


def _everywhere(builder: Any, scalar: Any) -> Any:
    """A vector that holds the scalar in every place."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _INT(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, zeros)


tile_16, tile_32 = _tile(1, adds=False), _tile(2, adds=False)
add_tile_16, add_tile_32 = _tile(1, adds=True), _tile(2, adds=True)


__all__ = ["LANES", "ROWS", "add_tile_16", "add_tile_32", "tile_16", "tile_32"]
