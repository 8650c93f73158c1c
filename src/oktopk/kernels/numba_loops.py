"""Compiled loops over numpy arrays, for one CPU thread each; none holds the interpreter's lock.

The pass over a whole bucket takes `LANES` elements at once: it adds, stores, compares, and gets the comparison back as
the bits of one integer, so that elements which are not worth sending cost no branch of their own.
"""

# What Numba compiles carries no types that a checker could follow, and numba itself ships none.
# pyright: basic, reportMissingTypeStubs=false, reportUntypedFunctionDecorator=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, errors
from numba.extending import intrinsic

LANES = 64
MAGNITUDE = np.int32(0x7FFFFFFF)
ONE = np.uint64(1)
RADIX = ((20, 11), (9, 11), (0, 9))  # (shift, number of bits) of the digits of a magnitude, highest first
SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""oktopk.kernels.torch_ops.HASH_SPREAD as an unsigned number."""

_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled at the first call and kept on disk, where there is a place to keep it."""
    try:
        return njit(nogil=True, cache=True)(function)
    except (RuntimeError, errors.NumbaError):  # no folder that can be written
        return njit(nogil=True)(function)


@intrinsic
def _address(typingctx, array, index):  # noqa: ARG001
    """Of array[index]."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.gep(data, [arguments[1]])

    return types.CPointer(array.dtype)(array, index), generate


def _vector_at(builder, pointer):
    return builder.bitcast(pointer, _FLOATS.as_pointer())


def _reaches(builder, vector, floor):
    """One bit for each lane: are its magnitude's bits at least `floor`?"""
    magnitude = builder.and_(builder.bitcast(vector, _INTS), ir.Constant(_INTS, [0x7FFFFFFF] * LANES))
    undefined = ir.Constant(_INTS, ir.Undefined)
    first = builder.insert_element(undefined, floor, ir.Constant(ir.IntType(32), 0))
    everywhere = builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))
    return builder.bitcast(builder.icmp_signed(">=", magnitude, everywhere), ir.IntType(LANES))


@intrinsic
def _which_reach(typingctx, values, floor):  # noqa: ARG001
    def generate(context, builder, signature, arguments):  # noqa: ARG001
        return _reaches(builder, builder.load(_vector_at(builder, arguments[0]), align=4), arguments[1])

    return types.uint64(types.CPointer(types.float32), types.int32), generate


def _adding(past_caches: bool):
    """out = left + right for LANES elements, and which of them reach the floor.

    `past_caches` stores straight to memory, where `out` is not needed again soon: it must lie on a cache line.
    """

    @intrinsic
    def add(typingctx, left, right, out, floor):  # noqa: ARG001
        def generate(context, builder, signature, arguments):  # noqa: ARG001
            left, right, out, floor = arguments
            total = builder.fadd(
                builder.load(_vector_at(builder, left), align=4), builder.load(_vector_at(builder, right), align=4)
            )
            store = builder.store(total, _vector_at(builder, out), align=64 if past_caches else 4)
            if past_caches:
                store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            return _reaches(builder, total, floor)

        pointer = types.CPointer(types.float32)
        return types.uint64(pointer, pointer, pointer, types.int32), generate

    return add


_add_past_caches, _add = _adding(True), _adding(False)


def _spread(builder, number):
    """One number in every lane."""
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def _cut_lanes(builder, change, cap):
    """Where a magnitude is finite and above `cap`, `cap` with its sign."""
    bits = builder.bitcast(change, _INTS)
    magnitude = builder.bitcast(builder.and_(bits, ir.Constant(_INTS, [0x7FFFFFFF] * LANES)), _FLOATS)
    sign = builder.and_(bits, ir.Constant(_INTS, [-0x80000000] * LANES))
    limit = _spread(builder, cap)
    infinity = ir.Constant(_FLOATS, [ir.Constant(ir.FloatType(), float("inf"))] * LANES)
    too_large = builder.and_(
        builder.fcmp_ordered(">", magnitude, limit), builder.fcmp_ordered("<", magnitude, infinity)
    )
    signed = builder.bitcast(builder.or_(builder.bitcast(limit, _INTS), sign), _FLOATS)
    return builder.select(too_large, signed, change)


