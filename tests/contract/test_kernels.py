"""The contract of oktopk.kernels.base.Kernels, for every implementation on every device there is.

The oracles are numpy and plain Python, written from the docstrings: all implementations must give their very bits.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.kernels.base import Kernels, Seen, UpdateRule, Velocity
from oktopk.kernels.by_device import DeviceKernels
from oktopk.kernels.torch_ops import TorchKernels, hash_words
from oktopk.registry import make_kernels
from oktopk.sparse_vector import SparseVector

LAW = settings(derandomize=True, deadline=None, max_examples=60)
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
SIZES = [0, 1, 63, 64, 65, 1000, 4097]
OFFSETS = [0, 1, 3, 16]  # in elements: 16 lie on a cache line again
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
UNTOUCHED = 77.0
DIGITS = {  # (shift, number of bits), highest first: how reducers and kernels look for a magnitude
    "cut": ((23, 8), (15, 8), (7, 8), (0, 7)),
    "radix": ((20, 11), (9, 11), (0, 9)),
}
WINDOWS = [(13, 256), (13, 1), (20, 3), (0, 5), (30, 2), (31, 1)]  # (shift, number of bins)


@dataclass(frozen=True)
class Place:
    kernels: Kernels
    device: torch.device

    @property
    def elsewhere(self) -> torch.device:
        """A home that is not the device."""
        return torch.device("cpu" if self.device.type == "cuda" else "meta")


PLACES = [("torch", "cpu"), ("numba", "cpu")]
if torch.cuda.is_available():
    PLACES += [("torch", "cuda"), ("triton", "cuda")]


@pytest.fixture(params=PLACES, ids="-".join, scope="module")
def place(request: pytest.FixtureRequest) -> Place:
    name, device = request.param[0], torch.device(request.param[1])
    return Place(make_kernels(name).on(device), device)


# --- inputs


def awkward(n: int, seed: int) -> np.ndarray:
    """Normal numbers beside both zeros, ties, denormals, and numbers near the largest."""
    rng = np.random.default_rng([seed, n])
    values = rng.normal(size=n).astype(np.float32)
    specials = np.array([0.0, -0.0, 1.0, -1.0, 0.5, SMALLEST, -3 * SMALLEST, 1e30, -LARGEST / 4], dtype=np.float32)
    chosen = rng.random(n) < 0.3
    values[chosen] = rng.choice(specials, size=int(chosen.sum()))
    return values


def put(values: np.ndarray, device: torch.device, offset: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """In the middle of a larger tensor."""
    whole = torch.full((offset + len(values) + 5,), UNTOUCHED, dtype=dtype)
    whole[offset : offset + len(values)] = torch.from_numpy(values.copy())
    return whole.to(device)[offset : offset + len(values)]


def around(part: torch.Tensor) -> list[float]:
    """What lies before and behind a part that `put` made."""
    whole = part._base
    assert whole is not None
    start = part.storage_offset()
    return torch.cat([whole[:start], whole[start + part.numel() :]]).tolist()


def as_fp32(tensor: torch.Tensor) -> np.ndarray:
    """A tensor of any float dtype as numpy sees it, without torch's own casts."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return (tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return tensor.numpy().astype(np.float32)


def bits(values: np.ndarray | torch.Tensor) -> list[int]:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values
    return np.ascontiguousarray(array).view(np.int32).tolist()


