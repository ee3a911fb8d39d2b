"""Products of small matrices in a CPU's registers, from which attention is built.

Sums stay in registers, where a loop over array elements would store and load them in every step (on
one core of a Zen 5: 120 to 150 GFLOPS, against 60 for the best loop that numba vectorised). Numba
intrinsics emit LLVM's vector arithmetic, so this runs on any CPU. Each element's sum is in the
order of k, whatever else is computed. No index is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS = 8  # rows of one product
LANES = 16  # columns of the narrow product; a vector
HAS_AVX512 = bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))
"""With it there are 32 registers of one vector each, and a product is computed at once. Without it
a vector takes two of 16 registers (AVX2) or four of 32, and a product is computed in parts of 4 by
16: on a core with AVX2 they give 80 GFLOPS, where 8 by 32 at once gives 25."""

ROW_COUNTS = (1, 2, 3, 4, ROWS)  # the numbers of rows for which code is generated
BYTES = 16  # bytes of each row that `transpose` takes
_WORDS = 4  # 32-bit words in `BYTES`
_INT, _WORD = ir.IntType(64), ir.IntType(32)
_QUARTER = ir.VectorType(_WORD, _WORDS)


def _tile(
    columns: int, *, counts: tuple[int, ...] = (ROWS,), adds: bool = False, wide: bool = HAS_AVX512
) -> Any:
    """Return an intrinsic for `columns` and any of `counts` of rows; `wide`: all at once."""

    @intrinsic
    def tile(
        typing, rows,
        out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth,
    ):  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            rows, *operands = (  # arrays as pointers
                context.make_array(kind)(context, builder, arg).data
                if isinstance(kind, types.Array)
                else arg
                for kind, arg in zip(signature.args, args, strict=True)
            )

            def choose(counts: tuple[int, ...]) -> None:
                if len(counts) == 1:
                    _product(builder, operands, counts[0], columns, adds, wide)
                    return
                few = builder.icmp_signed("<=", rows, _INT(counts[0]))
                with builder.if_else(few) as (then, otherwise):
                    with then:
                        choose(counts[:1])
                    with otherwise:
                        choose(counts[1:])

            choose(counts)
            return context.get_dummy_value()

        place = types.intp
        of_left, of_right = [place] * 3, [place] * 3
        return types.void(place, out, place, place, left, *of_left, right, *of_right), generate

    return tile


def _product(
    builder: Any, operands: list[Any], num_rows: int, num_columns: int, adds: bool, wide: bool
) -> None:
    """Emit the code of one tile, in parts with as many sums as there are registers."""
    out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth = operands
    vector = ir.VectorType(ir.FloatType(), min(LANES, num_columns))
    part_rows = num_rows if wide else min(num_rows, ROWS // 2)
    part_columns = num_columns if wide else LANES * max(1, ROWS // 2 // num_rows)
    for first_row in range(0, num_rows, part_rows):
        rows = range(first_row, min(first_row + part_rows, num_rows))
        lefts = [_at(builder, left, a, left_row, _INT(i)) for i in rows]
        for first in range(0, num_columns, part_columns):
            columns = range(first, min(first + part_columns, num_columns), vector.count)
            targets = [
                _as_vector(builder, _at(builder, out, o, out_row, _INT(i), column), vector)
                for i in rows
                for column in columns
            ]

            def rights(k: Any, columns: Any = columns) -> list[Any]:
                addresses = [_at(builder, right, b, right_step, k, column) for column in columns]
                return [_as_floats(builder, address, vector) for address in addresses]

            _part(builder, targets, lefts, left_step, rights, depth, adds)


def _part(
    builder: Any,
    targets: list[Any],
    lefts: list[Any],
    left_step: Any,
    rights: Callable[[Any], list[Any]],
    depth: Any,
    adds: bool,
) -> None:
    """Emit a loop over `depth`, at least 1, that keeps the sums of `targets` in registers."""
    vector = targets[0].type.pointee
    zero = ir.Constant(vector, [0.0] * vector.count)
    firsts = [_load(builder, target) if adds else zero for target in targets]
    before = builder.block
    loop, after = (builder.append_basic_block(name) for name in ("loop", "after"))
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(_INT)
    sums = [builder.phi(vector) for _ in targets]
    columns = rights(k)
    added = []
    for i, row in enumerate(lefts):
        scalar = builder.load(_at(builder, row, _INT(0), left_step, k))
        value = _broadcast(builder, scalar, vector)
        for v, column in enumerate(columns):
            product = builder.fmul(value, column, flags=("contract",))
            partial_sum = sums[i * len(columns) + v]
            added.append(builder.fadd(product, partial_sum, flags=("contract",)))
    following = builder.add(k, _INT(1))
    for phi, first, later in zip([k, *sums], [_INT(0), *firsts], [following, *added], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
    builder.position_at_end(after)
    for value, target in zip(added, targets, strict=True):
        builder.store(value, target).align = 4


def _at(builder: Any, base: Any, start: Any, step: Any, times: Any, more: int = 0) -> Any:
    index = builder.add(start, builder.mul(step, times))
    return builder.gep(base, [builder.add(index, _INT(more))])


def _as_vector(builder: Any, address: Any, vector: Any) -> Any:
    return builder.bitcast(address, vector.as_pointer())


def _load(builder: Any, address: Any) -> Any:
    vector = builder.load(address)
    vector.align = 4
    return vector


def _as_floats(builder: Any, address: Any, vector: Any) -> Any:
    """Load a vector of float32, or of the bits of bfloat16, as float32."""
    if isinstance(address.type.pointee, ir.FloatType):
        return _load(builder, _as_vector(builder, address, vector))
    halves, words = (ir.VectorType(ir.IntType(bits), vector.count) for bits in (16, 32))
    bits = builder.load(_as_vector(builder, address, halves))
    bits.align = 2
    upper = builder.shl(builder.zext(bits, words), ir.Constant(words, [16] * vector.count))
    return builder.bitcast(upper, vector)


def _broadcast(builder: Any, scalar: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _INT(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, undefined, zeros)


tile_16, tile_32 = _tile(16), _tile(32)
"""`tile_16(rows, out, o, out_row, left, a, left_row, left_step, right, b, right_step, depth)` sets,
for i < 8 and j < 16, of one-dimensional float32 arrays,

    out[o + i * out_row + j] = sum over k < depth of
        left[a + i * left_row + k * left_step] * right[b + k * right_step + j]