def _moving(past_caches: bool, has_factor: bool):
    """The rule of an update for LANES elements, out = residual + change, and which of `out` reach the floor."""

    @intrinsic
    def move(typingctx, residual, gradient, old, factor, new, out, momentum, gain, scale, cap, floor):  # noqa: ARG001
        def generate(context, builder, signature, arguments):  # noqa: ARG001
            residual, gradient, old, factor, new, out, momentum, gain, scale, cap, floor = arguments
            loaded = [builder.load(_vector_at(builder, pointer), align=4) for pointer in (residual, gradient, old)]
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{LANES}f32"
            )
            push = builder.fmul(loaded[1], _spread(builder, gain))
            velocity = builder.call(fma, [loaded[2], _spread(builder, momentum), push])
            change = builder.fmul(velocity, _spread(builder, scale))
            if has_factor:
                change = builder.fmul(change, builder.load(_vector_at(builder, factor), align=4))
                change = _cut_lanes(builder, change, cap)
            total = builder.fadd(loaded[0], change)
            for vector, target in ((velocity, new), (total, out)):
                store = builder.store(vector, _vector_at(builder, target), align=64 if past_caches else 4)
                if past_caches:
                    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            return _reaches(builder, total, floor)

        pointer, number = types.CPointer(types.float32), types.float32
        inputs = (*(pointer,) * 6, *(number,) * 4, types.int32)
        return types.uint64(*inputs), generate

    return move


_move_past_caches, _move = _moving(True, False), _moving(False, False)
_update_past_caches, _update = _moving(True, True), _moving(False, True)


@intrinsic
def _fma(typingctx, a, b, c):  # noqa: ARG001
    """a * b + c, rounded once."""

    def generate(context, builder, signature, arguments):  # noqa: ARG001
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def _lowest_bit(typingctx, word):  # noqa: ARG001
    def generate(context, builder, signature, arguments):  # noqa: ARG001
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@intrinsic
def _bits(typingctx, value):  # noqa: ARG001
    def generate(context, builder, signature, arguments):  # noqa: ARG001
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@njit(nogil=True, inline="always")
def _magnitude(value):
    return _bits(value) & MAGNITUDE


@compiled
def accumulate(residual, gradient, out, past_caches, floor, indices, values):
    """out = residual + gradient; fills `indices` and `values` with what reaches `floor`, the bits of a number.

    Returns how many do, also beyond the room there is, and the bits of the largest.
    """
    room, count, largest = indices.size, 0, np.int32(0)
    whole = out.size - out.size % LANES
    for start in range(0, whole, LANES):
        left, right, target = _address(residual, start), _address(gradient, start), _address(out, start)
        which = _add_past_caches(left, right, target, floor) if past_caches else _add(left, right, target, floor)
        while which:
            at = start + _lowest_bit(which)
            which &= which - ONE
            value = residual[at] + gradient[at]  # from the caches: `out` may be on its way past them
            largest = max(largest, _magnitude(value))
            if count < room:
                indices[count] = at
                values[count] = value
            count += 1
    for at in range(whole, out.size):
        out[at] = residual[at] + gradient[at]
        if _magnitude(out[at]) >= floor:
            largest = max(largest, _magnitude(out[at]))
            if count < room:
                indices[count] = at
                values[count] = out[at]
            count += 1
    return count, largest


@njit(nogil=True, inline="always")
def _changed(velocity, scale, factor, at, cap):
    """One element's change. No `factor`, no `cap`."""
    change = velocity * scale
    if factor.size:
        change = change * factor[at]
        magnitude = abs(change)
        if magnitude > cap and magnitude < np.inf:
            change = cap if change > 0 else -cap
    return change


@compiled
def accumulate_velocity(
    residual, gradient, out, old, new, factor, momentum, gain, scale, cap, past_caches, floor, indices, values
):
    """The rule of an update, whose `factor` may be empty, and out = residual + change; else as `accumulate`."""
    room, count, largest = indices.size, 0, np.int32(0)
    whole = out.size - out.size % LANES
    for start in range(0, whole, LANES):
        owed, given, before = _address(residual, start), _address(gradient, start), _address(old, start)
        moved, target = _address(new, start), _address(out, start)
        if factor.size:
            each = _address(factor, start)
            if past_caches:
                which = _update_past_caches(owed, given, before, each, moved, target, momentum, gain, scale, cap, floor)
            else:
                which = _update(owed, given, before, each, moved, target, momentum, gain, scale, cap, floor)
        elif past_caches:
            which = _move_past_caches(owed, given, before, given, moved, target, momentum, gain, scale, cap, floor)
        else:
            which = _move(owed, given, before, given, moved, target, momentum, gain, scale, cap, floor)
        while which:
            at = start + _lowest_bit(which)
            which &= which - ONE
            velocity = _fma(old[at], momentum, gradient[at] * gain)
            value = residual[at] + _changed(velocity, scale, factor, at, cap)
            largest = max(largest, _magnitude(value))
            if count < room:
                indices[count] = at
                values[count] = value
            count += 1
    for at in range(whole, out.size):
        new[at] = _fma(old[at], momentum, gradient[at] * gain)
        out[at] = residual[at] + _changed(new[at], scale, factor, at, cap)
        if _magnitude(out[at]) >= floor:
            largest = max(largest, _magnitude(out[at]))
            if count < room:
                indices[count] = at
                values[count] = out[at]
            count += 1
    return count, largest


