"""Vector code for numba: the two inner loops of scoring, as LLVM vectors of 16 floats.

numba cannot tell that two arrays do not overlap, and so leaves short loops over them unvectorised, several times slower.
These functions take addresses and are called from compiled functions only.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

LANES = 16

_F32, _I32 = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_FAST = ("fast",)
# exp2 on [0, 1) by a polynomial, highest power first; relative error 2e-7.
_EXP2 = (1.8775767e-3, 8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 9.9999994e-1)


def _every(kind: ir.VectorType, value: float | int) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _splat(builder: ir.IRBuilder, scalar: ir.Value, kind: ir.VectorType) -> ir.Value:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, _every(_INTS, 0))


def _vector_at(builder: ir.IRBuilder, floats: ir.Value, position: ir.Value) -> ir.Value:
    return builder.bitcast(builder.gep(floats, [position]), _FLOATS.as_pointer())


def _load(builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    loaded = builder.load(pointer)
    loaded.align = 4
    return loaded


def _store(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value) -> None:
    builder.store(value, pointer).align = 4


def _dot(rows: int) -> Any:
    """A function for so many query rows."""

    @intrinsic
    def dot(typing_context: Any, words: Any, scaled: Any, dim: Any, scores: Any) -> Any:
        """scores[row, t] += sum over channels of scaled[row, channel] * (bits 2t, 2t + 1 of words[channel]).

        words [dim] u32, scaled [rows, dim] f32, scores [rows, 16] f32: addresses of contiguous arrays.
        """

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            words, scaled, dim, scores = arguments
            words = builder.inttoptr(words, _I32.as_pointer())
            scaled, scores = (builder.inttoptr(address, _F32.as_pointer()) for address in (scaled, scores))
            places = [_vector_at(builder, scores, ir.Constant(_I32, row * LANES)) for row in range(rows)]
            starts = [_load(builder, place) for place in places]
            before = builder.block
            body, after = builder.append_basic_block("channels"), builder.append_basic_block("end")
            builder.branch(body)
            builder.position_at_end(body)
            channel = builder.phi(dim.type)
            channel.add_incoming(ir.Constant(dim.type, 0), before)
            sums = [builder.phi(_FLOATS) for _ in range(rows)]
            word = _splat(builder, builder.load(builder.gep(words, [channel])), _INTS)
            shifts = ir.Constant(_INTS, [2 * lane for lane in range(LANES)])
            codes = builder.uitofp(builder.and_(builder.lshr(word, shifts), _every(_INTS, 3)), _FLOATS)
            following = builder.add(channel, ir.Constant(dim.type, 1))
            results = []
            for row, (total, start) in enumerate(zip(sums, starts, strict=True)):
                place = builder.add(builder.mul(dim, ir.Constant(dim.type, row)), channel)
                weight = _splat(builder, builder.load(builder.gep(scaled, [place])), _FLOATS)
                result = builder.fadd(total, builder.fmul(weight, codes, flags=_FAST), flags=_FAST)
                total.add_incoming(start, before)
                total.add_incoming(result, body)
                results.append(result)
            channel.add_incoming(following, body)
            builder.cbranch(builder.icmp_unsigned("<", following, dim), body, after)
            builder.position_at_end(after)
            for result, place in zip(results, places, strict=True):
                _store(builder, result, place)
            return context.get_dummy_value()

        return types.void(words, scaled, dim, scores), generate

    return dot


dot_1, dot_2, dot_3, dot_4 = _dot(1), _dot(2), _dot(3), _dot(4)


@intrinsic
def exp_in_place(typing_context: Any, values: Any, count: Any, highest: Any) -> Any:
    """values[:count] become exp(value - highest); returns their sum, f32.

    values: address of f32, none above `highest`; count: a multiple of 16, at least 16. What is 87 and more below `highest`
    becomes 1e-38 or less.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        values, count, highest = arguments
        values = builder.inttoptr(values, _F32.as_pointer())
        highest = _splat(builder, highest, _FLOATS)
        before = builder.block
        body, after = builder.append_basic_block("vectors"), builder.append_basic_block("end")
        builder.branch(body)
        builder.position_at_end(body)
        position, total = builder.phi(count.type), builder.phi(_FLOATS)
        position.add_incoming(ir.Constant(count.type, 0), before)
        total.add_incoming(_every(_FLOATS, 0.0), before)
        place = _vector_at(builder, values, position)
        x = builder.fmul(builder.fsub(_load(builder, place), highest), _every(_FLOATS, 1.44269504))
        lowest = _every(_FLOATS, -126.0)
        x = builder.select(builder.fcmp_ordered(">", x, lowest), x, lowest)
        truncated = builder.fptosi(x, _INTS)
        above = builder.fcmp_ordered(">", builder.sitofp(truncated, _FLOATS), x)
        whole = builder.add(truncated, builder.sext(above, _INTS))
        x = builder.fsub(x, builder.sitofp(whole, _FLOATS))
        y = _every(_FLOATS, _EXP2[0])
        for coefficient in _EXP2[1:]:
            y = builder.fadd(builder.fmul(y, x, flags=_FAST), _every(_FLOATS, coefficient), flags=_FAST)
        exponent = builder.add(whole, _every(_INTS, 127))
        power = builder.bitcast(builder.shl(exponent, _every(_INTS, 23)), _FLOATS)
        y = builder.fmul(y, power)
        _store(builder, y, place)
        new_total = builder.fadd(total, y)
        following = builder.add(position, ir.Constant(count.type, LANES))
        position.add_incoming(following, body)
        total.add_incoming(new_total, body)
        builder.cbranch(builder.icmp_unsigned("<", following, count), body, after)
        builder.position_at_end(after)
        lanes = [builder.extract_element(new_total, ir.Constant(_I32, lane)) for lane in range(LANES)]
        while len(lanes) > 1:
            lanes = [builder.fadd(a, b) for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
        return lanes[0]

    return types.float32(values, count, highest), generate