`rows` is 8."""
add_tile_16, add_tile_32 = _tile(16, adds=True), _tile(32, adds=True)
"""These add to what `out` holds."""
row_tile_8, row_tile_16, row_tile_32 = (
    _tile(columns, counts=ROW_COUNTS) for columns in (8, 16, 32)
)
"""These take 1 to 8 rows and compute the smallest sufficient of `ROW_COUNTS`, which `left` and
`out` must have room for; their `right` may be the bits of bfloat16, as uint16."""


@intrinsic
def prefetch(typingctx, array, place):
    """Prefetch array.flat[place] of a contiguous array."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        number = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = builder.bitcast(builder.gep(data, [number]), ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        # For reading, into all caches, data rather than instructions.
        builder.call(fetch, [pointer, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.none(array, place), codegen


@intrinsic
def transpose(typing, out, o, out_row, source, a, source_row):
    """Set out[o + k * out_row + i] = source[a + i * source_row + k] for i < 16 and the elements k
    of 16 bytes; `out` is float32, `source` float32 or the bits of bfloat16 as uint16.

    Each quarter of a vector transposes four by four elements (for bfloat16, pairs), all four at
    once, with two shuffles for each vector of the result."""
    of_index = [types.intp] * 2
    signature = types.void(out, *of_index, source, *of_index)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, source = (
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 3)
        )
        _, o, out_row, _, a, source_row = args
        columns = _columns(
            builder, [_sixteen(builder, source, a, source_row, r) for r in range(_WORDS)]
        )
        if not isinstance(signature.args[3].dtype, types.Float):
            columns = [half for pair in columns for half in _two(builder, pair)]
        for k, column in enumerate(columns):
            target = builder.gep(out, [builder.add(o, builder.mul(out_row, _INT(k)))])
            builder.store(column, builder.bitcast(target, column.type.as_pointer())).align = 4
        return context.get_dummy_value()

    return signature, generate


def _sixteen(builder: Any, source: Any, a: Any, source_row: Any, first: int) -> Any:
    """Load 16 bytes each of rows `first`, `first` + 4, + 8 and + 12 into one vector."""
    parts = []
    for row in range(first, LANES, _WORDS):
        address = builder.gep(source, [builder.add(a, builder.mul(source_row, _INT(row)))])
        part = builder.load(builder.bitcast(address, _QUARTER.as_pointer()))
        part.align = 2
        parts.append(part)
    while len(parts) > 1:
        both = range(2 * parts[0].type.count)
        parts = [
            _shuffled(builder, *pair, both) for pair in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _columns(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose the 4 by 4 matrix in each quarter of four vectors."""
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
    """Return the lower and the upper bfloat16 of each word, as float32."""
    lower = builder.shl(pairs, ir.Constant(pairs.type, [16] * LANES))
    upper = builder.and_(pairs, ir.Constant(pairs.type, [0xFFFF0000] * LANES))
    return lower, upper


def _in_quarters(builder: Any, a: Any, b: Any, mask: tuple[int, ...]) -> Any:
    return _shuffled(builder, a, b, [q + i for q in range(0, LANES, _WORDS) for i in mask])


def _shuffled(builder: Any, a: Any, b: Any, mask: Any) -> Any:
    indices = ir.Constant(ir.VectorType(_WORD, len(mask)), list(mask))
    return builder.shuffle_vector(a, b, indices)
