"""What numba does not make of loops: inner loops of scoring and attention as LLVM vectors of 16 floats, and a copy of bytes.

numba cannot tell that two arrays do not overlap, and so leaves short loops over them unvectorised, several times slower.
These functions take addresses and are called from compiled functions only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16

_F32, _I32 = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)
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


def _kv_at(builder: ir.IRBuilder, row: ir.Value, position: ir.Value, half: bool) -> ir.Value:
    """16 numbers of a row at an address, from `position` on: float32, or `half`: bfloat16."""
    if not half:
        return _load(builder, _vector_at(builder, builder.inttoptr(row, _F32.as_pointer()), position))
    place = builder.gep(builder.inttoptr(row, ir.IntType(16).as_pointer()), [position])
    bits = builder.load(builder.bitcast(place, _HALVES.as_pointer()))
    bits.align = 2
    return builder.bitcast(builder.shl(builder.zext(bits, _INTS), _every(_INTS, 16)), _FLOATS)


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


def _loop(
    builder: ir.IRBuilder,
    count: ir.Value,
    starts: list[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
    step: int = LANES,
) -> list[ir.Value]:
    """`for position in range(0, count, step)`, at least once; `body(position, carried)` returns what is carried on."""
    before = builder.block
    inside, after = builder.append_basic_block("vectors"), builder.append_basic_block("end")
    builder.branch(inside)
    builder.position_at_end(inside)
    position = builder.phi(count.type)
    position.add_incoming(ir.Constant(count.type, 0), before)
    carried = [builder.phi(start.type) for start in starts]
    results = body(position, list(carried))
    following = builder.add(position, ir.Constant(count.type, step))
    position.add_incoming(following, builder.block)
    for value, start, result in zip(carried, starts, results, strict=True):
        value.add_incoming(start, before)
        value.add_incoming(result, builder.block)
    builder.cbranch(builder.icmp_unsigned("<", following, count), inside, after)
    builder.position_at_end(after)
    return results


def _reduce(vector: ir.Value, builder: ir.IRBuilder, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """All lanes combined into one scalar, halves with halves."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (ir.Constant(ir.VectorType(_I32, width), list(range(at, at + width))) for at in (0, width))
        undefined = ir.Constant(vector.type, ir.Undefined)
        vector = combine(
            builder.shuffle_vector(vector, undefined, low), builder.shuffle_vector(vector, undefined, high)
        )
    return builder.extract_element(vector, ir.Constant(_I32, 0))