@compiled
def above(numbers, floor, indices, values):
    """Fills `indices` and `values` with what reaches `floor`; returns how many do and the largest one's bits."""
    room, count, largest = indices.size, 0, np.int32(0)
    whole = numbers.size - numbers.size % LANES
    for start in range(0, whole, LANES):
        which = _which_reach(_address(numbers, start), floor)
        while which:
            at = start + _lowest_bit(which)
            which &= which - ONE
            largest = max(largest, _magnitude(numbers[at]))
            if count < room:
                indices[count] = at
                values[count] = numbers[at]
            count += 1
    for at in range(whole, numbers.size):
        if _magnitude(numbers[at]) >= floor:
            largest = max(largest, _magnitude(numbers[at]))
            if count < room:
                indices[count] = at
                values[count] = numbers[at]
            count += 1
    return count, largest


@compiled
def histogram(numbers, first, shift, counts):
    """Adds to `counts`; four tables take turns, so that a run of like numbers does not wait for itself."""
    bits, size = numbers.view(np.int32), counts.size
    tables = np.zeros(4 * size, np.int64)
    for at in range(bits.size):
        place = np.int64((bits[at] & MAGNITUDE) >> shift) - first
        if place >= 0:
            tables[(at & 3) * size + min(place, size - 1)] += 1
    for place in range(size):
        counts[place] += tables[place] + tables[place + size] + tables[place + 2 * size] + tables[place + 3 * size]


@compiled
def kth_magnitude(numbers, k):
    """The bits of the k-th largest magnitude, digit by digit."""
    first = 0
    for shift, num_bits in RADIX:
        counts = np.zeros(1 << num_bits, np.int64)
        first <<= num_bits
        histogram(numbers, first, shift, counts)
        place, reached = counts.size - 1, counts[counts.size - 1]
        while reached < k:
            place -= 1
            reached += counts[place]
        first += place
    return np.int32(first)


@compiled
def merge(left_indices, left_values, right_indices, right_values, indices, values):
    """The union of two sorted vectors, left value first; returns its size."""
    left, right, count = 0, 0, 0
    nothing = np.float32(0.0)
    while left < left_indices.size and right < right_indices.size:
        a, b = left_indices[left], right_indices[right]
        x, y = left_values[left], right_values[right]
        take_left, take_right = a <= b, b <= a
        indices[count] = min(a, b)
        values[count] = (nothing + (x if take_left else nothing)) + (y if take_right else nothing)
        left += take_left
        right += take_right
        count += 1
    while left < left_indices.size:
        indices[count], values[count] = left_indices[left], left_values[left] + nothing
        left += 1
        count += 1
    while right < right_indices.size:
        indices[count], values[count] = right_indices[right], nothing + right_values[right]
        right += 1
        count += 1
    return count


@compiled
def common(left_indices, left_values, right_indices, indices, values):
    """The elements of the left vector whose index is also in the right list; returns how many."""
    left, right, count = 0, 0, 0
    while left < left_indices.size and right < right_indices.size:
        a, b = left_indices[left], right_indices[right]
        indices[count], values[count] = a, left_values[left]
        count += a == b
        left += a <= b
        right += b <= a
    return count


@compiled
def scatter(target, indices, values):
    for at in range(indices.size):
        target[indices[at]] = values[at]


@compiled
def subtract(target, indices, values):
    for at in range(indices.size):
        target[indices[at]] -= values[at]


@compiled
def encode_gaps(indices, most, encoded):
    """Writes gaps as digits; returns how many digits there are, also beyond the room there is."""
    count, following = 0, 0
    for at in range(indices.size):
        gap = indices[at] - following
        following = indices[at] + 1
        while gap >= most:
            if count < encoded.size:
                encoded[count] = most
            count += 1
            gap -= most
        if count < encoded.size:
            encoded[count] = gap
        count += 1
    return count


@compiled
def decode_gaps(encoded, most, indices):
    """Reads digits; returns how many indices there are, also beyond the room there is, or -1 for half a gap."""
    count, following, digit = 0, 0, 0
    for at in range(encoded.size):
        digit = np.int64(encoded[at])
        following += digit
        if digit != most:
            if count < indices.size:
                indices[count] = following
            count += 1
            following += 1
    return -1 if encoded.size and digit == most else count


@compiled
def hash_words(words):
    total = np.uint64(0)
    for at in range(words.size):
        weight = (np.uint64(at) * SPREAD) | ONE
        total += np.uint64(np.int64(words[at])) * weight
    return total