def as_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even, in fp32."""
    words = values.view(np.uint32).astype(np.uint64)
    words += 0x7FFF + (words >> 16 & 1)
    return (words >> 16 << 16).astype(np.uint32).view(np.float32)


def vector(indices: Sequence[int], values: np.ndarray, length: int, device: torch.device) -> SparseVector:
    return SparseVector(
        torch.tensor(list(indices), dtype=torch.int64, device=device),
        torch.from_numpy(np.array(values, dtype=np.float32)).to(device),
        length,
    )


# --- oracles


def reaching(values: np.ndarray, floor: float) -> list[int]:
    with np.errstate(over="ignore"):
        least = np.float32(floor)
    return [int(i) for i in np.flatnonzero((np.abs(values) >= least) & (values != 0))]


def kth(values: np.ndarray, k: int) -> float:
    return float(np.sort(np.abs(values))[::-1][k - 1])


def assert_holds(found: SparseVector | None, values: np.ndarray, indices: list[int], device: torch.device) -> None:
    assert found is not None
    assert found.length == len(values)
    assert (found.indices.dtype, found.values.dtype) == (torch.int64, torch.float32)
    assert (found.indices.device.type, found.values.device.type) == (device.type, device.type)
    assert found.indices.tolist() == indices
    assert bits(found.values) == bits(values[indices])


def assert_saw(seen: Seen, sums: np.ndarray, floor: float, room: int, device: torch.device) -> None:
    expected = reaching(sums, floor)
    assert seen.largest == (float(np.abs(sums[expected]).max()) if expected else 0.0)
    if len(expected) > room:
        assert seen.candidates is None
    else:
        assert_holds(seen.candidates, sums, expected, device)


# --- accumulate


def accumulate(
    place: Place,
    residual: torch.Tensor | None,
    gradient: torch.Tensor,
    floor: float,
    room: int,
    offset: int = 0,
    velocity: Velocity | None = None,
) -> tuple[Seen, torch.Tensor]:
    """Into a fresh `out`, with the promises that hold for any input checked."""
    out = put(np.full(gradient.numel(), -5.0, dtype=np.float32), place.device, offset)
    read = [tensor for tensor in (residual, gradient, velocity and velocity.old) if tensor is not None]
    before = [tensor.view(torch.uint8).tolist() for tensor in read]
    seen = place.kernels.accumulate(residual, gradient, out, floor, room, place.device, velocity)()
    assert set(around(out)) == {UNTOUCHED}
    assert [tensor.view(torch.uint8).tolist() for tensor in read] == before
    return seen, out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "no residual"])
def test_accumulate_adds_in_fp32_and_sees_what_reaches_the_floor(
    place: Place, dtype: torch.dtype, n: int, has_residual: bool
) -> None:
    raw = np.clip(awkward(n, 1), -6e4, 6e4) if dtype == torch.float16 else awkward(n, 1)
    owed = awkward(n, 2)
    for offset in OFFSETS:
        gradient = put(raw, place.device, offset, dtype)
        residual = put(owed, place.device, OFFSETS[-1] - offset) if has_residual else None
        sums = as_fp32(gradient) + owed if has_residual else as_fp32(gradient)
        floors = [math.inf, 0.0, SMALLEST, 2.5 * SMALLEST, 0.7, 1.0, *(abs(float(x)) for x in sums[:: n // 3 + 1])]
        for floor in floors:
            seen, out = accumulate(place, residual, gradient, floor, n, offset)
            assert bits(out) == bits(sums)
            assert_saw(seen, sums, floor, n, place.device)


@pytest.mark.parametrize("n", [64, 65, 1000])
@pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "no residual"])
def test_where_there_is_no_room_the_largest_is_still_right(place: Place, n: int, has_residual: bool) -> None:
    raw = awkward(n, 5)
    residual = put(np.full(n, 0.25, dtype=np.float32), place.device) if has_residual else None
    sums = raw + np.float32(0.25) if has_residual else raw
    count = len(reaching(sums, 0.5))
    assert count > 3
    for room in (0, 1, count - 1, count, count + 1, 10 * n):
        seen, out = accumulate(place, residual, put(raw, place.device), 0.5, room)
        assert bits(out) == bits(sums)
        assert_saw(seen, sums, 0.5, room, place.device)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf], ids=["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "no residual"])
@pytest.mark.parametrize("at", [0, 63, 64, 130])
def test_one_nan_or_inf_is_beyond_any_limit(place: Place, bad: float, has_residual: bool, at: int) -> None:
    raw = awkward(131, 6)
    raw[at] = bad
    residual = put(np.ones(131, dtype=np.float32), place.device) if has_residual else None
    for floor in (0.0, 1.0, LARGEST / 4, LARGEST, math.inf):
        for room in (0, 131):
            seen, out = accumulate(place, residual, put(raw, place.device), floor, room)
            assert not seen.largest <= LARGEST
            assert not math.isfinite(float(out[at]))


def test_an_overflow_and_what_only_the_sum_makes_a_nan_are_beyond_any_limit(place: Place) -> None:
    for owed, raw in ((LARGEST, LARGEST), (math.inf, -math.inf), (-LARGEST, -LARGEST / 2)):
        for n in (1, 64, 70):
            residual = put(np.full(n, owed, dtype=np.float32), place.device)
            seen, _ = accumulate(place, residual, put(np.full(n, raw, dtype=np.float32), place.device), 1.0, n)
            assert not seen.largest <= LARGEST


def test_nan_beside_inf_is_beyond_any_limit(place: Place) -> None:
    for order in ([math.nan, math.inf], [math.inf, math.nan]):
        raw = np.array([1.0, *order] * 40, dtype=np.float32)
        seen, _ = accumulate(place, None, put(raw, place.device), 1.0, 0)
        assert not seen.largest <= LARGEST


@pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "no residual"])
def test_candidates_are_put_on_their_home(place: Place, has_residual: bool) -> None:
    raw = awkward(200, 7)
    residual = put(np.zeros(200, dtype=np.float32), place.device) if has_residual else None
    out = torch.empty(200, device=place.device)
    seen = place.kernels.accumulate(residual, put(raw, place.device), out, 1.0, 200, place.elsewhere)()
    assert seen.candidates is not None
    assert len(seen.candidates) == len(reaching(raw, 1.0)) > 0
    assert {seen.candidates.indices.device.type, seen.candidates.values.device.type} == {place.elsewhere.type}
    if place.elsewhere.type == "cpu":
        assert_holds(seen.candidates, raw, reaching(raw, 1.0), place.elsewhere)
    assert seen.largest == float(np.abs(raw).max())
    assert out.device.type == place.device.type


def test_what_accumulate_found_owns_its_memory(place: Place) -> None:
    raw = awkward(100, 8)
    gradient, out = put(raw, place.device), torch.empty(100, device=place.device)
    seen = place.kernels.accumulate(None, gradient, out, 0.5, 100, place.device)()
    gradient.fill_(9.0)
    out.fill_(9.0)
    assert_holds(seen.candidates, raw, reaching(raw, 0.5), place.device)


@pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "no residual"])
def test_what_was_seen_is_that_of_its_own_pass(place: Place, has_residual: bool) -> None:
    """Whenever it is asked for, though other passes were begun meanwhile and what went in was changed."""
    raws = [awkward(300, seed) for seed in (20, 21, 22)]
    owed = awkward(300, 23)
    started = []
    for raw in raws:
        residual = put(owed, place.device) if has_residual else None
        gradient, out = put(raw, place.device), torch.empty(300, device=place.device)
        see = place.kernels.accumulate(residual, gradient, out, 0.5, 300, place.device)
        gradient.fill_(9.0)
        if residual is not None:
            residual.fill_(9.0)
        started.append((see, out))
    for raw, (see, out) in reversed(list(zip(raws, started, strict=True))):
        sums = owed + raw if has_residual else raw
        assert_saw(see(), sums, 0.5, 300, place.device)
        assert bits(out) == bits(sums)


NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, SMALLEST, -SMALLEST, 3 * SMALLEST, LARGEST / 4, -LARGEST / 4]),
    st.floats(width=32, min_value=-LARGEST / 4, max_value=LARGEST / 4),
    st.floats(width=32, min_value=-3.0, max_value=3.0),
)
FLOORS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, SMALLEST, 5e-324, 1e-46, LARGEST, 1e39, math.inf]),
    st.floats(min_value=0.0, max_value=4.0),
    st.floats(min_value=0.0, allow_infinity=False),
)


def arrays(least: int = 0, most: int = 140) -> st.SearchStrategy[np.ndarray]:
    return st.lists(NUMBERS, min_size=least, max_size=most).map(lambda values: np.array(values, dtype=np.float32))


@LAW
@given(data=st.data(), raw=arrays(), floor=FLOORS)
def test_accumulate_is_exact_for_any_input(place: Place, data: st.DataObject, raw: np.ndarray, floor: float) -> None:
    owed = data.draw(st.none() | arrays(len(raw), len(raw)))
    room = data.draw(st.integers(0, len(raw) + 1))
    residual = None if owed is None else put(owed, place.device, data.draw(st.integers(0, 17)))
    gradient = put(raw, place.device, data.draw(st.integers(0, 17)))
    sums = raw if owed is None else owed + raw
    seen, out = accumulate(place, residual, gradient, floor, room, data.draw(st.integers(0, 17)))
    assert bits(out) == bits(sums)
    assert_saw(seen, sums, floor, room, place.device)


# --- accumulate with a velocity


def fused(factor: float, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """factor * left + right of fp32 numbers, rounded once.

    The product of two of them is exact in fp64. Their sum is not: what it lost is kept in its last bit (rounded to
    odd), of which fp64 has far more than fp32, so that the last rounding goes where it would have gone.
    """
    with np.errstate(all="ignore"):
        product, other = np.float64(np.float32(factor)) * left.astype(np.float64), right.astype(np.float64)
        total = product + other
        back = total - product
        lost = (product - (total - back)) + (other - back)
        words = total.view(np.int64)
        even = np.isfinite(total) & (lost != 0) & (words & 1 == 0)
        words[even] += np.where((lost[even] > 0) == (total[even] > 0), 1, -1)
        return total.astype(np.float32)


def test_the_oracle_rounds_once() -> None:
    """Cases in which rounding the product first, or rounding to fp64 in between, gives another number."""
    for factor, left, right in ((0.9, 1.1, -0.99), (1.0 + 2.0**-12, 1.0 + 2.0**-12, -1.0), (0.5, 3.0, 2.0**-60)):
        numbers = [Fraction(float(np.float32(number))) for number in (factor, left, right)]
        exact = numbers[0] * numbers[1] + numbers[2]
        found = fused(factor, np.array([left], np.float32), np.array([right], np.float32))[0]
        near = [np.nextafter(found, np.float32(-np.inf)), found, np.nextafter(found, np.float32(np.inf))]
        assert min(near, key=lambda number: abs(Fraction(float(number)) - exact)) == found


def check_velocity(
    place: Place,
    old: np.ndarray | None,
    owed: np.ndarray | None,
    gradient: torch.Tensor,
    momentum: float,
    floor: float,
    offsets: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> None:
    n = gradient.numel()
    new = put(np.full(n, -5.0, dtype=np.float32), place.device, offsets[0])
    stored = None if old is None else put(old, place.device, offsets[1])
    residual = None if owed is None else put(owed, place.device, offsets[2])
    moved = as_fp32(gradient) if old is None else fused(momentum, old, as_fp32(gradient))
    with np.errstate(all="ignore"):
        sums = moved if owed is None else owed + moved
    for room in (n, 0):
        velocity = Velocity(stored, new, UpdateRule(momentum=momentum))
        seen, out = accumulate(place, residual, gradient, floor, room, offsets[3], velocity)
        assert bits(new) == bits(moved)
        assert set(around(new)) == {UNTOUCHED}
        assert bits(out) == bits(sums)
        assert_saw(seen, sums, floor, room, place.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [*SIZES, 127, 128, 129])
@pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "no residual"])
@pytest.mark.parametrize("has_moved", [True, False], ids=["old velocity", "no velocity yet"])
def test_a_velocity_is_rounded_once_and_takes_the_gradients_place(
    place: Place, dtype: torch.dtype, n: int, has_residual: bool, has_moved: bool
) -> None:
    raw = np.clip(awkward(n, 30), -6e4, 6e4) if dtype == torch.float16 else awkward(n, 30)
    owed, old = awkward(n, 31) if has_residual else None, awkward(n, 32) if has_moved else None
    for offset in OFFSETS:
        gradient = put(raw, place.device, offset, dtype)
        for offsets in ((0, 0, 0, 0), (offset, 16 - offset, 3, offset), (0, 1, 0, offset), (offset, 0, 1, 0)):
            check_velocity(place, old, owed, gradient, 0.9, 0.7, offsets)
    for momentum, floor in ((0.5, 0.0), (0.9, math.inf), (0.99, SMALLEST), (1e-30, 1.0), (0.0, 0.5)):
        check_velocity(place, old, owed, put(raw, place.device, 0, dtype), momentum, floor)


@LAW
@given(data=st.data(), raw=arrays(), floor=FLOORS)
def test_accumulate_with_a_velocity_is_exact_for_any_input(
    place: Place, data: st.DataObject, raw: np.ndarray, floor: float
) -> None:
    others = st.none() | arrays(len(raw), len(raw))
    offset = st.integers(0, 17)
    offsets = (data.draw(offset), data.draw(offset), data.draw(offset), data.draw(offset))
    gradient = put(raw, place.device, data.draw(offset))
    momentum = data.draw(st.sampled_from([0.9, 0.5, 0.99]) | st.floats(0.0, 1.0, exclude_max=True))
    check_velocity(place, data.draw(others), data.draw(others), gradient, momentum, floor, offsets)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("at", [0, 63, 64, 130])
@pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "no residual"])
@pytest.mark.parametrize("has_moved", [True, False], ids=["old velocity", "no velocity yet"])
def test_nan_and_inf_pass_through_a_velocity_to_be_found(
    place: Place, bad: float, at: int, has_residual: bool, has_moved: bool
) -> None:
    raw = awkward(131, 33)
    raw[at] = bad
    residual = put(np.ones(131, dtype=np.float32), place.device) if has_residual else None
    old = put(np.ones(131, dtype=np.float32), place.device) if has_moved else None
    for floor in (0.0, 1.0, LARGEST, math.inf):
        new = torch.empty(131, device=place.device)
        velocity = Velocity(old, new, UpdateRule(momentum=0.9))
        seen, out = accumulate(place, residual, put(raw, place.device), floor, 131, velocity=velocity)
        assert not seen.largest <= LARGEST
        assert not math.isfinite(float(new[at]))
        assert not math.isfinite(float(out[at]))
        assert int((~torch.isfinite(out)).sum()) == int((~torch.isfinite(new)).sum()) == 1


def test_a_velocity_that_overflows_is_found(place: Place) -> None:
    """What only the momentum makes infinite, and a NaN that only the sum makes."""
    for old, raw, owed in ((LARGEST, LARGEST, 0.0), (-LARGEST, -LARGEST / 2, 1.0), (math.inf, 1.0, -math.inf)):
        for n in (1, 64, 70):
            residual, stored, gradient = (put(np.full(n, x, np.float32), place.device) for x in (owed, old, raw))
            velocity = Velocity(stored, torch.empty(n, device=place.device), UpdateRule(momentum=0.9))
            seen, _ = accumulate(place, residual, gradient, 1.0, n, velocity=velocity)
            assert not seen.largest <= LARGEST


def changed(rule: UpdateRule, push: np.ndarray, velocity: np.ndarray, factor: np.ndarray | None) -> np.ndarray:
    """What a rule makes of a velocity, product by product."""
    with np.errstate(all="ignore"):
        change = fused(rule.momentum, velocity, push) if rule.nesterov else velocity
        change = change * np.float32(rule.scale)
        if factor is not None:
            change = change * factor
        too_large = np.isfinite(change) & (np.abs(change) > np.float32(rule.cap))
        return np.where(too_large, np.copysign(np.float32(rule.cap), change), change).astype(np.float32)


def check_rule(
    place: Place,
    rule: UpdateRule,
    raw: np.ndarray,
    old: np.ndarray | None,
    owed: np.ndarray | None,
    factor: np.ndarray | None,
    floor: float,
    offsets: tuple[int, ...] = (0, 0, 0, 0, 0),
    dtype: torch.dtype = torch.float32,
) -> None:
    n = len(raw)
    gradient = put(raw, place.device, offsets[0], dtype)
    new = put(np.full(n, -5.0, dtype=np.float32), place.device, offsets[1])
    stored = None if old is None else put(old, place.device, offsets[2])
    residual = None if owed is None else put(owed, place.device, offsets[3])
    with np.errstate(all="ignore"):
        push = as_fp32(gradient) * np.float32(rule.gain)
        moved = push if old is None else fused(rule.momentum, old, push)
        change = changed(rule, push, moved, factor)
        sums = change if owed is None else owed + change
    on_device = None if factor is None else put(factor, place.device, offsets[4])
    velocity = Velocity(stored, new, dataclasses.replace(rule, factor=on_device))
    seen, out = accumulate(place, residual, gradient, floor, n, offsets[3], velocity)
    assert bits(new) == bits(moved)
    assert set(around(new)) == {UNTOUCHED}
    if np.isfinite(sums).all():
        assert bits(out) == bits(sums)
        assert_saw(seen, sums, floor, n, place.device)
    else:  # NaN has more than one pattern
        assert (as_fp32(out) == sums).tolist() == (sums == sums).tolist()
        assert not seen.largest <= LARGEST


RULES = {
    "adam": UpdateRule(momentum=0.9, gain=0.1, scale=3e-3, cap=0.25),
    "adam, never cut": UpdateRule(momentum=0.9, gain=0.1, scale=3e-3),
    "sgd": UpdateRule(momentum=0.9, scale=0.1),
    "nesterov": UpdateRule(momentum=0.9, scale=0.1, nesterov=True),
    "ascent": UpdateRule(momentum=0.5, gain=-1.0, scale=0.3, cap=0.1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("has_factor", [True, False], ids=["factor", "no factor"])
@pytest.mark.parametrize("n", [1, 63, 64, 129, 300])
def test_a_rule_is_rounded_product_by_product(
    place: Place, dtype: torch.dtype, rule: UpdateRule, has_factor: bool, n: int
) -> None:
    raw = np.clip(awkward(n, 40), -6e4, 6e4) if dtype == torch.float16 else awkward(n, 40)
    factor = np.random.default_rng(43).lognormal(sigma=3.0, size=n).astype(np.float32) if has_factor else None
    for old in (awkward(n, 41), None):
        for owed in (awkward(n, 42), None):
            for offsets in ((0, 0, 0, 0, 0), (3, 1, 5, 0, 16), (0, 0, 1, 0, 1)):
                check_rule(place, rule, raw, old, owed, factor, 0.05, offsets, dtype)


@LAW
@given(data=st.data(), raw=arrays(), floor=FLOORS)
def test_a_rule_is_exact_for_any_input(place: Place, data: st.DataObject, raw: np.ndarray, floor: float) -> None:
    others = arrays(len(raw), len(raw))
    number = st.floats(-4.0, 4.0, width=32)
    rule = UpdateRule(
        momentum=data.draw(st.floats(0.0, 1.0, exclude_max=True)),
        gain=data.draw(number),
        scale=data.draw(number),
        nesterov=data.draw(st.booleans()),
        cap=data.draw(st.sampled_from([math.inf, 1.0]) | st.floats(2.0**-10, 2.0**90, width=32)),
    )
    maybe = st.none() | others
    check_rule(place, rule, raw, data.draw(maybe), data.draw(maybe), data.draw(maybe), floor)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("at", [0, 63, 64, 130])
def test_a_cap_lets_nan_and_inf_pass_to_be_found(place: Place, bad: float, at: int) -> None:
    raw, ones = awkward(131, 44), put(np.ones(131, dtype=np.float32), place.device)
    raw[at] = bad
    new = torch.empty(131, device=place.device)
    velocity = Velocity(ones, new, UpdateRule(momentum=0.9, gain=0.1, factor=ones, cap=0.5))
    seen, out = accumulate(place, ones, put(raw, place.device), math.inf, 131, velocity=velocity)
    assert not seen.largest <= LARGEST
    assert (~torch.isfinite(out)).nonzero().flatten().tolist() == [at]
    assert float(out[torch.isfinite(out)].abs().max()) <= 1.5


# --- above, kth_magnitude, histogram


@LAW
@given(data=st.data(), values=arrays(), floor=FLOORS)
def test_above_is_exact_for_any_input(place: Place, data: st.DataObject, values: np.ndarray, floor: float) -> None:
    if len(values) and data.draw(st.booleans()):
        floor = abs(float(data.draw(st.sampled_from(values.tolist()))))
    given_values = put(values, place.device, data.draw(st.integers(0, 17)))
    expected = reaching(values, floor)
    for room in {0, len(expected) - 1, len(expected), len(values)} - {-1}:
        found = place.kernels.above(given_values, floor, room)
        if len(expected) > room:
            assert found is None
        else:
            assert_holds(found, values, expected, place.device)
    assert bits(given_values) == bits(values)


@pytest.mark.parametrize("n", SIZES)
def test_above_finds_in_every_place_of_every_size(place: Place, n: int) -> None:
    values = awkward(n, 9)
    for offset in OFFSETS:
        for floor in (0.0, 0.5, 1.0, 1e29, math.inf):
            found = place.kernels.above(put(values, place.device, offset), floor, n)
            assert_holds(found, values, reaching(values, floor), place.device)


def test_what_above_found_owns_its_memory(place: Place) -> None:
    values = awkward(100, 10)
    source = put(values, place.device)
    for floor in (0.0, 0.5):
        found = place.kernels.above(source, floor, 100)
        source.fill_(9.0)
        assert_holds(found, values, reaching(values, floor), place.device)
        source.copy_(put(values, place.device))


@LAW
@given(values=arrays(least=1, most=50), offset=st.integers(0, 17))
def test_kth_magnitude_is_exact_for_every_k(place: Place, values: np.ndarray, offset: int) -> None:
    source = put(values, place.device, offset)
    for k in range(1, len(values) + 1):
        assert place.kernels.kth_magnitude(source, k) == kth(values, k)


@pytest.mark.parametrize(
    "values",
    [
        awkward(4097, 11),
        np.round(np.random.default_rng(12).normal(size=5000) * 2).astype(np.float32),
        np.full(1000, -0.1, dtype=np.float32),
        np.zeros(1000, dtype=np.float32),
        np.arange(3000, dtype=np.int32).view(np.float32),  # denormals, one for each of the lowest bits
        (np.float32(1.0).view(np.int32) + np.arange(3000, dtype=np.int32)).view(np.float32),
        np.array([LARGEST, -LARGEST, SMALLEST], dtype=np.float32),
    ],
    ids=["awkward", "ties", "all tied", "zeros", "denormals", "neighbours", "extremes"],
)
def test_kth_magnitude_is_exact_among_many(place: Place, values: np.ndarray) -> None:
    n = len(values)
    for k in sorted({1, 2, 3, n // 3 + 1, n // 2 + 1, n - 1, n}):
        assert place.kernels.kth_magnitude(put(values, place.device, 1), k) == kth(values, k)


def counted(values: np.ndarray, first: int, shift: int, num_bins: int) -> list[int]:
    counts = [0] * num_bins
    for word in values.view(np.int32).tolist():
        place = ((word & 0x7FFFFFFF) >> shift) - first
        if place >= 0:
            counts[min(place, num_bins - 1)] += 1
    return counts


def check_histogram(place: Place, values: np.ndarray, first: int, shift: int, num_bins: int) -> list[int]:
    source = put(values, place.device, 3)
    counts = place.kernels.histogram(source, first, shift, num_bins)
    assert (counts.dtype, counts.device.type, counts.shape) == (torch.int64, place.device.type, (num_bins,))
    assert counts.tolist() == counted(values, first, shift, num_bins)
    assert bits(source) == bits(values)
    return counts.tolist()


@pytest.mark.parametrize("n", SIZES)
def test_histogram_counts_magnitudes_in_bins_and_beyond(place: Place, n: int) -> None:
    """Digits below the prefix of some magnitude, and windows around some, before all and behind all."""
    values = awkward(n, 13)
    magnitudes = sorted({int(m) & 0x7FFFFFFF for m in values.view(np.int32)})
    some = [*magnitudes[:: len(magnitudes) // 3 + 1], magnitudes[-1]] if magnitudes else [0]
    for shift, num_bits in DIGITS["cut"] + DIGITS["radix"]:
        for magnitude in some:
            check_histogram(place, values, magnitude >> shift + num_bits << num_bits, shift, 1 << num_bits)
    for shift, num_bins in WINDOWS:
        for magnitude in some:
            around_it = (magnitude >> shift) - num_bins // 2
            for first in {max(0, around_it), magnitude >> shift, (magnitude >> shift) + 1, 0, 0x7FFFFFFF >> shift}:
                check_histogram(place, values, first, shift, num_bins)


@LAW
@given(values=arrays(least=1), rank=st.integers(1, 140), digits=st.sampled_from(list(DIGITS.values())))
def test_histograms_lead_digit_by_digit_to_the_kth_magnitude(
    place: Place, values: np.ndarray, rank: int, digits: tuple[tuple[int, int], ...]
) -> None:
    """All that is not before the first bin is counted, once."""
    k = min(rank, len(values))
    first = 0
    for shift, num_bits in digits:
        first <<= num_bits
        counts = check_histogram(place, values, first, shift, 1 << num_bits)
        assert sum(counts) == sum((word & 0x7FFFFFFF) >> shift >= first for word in values.view(np.int32).tolist())
        first += max(digit for digit in range(len(counts)) if sum(counts[digit:]) >= k)
    assert float(np.int32(first).view(np.float32)) == kth(values, k)


# --- sparse vectors


@st.composite
def sparse(draw: st.DrawFn, length: int, most: int = 20) -> tuple[list[int], np.ndarray]:
    indices = sorted(draw(st.sets(st.integers(0, length - 1), max_size=most)))
    values = draw(st.lists(NUMBERS.filter(bool), min_size=len(indices), max_size=len(indices)))
    return indices, np.array(values, dtype=np.float32)


def summed(parts: Sequence[tuple[Sequence[int], np.ndarray]]) -> tuple[list[int], np.ndarray]:
    total: dict[int, np.float32] = {}
    for indices, values in parts:
        for index, value in zip(indices, values, strict=True):
            total[index] = total[index] + value if index in total else value
    indices = sorted(total)
    return indices, np.array([total[index] for index in indices], dtype=np.float32)


def assert_is(found: SparseVector, indices: Sequence[int], values: np.ndarray, length: int) -> None:
    assert found.length == length
    assert (found.indices.dtype, found.values.dtype) == (torch.int64, torch.float32)
    assert found.indices.tolist() == list(indices)
    assert bits(found.values) == bits(values)


@LAW
@given(data=st.data(), length=st.sampled_from([1, 5, 30, 2**40]))
def test_sum_adds_in_the_order_given(place: Place, data: st.DataObject, length: int) -> None:
    parts = data.draw(st.lists(sparse(length), min_size=1, max_size=6))
    found = place.kernels.sum([vector(*part, length, place.device) for part in parts])
    assert_is(found, *summed(parts), length)


def test_sum_of_many_rounds_like_additions_one_after_the_other(place: Place) -> None:
    """Of numbers whose sum depends on the order, with empty vectors between; the order back gives other bits."""
    rng = np.random.default_rng(14)
    parts: list[tuple[list[int], np.ndarray]] = []
    for number in range(40):
        indices = [] if number % 7 == 0 else sorted(rng.permutation(3000)[:1000].tolist())
        parts.append((indices, (rng.normal(size=len(indices)) * 10.0 ** rng.integers(-4, 4)).astype(np.float32)))
    for ordered in (parts, parts[::-1]):
        found = place.kernels.sum([vector(*part, 3000, place.device) for part in ordered])
        assert_is(found, *summed(ordered), 3000)
    assert bits(summed(parts)[1]) != bits(summed(parts[::-1])[1])


def test_sum_of_nothing_is_nothing(place: Place) -> None:
    nothing = SparseVector.empty(9, place.device)
    for count in (1, 2, 5):
        assert_is(place.kernels.sum([nothing] * count), [], np.zeros(0, dtype=np.float32), 9)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sum_does_not_touch_its_vectors_and_owns_its_result(place: Place, count: int) -> None:
    parts = [([1, 4, 5], np.array([1.0, 2.0, 3.0], dtype=np.float32)), *[([], np.zeros(0, np.float32))] * (count - 1)]
    vectors = [vector(*part, 9, place.device) for part in parts]
    found = place.kernels.sum(vectors)
    for given_vector, part in zip(vectors, parts, strict=True):
        assert_is(given_vector, *part, 9)
    vectors[0].values.fill_(9.0)
    vectors[0].indices.fill_(9)
    assert_is(found, *parts[0], 9)


def test_a_negative_zero_comes_out_of_a_sum_with_the_same_sign_everywhere(place: Place) -> None:
    """Values may round to it on the wire."""
    zeros = ([1, 3], np.array([-0.0, 0.0], dtype=np.float32))
    others = [([1], np.array([-0.0], dtype=np.float32)), ([3], np.array([-0.0], dtype=np.float32)), ([2], zeros[1][1:])]
    reference = TorchKernels()
    for parts in ([zeros], [zeros, others[0]], [zeros, others[1]], [zeros, others[2]], [others[2], zeros]):
        vectors = [vector(*part, 9, place.device) for part in parts]
        assert bits(place.kernels.sum(vectors).values) == bits(reference.sum(vectors).values)


def test_equal_numbers_of_opposite_sign_sum_to_an_element_that_is_zero(place: Place) -> None:
    parts = [([2, 4], np.array([1.5, 1.0], dtype=np.float32)), ([2], np.array([-1.5], dtype=np.float32))]
    found = place.kernels.sum([vector(*part, 9, place.device) for part in parts])
    assert_is(found, [2, 4], np.array([0.0, 1.0], dtype=np.float32), 9)


@LAW
@given(data=st.data(), length=st.sampled_from([1, 5, 30, 2**40]))
def test_restrict_keeps_what_both_have(place: Place, data: st.DataObject, length: int) -> None:
    indices, values = data.draw(sparse(length))
    fresh = st.sets(st.integers(0, length - 1), max_size=20)
    allowed = sorted(data.draw(fresh) | data.draw(st.sets(st.sampled_from(indices)) if indices else fresh))
    given_vector = vector(indices, values, length, place.device)
    wanted = torch.tensor(allowed, dtype=torch.int64, device=place.device)
    kept = [position for position, index in enumerate(indices) if index in set(allowed)]
    found = place.kernels.restrict(given_vector, wanted)
    assert_is(found, [indices[position] for position in kept], values[kept], length)
    assert_is(given_vector, indices, values, length)
    assert wanted.tolist() == allowed


def test_restrict_where_one_side_is_empty_or_the_same(place: Place) -> None:
    some = vector([0, 3, 8], np.array([1.0, -2.0, 3.0], dtype=np.float32), 9, place.device)
    nothing = SparseVector.empty(9, place.device)
    for left, right in ((some, nothing), (nothing, some), (nothing, nothing)):
        assert_is(place.kernels.restrict(left, right.indices), [], np.zeros(0, dtype=np.float32), 9)
    found = place.kernels.restrict(some, some.indices)
    some.values.fill_(9.0)
    assert_is(found, [0, 3, 8], np.array([1.0, -2.0, 3.0], dtype=np.float32), 9)


def expected_in(dtype: torch.dtype, values: np.ndarray) -> np.ndarray:
    if dtype == torch.bfloat16:
        return as_bf16(values)
    return values.astype(np.float16).astype(np.float32) if dtype == torch.float16 else values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 500, 3000])
def test_write_makes_the_target_the_vector_in_its_own_dtype(place: Place, dtype: torch.dtype, count: int) -> None:
    rng = np.random.default_rng(15)
    indices = np.sort(rng.permutation(3000)[:count])
    values = rng.normal(size=count).astype(np.float32)
    values[: count // 2] = 1.0 + 2.0**-8  # half way between two bf16
    expected = np.zeros(3000, dtype=np.float32)
    expected[indices] = expected_in(dtype, values)
    for offset in OFFSETS:
        target = put(rng.normal(size=3000).astype(np.float32), place.device, offset, dtype)
        taken = vector(indices.tolist(), values, 3000, place.device)
        place.kernels.write(target, taken)
        assert bits(as_fp32(target)) == bits(expected)
        assert set(around(target)) == {UNTOUCHED}
        assert_is(taken, indices.tolist(), values, 3000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.0])
def test_write_leaves_nothing_of_what_was_there(place: Place, dtype: torch.dtype, bad: float) -> None:
    target = put(np.full(70, bad, dtype=np.float32), place.device, 1, dtype)
    place.kernels.write(target, vector([3, 69], np.array([1.0, 2.0], dtype=np.float32), 70, place.device))
    assert bits(as_fp32(target)) == bits(np.array([0, 0, 0, 1, *[0] * 65, 2], dtype=np.float32))
    place.kernels.write(target, SparseVector.empty(70, place.device))
    assert bits(as_fp32(target)) == [0] * 70
    place.kernels.write(target[:0], SparseVector.empty(0, place.device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_write_takes_values_that_are_already_of_the_dtype(place: Place, dtype: torch.dtype) -> None:
    """That is how a mean is written: see oktopk.feedback.residual.write_mean."""
    values = torch.tensor([1.5, -2.25, 0.1]).to(dtype)
    target = torch.ones(6, dtype=dtype, device=place.device)
    narrow = SparseVector(torch.tensor([0, 2, 5], device=place.device), values.to(place.device), 6)
    place.kernels.write(target, narrow)
    assert target.cpu().tolist() == [values[0].item(), 0.0, values[1].item(), 0.0, 0.0, values[2].item()]


@pytest.mark.parametrize("count", [0, 1, 64, 3000])
def test_subtract_takes_away_at_the_indices_alone(place: Place, count: int) -> None:
    rng = np.random.default_rng(16)
    indices = np.sort(rng.permutation(3000)[:count])
    values, base = rng.normal(size=count).astype(np.float32), rng.normal(size=3000).astype(np.float32)
    values[: count // 4] = base[indices[: count // 4]]  # leaves zero
    expected = base.copy()
    expected[indices] = base[indices] - values
    for offset in OFFSETS:
        target = put(base, place.device, offset)
        taken = vector(indices.tolist(), values, 3000, place.device)
        place.kernels.subtract(target, taken)
        assert bits(target) == bits(expected)
        assert set(around(target)) == {UNTOUCHED}
        assert_is(taken, indices.tolist(), values, 3000)


# --- gaps


def encoded_by_hand(indices: Sequence[int], width: int) -> bytes:
    """How many elements are left out before each index, in digits, as oktopk.wire describes it."""
    most, following, digits = 256**width - 1, 0, []
    for index in indices:
        gap = index - following
        digits += [most] * (gap // most) + [gap % most]
        following = index + 1
    return b"".join(digit.to_bytes(width, "little") for digit in digits)


def after_gaps(gaps: Sequence[int]) -> list[int]:
    return (np.cumsum(np.array(gaps, dtype=np.int64) + 1) - 1).tolist()


AT_THE_EDGES = [0, 1, 253, 254, 255, 256, 257, 509, 510, 511, 764, 765, 766]
AT_THE_WIDE_EDGES = [65533, 65534, 65535, 65536, 131069, 131070, 131071]


def check_gaps(place: Place, indices: list[int], width: int) -> torch.Tensor:
    given_indices = torch.tensor(indices, dtype=torch.int64, device=place.device)
    encoded = place.kernels.encode_gaps(given_indices, width)
    assert (encoded.dtype, encoded.dim(), encoded.device.type) == (torch.uint8, 1, place.device.type)
    assert bytes(encoded.tolist()) == encoded_by_hand(indices, width)
    assert given_indices.tolist() == indices
    decoded = place.kernels.decode_gaps(encoded, width, len(indices))
    assert decoded is not None
    assert (decoded.dtype, decoded.device.type) == (torch.int64, place.device.type)
    assert decoded.tolist() == indices
    return encoded


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("gap", AT_THE_EDGES + AT_THE_WIDE_EDGES)
def test_gaps_at_the_edges_of_a_digit_come_back(place: Place, gap: int, width: int) -> None:
    for gaps in ([gap], [0, gap], [gap, 0], [gap, gap], [3, gap, 7, gap]):
        check_gaps(place, after_gaps(gaps), width)


@pytest.mark.parametrize("width", [1, 2])
def test_no_index_is_no_byte(place: Place, width: int) -> None:
    assert check_gaps(place, [], width).numel() == 0
    assert place.kernels.decode_gaps(torch.empty(0, dtype=torch.uint8, device=place.device), width, 1) is None


@LAW
@given(
    gaps=st.lists(st.one_of(st.integers(0, 3), st.sampled_from(AT_THE_EDGES), st.integers(0, 70_000)), max_size=30),
    width=st.sampled_from([1, 2]),
)
def test_any_gaps_come_back(place: Place, gaps: list[int], width: int) -> None:
    indices = after_gaps(gaps)
    encoded = check_gaps(place, indices, width)
    for count in {0, len(indices) - 1, len(indices) + 1, 2 * len(indices) + 1} - {-1, len(indices)}:
        assert place.kernels.decode_gaps(encoded, width, count) is None


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("indices", [[], [0], [3, 700, 70_000]], ids=str)
def test_a_gap_that_does_not_end_is_refused_whatever_the_count(place: Place, indices: list[int], width: int) -> None:
    for escapes in (1, 2, 5):
        raw = encoded_by_hand(indices, width) + b"\xff" * (width * escapes)
        encoded = torch.tensor(list(raw), dtype=torch.uint8, device=place.device)
        for count in range(len(indices) + 3):
            assert place.kernels.decode_gaps(encoded, width, count) is None


@LAW
@given(data=st.data(), width=st.sampled_from([1, 2]))
def test_any_bytes_are_decoded_as_described_or_refused(place: Place, data: st.DataObject, width: int) -> None:
    digit = st.one_of(st.just(256**width - 1), st.integers(0, 256**width - 1), st.integers(0, 3))
    digits = data.draw(st.lists(digit, max_size=20))
    gaps, open_gap = list[int](), 0
    for value in digits:
        open_gap += value
        if value != 256**width - 1:
            gaps.append(open_gap)
            open_gap = 0
    ends_whole = not digits or digits[-1] != 256**width - 1
    raw = b"".join(value.to_bytes(width, "little") for value in digits)
    encoded = torch.tensor(list(raw), dtype=torch.uint8, device=place.device)
    for count in range(len(gaps) + 2):
        found = place.kernels.decode_gaps(encoded, width, count)
        if count == len(gaps) and ends_whole:
            assert found is not None
            assert found.tolist() == after_gaps(gaps)
        else:
            assert found is None


@pytest.mark.parametrize("width", [1, 2])
def test_many_random_indices_come_back(place: Place, width: int) -> None:
    rng = np.random.default_rng(17)
    for n, count in ((100_000, 1000), (5_000_000, 300), (400, 399)):
        check_gaps(place, np.sort(rng.permutation(n)[:count]).tolist(), width)


def test_decoded_indices_own_their_memory(place: Place) -> None:
    encoded = place.kernels.encode_gaps(torch.tensor([3, 9], device=place.device), 1)
    found = place.kernels.decode_gaps(encoded, 1, 2)
    encoded.fill_(0)
    assert found is not None
    assert found.tolist() == [3, 9]


# --- the hash


def hashed(words: np.ndarray) -> int:
    position = np.arange(len(words), dtype=np.uint64)
    weights = position * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    return int((words.astype(np.int64).view(np.uint64) * weights).sum(dtype=np.uint64).view(np.int64))


@pytest.mark.parametrize("dtype", [np.int32, np.int16, np.int64], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("n", [0, 1, 2, 63, 1000, 4097])
def test_hash_words_is_that_of_the_types(place: Place, n: int, dtype: type) -> None:
    limits = np.iinfo(dtype)
    words = np.random.default_rng([18, n]).integers(limits.min, limits.max, size=n, dtype=dtype, endpoint=True)
    for offset in (0, 1):
        given_words = torch.from_numpy(np.concatenate([np.zeros(offset, dtype), words])).to(place.device)[offset:]
        found = place.kernels.hash_words(given_words)
        assert type(found) is int
        assert found == hashed(words) == int(hash_words(torch.from_numpy(words)))


def test_hash_words_of_more_than_one_block(place: Place) -> None:
    words = np.random.default_rng(19).integers(-(2**31), 2**31, size=(1 << 22) + 5).astype(np.int32)
    assert place.kernels.hash_words(torch.from_numpy(words).to(place.device)) == hashed(words)


# --- who works on which device


def on_cpu(name: str) -> Kernels:
    return make_kernels(name).on(torch.device("cpu"))


def test_on_a_cpu_numba_does_the_work_unless_told_otherwise() -> None:
    from oktopk.kernels.numba_ops import NumbaKernels

    assert [type(on_cpu(name)) for name in ("auto", "numba")] == [NumbaKernels] * 2
    assert [type(on_cpu(name)) for name in ("torch", "triton")] == [TorchKernels] * 2


def test_kernels_are_made_once_and_when_they_are_asked_for() -> None:
    made = []

    def make() -> Kernels:
        made.append(1)
        return TorchKernels()

    kernels = DeviceKernels({"cpu": make})
    assert not made
    assert kernels.on(torch.device("cpu")) is kernels.on(torch.device("cpu"))
    assert type(kernels.on(torch.device("meta"))) is TorchKernels
    assert len(made) == 1


def test_without_numba_plain_torch_does_the_work_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "oktopk.kernels.numba_ops", None)
    with caplog.at_level(logging.WARNING, logger="oktopk"):
        kernels = make_kernels("auto")
        assert not caplog.records
        for _ in range(2):
            assert type(kernels.on(torch.device("cpu"))) is TorchKernels
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "plain torch" in caplog.text
    with pytest.raises(ImportError):
        on_cpu("numba")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: the kernels ran on the CPU alone")
def test_the_suite_ran_on_cuda_too() -> None:
    assert ("triton", "cuda") in PLACES