@intrinsic
def exp_in_place(typing_context: Any, values: Any, count: Any, highest: Any) -> Any:
    """values[:count] become exp(value - their maximum), and highest[0] the maximum; returns their sum, f32.

    values, highest: addresses of f32; count: a multiple of 16, at least 16. What is 87 and more below the maximum becomes
    1e-38 or less.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        values, count, highest = arguments
        values, highest = (builder.inttoptr(address, _F32.as_pointer()) for address in (values, highest))

        def larger(a: ir.Value, b: ir.Value) -> ir.Value:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        (maximum,) = _loop(
            builder,
            count,
            [_every(_FLOATS, -3e38)],
            lambda position, best: [larger(best[0], _load(builder, _vector_at(builder, values, position)))],
        )
        maximum = _reduce(maximum, builder, larger)
        builder.store(maximum, highest)
        maximum = _splat(builder, maximum, _FLOATS)

        def exponentiate(position: ir.Value, total: list[ir.Value]) -> list[ir.Value]:
            place = _vector_at(builder, values, position)
            x = builder.fmul(builder.fsub(_load(builder, place), maximum), _every(_FLOATS, 1.44269504))
            x = larger(x, _every(_FLOATS, -126.0))
            truncated = builder.fptosi(x, _INTS)
            above = builder.fcmp_ordered(">", builder.sitofp(truncated, _FLOATS), x)
            whole = builder.add(truncated, builder.sext(above, _INTS))
            x = builder.fsub(x, builder.sitofp(whole, _FLOATS))
            y = _every(_FLOATS, _EXP2[0])
            for coefficient in _EXP2[1:]:
                y = builder.fadd(builder.fmul(y, x, flags=_FAST), _every(_FLOATS, coefficient), flags=_FAST)
            power = builder.shl(builder.add(whole, _every(_INTS, 127)), _every(_INTS, 23))
            y = builder.fmul(y, builder.bitcast(power, _FLOATS))
            _store(builder, y, place)
            return [builder.fadd(total[0], y)]

        (total,) = _loop(builder, count, [_every(_FLOATS, 0.0)], exponentiate)
        return _reduce(total, builder, builder.fadd)

    return types.float32(values, count, highest), generate


@intrinsic
def log_in_place(typing_context: Any, values: Any, count: Any) -> Any:
    """values[:count] become their natural logarithms, within 1e-6.

    values: address of positive f32; count: a multiple of 16, at least 16.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        values, count = arguments
        values = builder.inttoptr(values, _F32.as_pointer())

        def logarithm(position: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            place = _vector_at(builder, values, position)
            bits = builder.bitcast(_load(builder, place), _INTS)
            exponent = builder.sub(builder.lshr(bits, _every(_INTS, 23)), _every(_INTS, 127))
            mantissa = builder.or_(builder.and_(bits, _every(_INTS, (1 << 23) - 1)), _every(_INTS, 127 << 23))
            x = builder.bitcast(mantissa, _FLOATS)  # in [1, 2)
            # log x = 2 artanh s with s = (x - 1) / (x + 1), at most a third.
            s = builder.fdiv(builder.fsub(x, _every(_FLOATS, 1.0)), builder.fadd(x, _every(_FLOATS, 1.0)))
            square = builder.fmul(s, s)
            y = _every(_FLOATS, 2 / 11)
            for power in (9, 7, 5, 3, 1):
                y = builder.fadd(builder.fmul(y, square, flags=_FAST), _every(_FLOATS, 2 / power), flags=_FAST)
            whole = builder.fmul(builder.sitofp(exponent, _FLOATS), _every(_FLOATS, 0.69314718))
            _store(builder, builder.fadd(whole, builder.fmul(y, s)), place)
            return []

        _loop(builder, count, [], logarithm)
        return context.get_dummy_value()

    return types.void(values, count), generate


@intrinsic
def scale_query(typing_context: Any, query: Any, low: Any, step: Any, dim: Any, scaled: Any) -> Any:
    """scaled[c] = query[c] * step[c]; returns the sum of query[c] * low[c], f32.

    query, scaled [dim] f32; low, step [dim] bfloat16: addresses. dim: a multiple of 16.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        query, low, step, dim, scaled = arguments
        query, scaled = (builder.inttoptr(address, _F32.as_pointer()) for address in (query, scaled))

        def body(position: ir.Value, total: list[ir.Value]) -> list[ir.Value]:
            part = _load(builder, _vector_at(builder, query, position))
            _store(
                builder,
                builder.fmul(part, _kv_at(builder, step, position, half=True)),
                _vector_at(builder, scaled, position),
            )
            return [
                builder.fadd(
                    total[0], builder.fmul(part, _kv_at(builder, low, position, half=True), flags=_FAST), flags=_FAST
                )
            ]

        (total,) = _loop(builder, dim, [_every(_FLOATS, 0.0)], body)
        return _reduce(total, builder, builder.fadd)

    return types.float32(query, low, step, dim, scaled), generate


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes between addresses that do not overlap."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        target, source, count = arguments
        target, source = (builder.inttoptr(address, cgutils.voidptr_t) for address in (target, source))
        cgutils.raw_memcpy(builder, target, source, count, 1)
        return context.get_dummy_value()

    return types.void(target, source, count), generate


_AHEAD = 16  # tokens whose keys or values are asked for before their turn


def _row_of(builder: ir.IRBuilder, array: ir.Value, stride: ir.Value, number: ir.Value) -> ir.Value:
    """Address of a row of an array at an address; the stride is in bytes."""
    return builder.add(array, builder.mul(stride, number))


def _prefetch(builder: ir.IRBuilder, row: ir.Value, position: ir.Value, half: bool) -> None:
    """Have the memory at a position of a row at an address brought near."""
    kind = ir.IntType(8).as_pointer()
    place = builder.add(row, builder.mul(position, ir.Constant(position.type, 2 if half else 4)))
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [kind, _I32, _I32, _I32]), "llvm.prefetch.p0i8"
    )
    builder.call(function, [builder.inttoptr(place, kind), *(ir.Constant(_I32, option) for option in (0, 3, 1))])


def _key_dots(rows: int, half: bool) -> Any:
    """A function for so many query rows, and keys in float32 or, if `half`, in bfloat16."""

    @intrinsic
    def key_dots(
        typing_context: Any, keys: Any, stride: Any, count: Any, queries: Any, dim: Any, scores: Any, row_bytes: Any
    ) -> Any:
        """scores[row, t] = sum over channels of queries[row, channel] * keys[t, channel], for `count` tokens.

        keys: address, `stride` bytes between tokens; queries [rows, dim] f32; scores f32, `row_bytes` between rows; dim: a
        multiple of 16.
        """

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            keys, stride, count, queries, dim, scores, row_bytes = arguments
            floats = builder.inttoptr(queries, _F32.as_pointer())

            def token(number: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                key = _row_of(builder, keys, stride, number)
                ahead = builder.add(key, builder.mul(stride, ir.Constant(stride.type, _AHEAD)))

                def channels(position: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                    part = _kv_at(builder, key, position, half)
                    _prefetch(builder, ahead, position, half)
                    sums = []
                    for row, total in enumerate(totals):
                        place = builder.add(builder.mul(dim, ir.Constant(dim.type, row)), position)
                        query = _load(builder, _vector_at(builder, floats, place))
                        sums.append(builder.fadd(total, builder.fmul(query, part, flags=_FAST), flags=_FAST))
                    return sums

                for row, total in enumerate(_loop(builder, dim, [_every(_FLOATS, 0.0)] * rows, channels)):
                    line = _row_of(builder, scores, row_bytes, ir.Constant(row_bytes.type, row))
                    place = builder.gep(builder.inttoptr(line, _F32.as_pointer()), [number])
                    builder.store(_reduce(total, builder, builder.fadd), place)
                return []

            _loop(builder, count, [], token, step=1)
            return context.get_dummy_value()

        return types.void(keys, stride, count, queries, dim, scores, row_bytes), generate

    return key_dots


def _add_values(rows: int, half: bool) -> Any:
    """A function for so many query rows, and values in float32 or, if `half`, in bfloat16."""

    @intrinsic
    def add_values(
        typing_context: Any, values: Any, stride: Any, count: Any, weights: Any, row_bytes: Any, dim: Any, out: Any
    ) -> Any:
        """out[row, channel] += sum over `count` tokens of weights[row, t] * values[t, channel].

        values: address, `stride` bytes between tokens; weights f32, `row_bytes` between rows; out [rows, dim] f32; dim: a
        multiple of 16.
        """

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            values, stride, count, weights, row_bytes, dim, out = arguments
            floats = builder.inttoptr(out, _F32.as_pointer())
            lines = [
                builder.inttoptr(
                    _row_of(builder, weights, row_bytes, ir.Constant(row_bytes.type, row)), _F32.as_pointer()
                )
                for row in range(rows)
            ]

            def channels(position: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                places = [
                    _vector_at(builder, floats, builder.add(builder.mul(dim, ir.Constant(dim.type, row)), position))
                    for row in range(rows)
                ]

                def token(number: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                    row_at = _row_of(builder, values, stride, number)
                    value = _kv_at(builder, row_at, position, half)
                    ahead = builder.add(row_at, builder.mul(stride, ir.Constant(stride.type, _AHEAD)))
                    _prefetch(builder, ahead, position, half)
                    sums = []
                    for line, total in zip(lines, totals, strict=True):
                        weight = _splat(builder, builder.load(builder.gep(line, [number])), _FLOATS)
                        sums.append(builder.fadd(total, builder.fmul(weight, value, flags=_FAST), flags=_FAST))
                    return sums

                totals = _loop(builder, count, [_load(builder, place) for place in places], token, step=1)
                for place, total in zip(places, totals, strict=True):
                    _store(builder, total, place)
                return []

            _loop(builder, dim, [], channels)
            return context.get_dummy_value()

        return types.void(values, stride, count, weights, row_bytes, dim, out), generate

    return add_values


key_dots_1, key_dots_2, key_dots_3, key_dots_4 = (_key_dots(rows, half=False) for rows in (1, 2, 3, 4))
half_key_dots_1, half_key_dots_2, half_key_dots_3, half_key_dots_4 = (
    _key_dots(rows, half=True) for rows in (1, 2, 3, 4)
)
add_values_1, add_values_2, add_values_3, add_values_4 = (_add_values(rows, half=False) for rows in (1, 2, 3, 4))
half_add_values_1, half_add_values_2, half_add_values_3, half_add_values_4 = (
    _add_values(rows, half=True) for rows in (1, 2, 3, 4)
)
