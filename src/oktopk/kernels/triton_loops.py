"""Loops over elements for a GPU, in Triton."""

# What Triton compiles carries no types that a checker could follow, and triton itself ships none.
# pyright: basic, reportMissingImports=false, reportUntypedFunctionDecorator=false, reportMissingTypeStubs=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def look(
    residual,
    gradient,
    out,
    old,
    new,
    factor,
    momentum,
    gain,
    scale,
    cap,
    words,
    counts,
    facts,
    floor,
    n,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    MOVE: tl.constexpr,
    HAS_OLD: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block: out = residual + gradient; one bit for each element that reaches `floor`, and how many do.

    With MOVE, the change that an update's rule makes takes the gradient's place, and `new` is the new velocity. To be
    compiled without fusing products and sums: the bits are those of the rule. Clears `facts` for `collect`.
    """
    block = tl.program_id(0)
    if block == 0:
        tl.store(facts + tl.arange(0, 2), tl.zeros((2,), tl.int64))
    start = block.to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    inside = start + at < n
    value = tl.load(gradient + start + at, mask=inside, other=0.0).to(tl.float32)
    if MOVE:
        push = value * gain
        velocity = push
        if HAS_OLD:
            before = tl.load(old + start + at, mask=inside, other=0.0)
            velocity = tl.fma(before, tl.full((BLOCK,), 0.0, tl.float32) + momentum, push)
        tl.store(new + start + at, velocity, mask=inside)
        value = velocity
        if NESTEROV:
            value = tl.fma(velocity, tl.full((BLOCK,), 0.0, tl.float32) + momentum, push)
        value = value * scale
        if HAS_FACTOR:
            value = value * tl.load(factor + start + at, mask=inside, other=0.0)
        if CUT:
            magnitude = tl.abs(value)
            limit = tl.where(value < 0.0, -cap, cap)
            value = tl.where((magnitude > cap) & (magnitude < float("inf")), limit, value)
    if ADD:
        value += tl.load(residual + start + at, mask=inside, other=0.0)
    if STORE:
        tl.store(out + start + at, value, mask=inside)
    reaches = (value.to(tl.int32, bitcast=True) & MAGNITUDE) >= floor
    word = tl.sum(tl.reshape(reaches.to(tl.int32) << (at % 32), (BLOCK // 32, 32)), 1)
    tl.store(words + start // 32 + tl.arange(0, BLOCK // 32), word)
    tl.store(counts + block, tl.sum(libdevice.popc(word), 0))


@triton.jit
def collect(numbers, words, ends, room, indices, values, facts, num_words, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The elements whose bits `look` set in GROUP blocks, to their places among all.

    To `facts` go their number over all blocks, and the largest one's bits.

    Every word gives one of its elements in each round: rounds are few, where elements are.
    """
    group = tl.program_id(0)
    at = group.to(tl.int64) * (GROUP * BLOCK // 32) + tl.arange(0, GROUP * BLOCK // 32)
    word = tl.load(words + at, mask=at < num_words, other=0)
    count = libdevice.popc(word)
    before = tl.load(ends + group * GROUP - 1, mask=group > 0, other=0)
    target = before + tl.cumsum(count, 0) - count
    largest = tl.zeros_like(word)
    rounds = tl.max(count, 0)
    for _ in range(rounds):
        lowest = word & -word
        index = at * 32 + libdevice.popc(lowest - 1)
        is_set = word != 0
        value = tl.load(numbers + index, mask=is_set, other=0.0)
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True) & MAGNITUDE)
        fits = is_set & (target < room)
        tl.store(indices + target, index, mask=fits)
        tl.store(values + target, value, mask=fits)
        word = word & (word - 1)
        target += 1
    tl.atomic_max(facts + 1, tl.max(largest, 0).to(tl.int64), sem="relaxed")
    if group == tl.num_programs(0) - 1:
        tl.store(facts, tl.load(ends + (num_words // (BLOCK // 32) - 1)))


@triton.jit
def count_digits(
    numbers, counts, state, n, SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Adds to `counts` the digits at SHIFT of the magnitudes whose higher bits are state[0]."""
    prefix = tl.load(state)
    total = tl.zeros((1 << BITS,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    for block in range(BLOCKS):
        at = first + block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(numbers + at, mask=at < n, other=0.0)
        bits = value.to(tl.int32, bitcast=True) & MAGNITUDE
        matches = (at < n) & ((bits >> SHIFT >> BITS) == prefix)
        total += tl.histogram((bits >> SHIFT) & ((1 << BITS) - 1), 1 << BITS, mask=matches)
    digit = tl.arange(0, 1 << BITS)
    tl.atomic_add(counts + digit, total, mask=total > 0, sem="relaxed")


@triton.jit
def pick_digit(counts, state, BITS: tl.constexpr):
    """state = (prefix, wanted): appends the digit of the `wanted`-th largest to the prefix, and says what remains."""
    digit = tl.arange(0, 1 << BITS)
    count = tl.load(counts + digit)
    prefix, wanted = tl.load(state), tl.load(state + 1)
    reached = tl.cumsum(count, 0, reverse=True)
    found = tl.sum((reached >= wanted).to(tl.int32), 0) - 1
    above = tl.sum(tl.where(digit > found, count, 0), 0)
    tl.store(state, (prefix << BITS) | found)
    tl.store(state + 1, wanted - above)


@triton.jit
def scatter(target, indices, values, count, SUBTRACT: tl.constexpr, BLOCK: tl.constexpr):
    """target[index] = value, or -= value; no index comes twice."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    place = target + tl.load(indices + at, mask=inside, other=0)
    value = tl.load(values + at, mask=inside, other=0.0)
    if SUBTRACT:
        value = tl.load(place, mask=inside, other=0.0) - value
    tl.store(place, value.to(target.dtype.element_ty), mask=inside)
