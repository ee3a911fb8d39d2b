"""Exponentials of scores that lie in columns, in registers, on a CPU.

A column's scores stand `step` elements apart, and 16 columns side by side are a vector, so neither
their largest nor their sum needs more than adding vectors. It is LLVM's own vector arithmetic, as
in `tiles.py`: of a loop over array elements the compiler must suppose that one array's end is
another's beginning, and reads and writes every sum in every step (16 columns of 32 for 300 keys:
5.1 microseconds, and 2.3 so).

Holds true: as `attention.exp_of_negative`, but what is no number stays none; a column's results
depend on the column alone. No index is checked, and the caller's `fastmath` must leave sums in
their order: without that, adding a large number and taking it away is no rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from math import factorial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rhymeflow.cpu.tiles import LANES

_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
_INT = ir.IntType(64)
_LEAST = -87.0
_ROUNDING = 1.5 * 2**23
"""Added to a small number it leaves the nearest whole number in the last bits."""
_LOG2_UPPER, _LOG2_LOWER = 0.693359375, -2.12194440e-4
_COEFFICIENTS = [1 / factorial(k) for k in range(7, -1, -1)]
_FUSED = ("contract",)


@intrinsic
def exponentials(typing, scores, at, step, count, largest, total, to):
    """Turn 16 columns of `count` scores, from `at` on, into exp(score - largest of its column).

    The largest and the sums are written from `to` on; the largest is at least -1e30.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, largest, total = _pointers(context, builder, signature, args, (0, 4, 5))
        _, at, step, count, _, _, to = args

        def compare(k: Any, carried: list[Any]) -> list[Any]:
            score = builder.load(_place(builder, scores, at, step, k), align=4)
            is_more = builder.fcmp_ordered(">", score, carried[0])
            return [builder.select(is_more, score, carried[0])]

        (most,) = _loop(builder, count, [_all(-1e30)], compare)

        def weigh(k: Any, carried: list[Any]) -> list[Any]:
            place = _place(builder, scores, at, step, k)
            weight = _exp(builder, builder.fsub(builder.load(place, align=4), most))
            builder.store(weight, place, align=4)
            return [builder.fadd(carried[0], weight)]

        (summed,) = _loop(builder, count, [_all(0.0)], weigh)
        builder.store(most, _place(builder, largest, to), align=4)
        builder.store(summed, _place(builder, total, to), align=4)
        return context.get_dummy_value()

    place = types.intp
    return types.void(scores, place, place, place, largest, total, place), generate


@intrinsic
def slopes(typing, scores, slopes, at, step, count, log_sums, inner, to):
    """Turn 16 columns of scores into weights exp(score - log_sums[to + i]), and of the loss's
    gradient by the weights, in `slopes`, into that by the scores: weight * (slope - inner[to + i]).
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, slopes, *by_column = _pointers(context, builder, signature, args, (0, 1, 5, 6))
        _, _, at, step, count, _, _, to = args
        log_sum, inner = (builder.load(_place(builder, x, to), align=4) for x in by_column)

        def weigh(k: Any, carried: list[Any]) -> list[Any]:
            place, slope = (_place(builder, x, at, step, k) for x in (scores, slopes))
            weight = _exp(builder, builder.fsub(builder.load(place, align=4), log_sum))
            builder.store(weight, place, align=4)
            less = builder.fsub(builder.load(slope, align=4), inner)
            builder.store(builder.fmul(weight, less), slope, align=4)
            return carried

        _loop(builder, count, [], weigh)
        return context.get_dummy_value()

    place = types.intp
    return types.void(scores, slopes, place, place, place, log_sums, inner, place), generate


def _exp(builder: Any, x: Any) -> Any:
    """exp of 16 numbers <= 0, as `attention.exp_of_negative` has it."""

    def add(a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)

    is_none = builder.fcmp_ordered("<", x, _all(_LEAST))
    x = builder.select(is_none, _all(_LEAST), x)
    rounded = add(x, _all(1.4426950408889634), _all(_ROUNDING))
    whole = builder.fsub(rounded, _all(_ROUNDING))
    rest = add(whole, _all(-_LOG2_LOWER), add(whole, _all(-_LOG2_UPPER), x))
    y = _all(_COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        y = add(y, rest, _all(coefficient))
    exponent = builder.shl(builder.bitcast(rounded, _WORDS), _words(23))
    power = builder.bitcast(builder.add(exponent, _words(127 << 23)), _FLOATS)
    return builder.select(is_none, _all(0.0), builder.fmul(y, power))


def _loop(
    builder: Any, count: Any, firsts: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """`body` for k below `count` >= 1, with what it returned before; return its last."""
    before = builder.block
    loop, after = (builder.append_basic_block(name) for name in ("loop", "after"))
    builder.branch(loop)
    builder.position_at_end(loop)
    phis = [builder.phi(kind) for kind in (_INT, *(first.type for first in firsts))]
    lasts = body(phis[0], phis[1:])
    following = builder.add(phis[0], _INT(1))
    for phi, first, last in zip(phis, [_INT(0), *firsts], [following, *lasts], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    return lasts


def _pointers(context: Any, builder: Any, signature: Any, args: Any, which: tuple[int, ...]) -> Any:
    kinds = signature.args
    return [context.make_array(kinds[i])(context, builder, args[i]).data for i in which]


def _place(builder: Any, base: Any, start: Any, step: Any = None, times: Any = None) -> Any:
    """Where 16 elements lie."""
    if step is not None:
        start = builder.add(start, builder.mul(step, times))
    return builder.bitcast(builder.gep(base, [start]), _FLOATS.as_pointer())


def _all(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * LANES)


def _words(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * LANES)
