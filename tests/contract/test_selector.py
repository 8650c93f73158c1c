"""The contract of oktopk.select.base.Selector, for all kernels on every device there is.

The oracle of exact selection is a stable argsort of -|x| in numpy: it knows nothing of thresholds. Whatever a reducer
may ask is also compared with the reference selector, which looks at all elements and remembers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.bucket import Layout
from oktopk.checks.finite import largest_safe
from oktopk.kernels.base import Kernels, Seen
from oktopk.kernels.by_device import DeviceKernels
from oktopk.registry import make_kernels
from oktopk.select import Accumulated, exact
from oktopk.select.base import Selector
from oktopk.select.bucket_selector import BucketSelector
from oktopk.sparse_vector import SparseVector
from tests.contract.reference_selector import ReferenceSelector
from tests.gradients import Synthetic

CPU = torch.device("cpu")
NAMES = ["torch", "numba"]
PLACES = [(name, "cpu") for name in NAMES]
if torch.cuda.is_available():
    PLACES += [("torch", "cuda"), ("triton", "cuda")]
LAW = settings(derandomize=True, deadline=None, max_examples=80)
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)

FINITE = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, SMALLEST, -SMALLEST, 3 * SMALLEST, LARGEST, -LARGEST]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(width=32, min_value=-3.0, max_value=3.0),
)
ARRAYS = st.lists(FINITE, min_size=1, max_size=40).map(lambda values: np.array(values, dtype=np.float32))


@dataclass(frozen=True)
class Place:
    """Asked with tensors of which no pass has seen anything, in three ways: the plain functions over some kernels, a
    bucket's selector, and the reference itself, which must be right too."""

    kernels: Kernels
    selector: Selector
    device: torch.device

    def above(self, acc: torch.Tensor, threshold: float) -> SparseVector:
        found = exact.above(self.kernels, acc, threshold)
        same(self.selector.above(Accumulated(acc), threshold), found)
        same(ReferenceSelector().above(Accumulated(acc), threshold), found)
        return found

    def top_k(self, acc: torch.Tensor, k: int) -> SparseVector:
        found = exact.top_k(self.kernels, acc, k)
        same(self.selector.top_k(Accumulated(acc), k), found)
        same(ReferenceSelector().top_k(Accumulated(acc), k), found)
        assert self.selector.largest(acc, k).tolist() == found.indices.tolist()
        return found

    def normal_threshold(self, acc: torch.Tensor, k: int) -> float:
        threshold = exact.normal_threshold(acc, k)
        assert self.selector.normal_threshold(Accumulated(acc), k) == threshold
        assert ReferenceSelector().normal_threshold(Accumulated(acc), k) == threshold
        return threshold


def same(found: SparseVector, expected: SparseVector) -> None:
    assert found.length == expected.length
    assert found.indices.tolist() == expected.indices.tolist()
    assert found.values.view(torch.int32).tolist() == expected.values.view(torch.int32).tolist()


@pytest.fixture(params=PLACES, ids="-".join, scope="module")
def place(request: pytest.FixtureRequest) -> Place:
    kernels, device = make_kernels(request.param[0]), torch.device(request.param[1])
    return Place(kernels.on(device), BucketSelector(kernels, device, device), device)


def normal(n: int, seed: int, scale: float = 1.0, mean: float = 0.0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=n)
    return ((values + mean) * scale).astype(np.float32)


def heavy_tails(n: int, seed: int, freedom: float = 1.5) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(freedom, size=n).astype(np.float32)


def mixed_scales(n: int, seed: int) -> np.ndarray:
    return (normal(n, seed) * 10.0 ** np.random.default_rng(seed).integers(-40, 37, size=n)).astype(np.float32)


def ties(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-3, 4, size=n).astype(np.float32)


def few_nonzeros(n: int, seed: int) -> np.ndarray:
    values = normal(n, seed)
    values[np.random.default_rng(seed + 1).permutation(n)[5:]] = 0.0
    return values


def one_hot(n: int, at: int, value: float) -> np.ndarray:
    values = np.zeros(n, dtype=np.float32)
    values[at] = value
    return values


CASES: dict[str, np.ndarray] = {
    "normal": normal(1000, 1),
    "normal with mean": normal(1000, 2, mean=0.5),
    "tiny scale": normal(1000, 3, scale=1e-30),
    "denormal scale": normal(1000, 4, scale=1e-40),
    "huge scale": normal(1000, 5, scale=5e37),
    "mixed scales": mixed_scales(1000, 6),
    "heavy tails": heavy_tails(1000, 7),
    "very heavy tails": heavy_tails(1000, 8, freedom=0.5),
    "ties": ties(1000, 9),
    "few non-zeros": few_nonzeros(1000, 10),
    "all tied": np.full(1000, -0.25, dtype=np.float32),
    "all tied, both signs": np.where(np.arange(1000) % 3 == 0, 0.1, -0.1).astype(np.float32),
    "zeros": np.zeros(1000, dtype=np.float32),
    "signed zeros": np.where(np.arange(1000) % 2 == 0, 0.0, -0.0).astype(np.float32),
    "one-hot": one_hot(1000, 777, -3.0),
    "one-hot denormal": one_hot(1000, 999, SMALLEST),
    "one-hot largest": one_hot(1000, 0, LARGEST),
    "smallest denormals": (np.arange(1000) % 5).astype(np.float32) * np.float32(SMALLEST),
    "largest": np.full(1000, LARGEST, dtype=np.float32),
    "one element": np.array([-2.0], dtype=np.float32),
    "one zero": np.array([0.0], dtype=np.float32),
    "two tied": np.array([1.0, -1.0], dtype=np.float32),
    "nothing": np.zeros(0, dtype=np.float32),
}
KS = [1, 2, 7, 100, 999, 1000, 1001, 5000]

each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES)


def put(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(device)


def oracle_top_k(values: np.ndarray, k: int) -> list[int]:
    order = np.argsort(-np.abs(values), kind="stable")[:k]
    return sorted(int(i) for i in order if values[i] != 0)


def oracle_kth(values: np.ndarray, k: int) -> float:
    order = np.argsort(-np.abs(values), kind="stable")
    return abs(float(values[order[k - 1]])) if k <= len(values) else 0.0


def oracle_above(values: np.ndarray, threshold: float) -> list[int]:
    """For thresholds that fp32 holds exactly."""
    return [i for i, value in enumerate(values.tolist()) if value != 0.0 and abs(value) >= threshold]


def assert_holds(found: SparseVector, values: np.ndarray, indices: list[int], device: torch.device) -> None:
    assert found.length == len(values)
    assert (found.indices.dtype, found.values.dtype) == (torch.int64, torch.float32)
    assert (found.indices.device.type, found.values.device.type) == (device.type, device.type)
    assert found.indices.tolist() == indices
    assert found.values.cpu().numpy().view(np.int32).tolist() == values[indices].view(np.int32).tolist()


# --- exact selection


@each_case
def test_top_k_is_exact_and_lower_indices_win_ties(place: Place, values: np.ndarray) -> None:
    for k in KS:
        assert_holds(place.top_k(put(values, place.device), k), values, oracle_top_k(values, k), place.device)


@each_case
def test_above_takes_all_ties_and_no_zero(place: Place, values: np.ndarray) -> None:
    thresholds = {0.0, SMALLEST, float(np.float32(0.1)), LARGEST, *(oracle_kth(values, k) for k in KS)}
    for threshold in thresholds:
        expected = oracle_above(values, threshold)
        assert_holds(place.above(put(values, place.device), threshold), values, expected, place.device)


@LAW
@given(values=ARRAYS, k=st.integers(1, 50))
def test_top_k_is_exact_for_any_input(place: Place, values: np.ndarray, k: int) -> None:
    acc = put(values, place.device)
    assert_holds(place.top_k(acc, k), values, oracle_top_k(values, k), place.device)


@LAW
@given(data=st.data(), values=ARRAYS)
def test_above_is_exact_for_any_input(place: Place, data: st.DataObject, values: np.ndarray) -> None:
    present = st.sampled_from([abs(value) for value in values.tolist()])
    threshold = data.draw(st.one_of(present, st.floats(width=32, min_value=0.0, max_value=LARGEST)))
    assert_holds(
        place.above(put(values, place.device), threshold), values, oracle_above(values, threshold), place.device
    )


@pytest.mark.parametrize("threshold", [1e-46, 1e-50, 1e-300, 5e-324])
def test_above_never_takes_a_zero_where_fp32_rounds_the_threshold_to_zero(place: Place, threshold: float) -> None:
    values = np.array([0.0, SMALLEST, -0.0, 2.0], dtype=np.float32)
    assert_holds(place.above(put(values, place.device), threshold), values, [1, 3], place.device)


@pytest.mark.parametrize("threshold", [1e39, 1e300, math.inf])
def test_above_takes_nothing_where_the_threshold_is_beyond_fp32(place: Place, threshold: float) -> None:
    values = np.array([0.0, LARGEST, -LARGEST], dtype=np.float32)
    assert_holds(place.above(put(values, place.device), threshold), values, [], place.device)


def test_top_k_is_exact_in_a_large_input_with_a_tie_at_the_cut(place: Place) -> None:
    values = np.round(normal(200_000, 11) * 50).astype(np.float32)
    for k in (1, 2000, 150_000):
        assert_holds(place.top_k(put(values, place.device), k), values, oracle_top_k(values, k), place.device)


@pytest.mark.parametrize("k", [2048, 3000, 61 * 1024, 100_000])
@pytest.mark.parametrize("period", [2, 59, 61, 1024])
@pytest.mark.parametrize("often", [True, False], ids=["large where sampled", "small where sampled"])
def test_top_k_is_exact_where_every_so_manieth_element_is_unlike_the_rest(
    place: Place, k: int, period: int, often: bool
) -> None:
    """A sample of it may show far too much, or nothing."""
    values = normal(130_000, 18)
    values[::period] *= 1000.0 if often else 0.0
    acc = put(values, place.device)
    assert_holds(place.top_k(acc, k), values, oracle_top_k(values, k), place.device)


@pytest.mark.parametrize("k", [2500, 5000, 20_000])
def test_fewer_non_zeros_than_a_large_k(place: Place, k: int) -> None:
    values = normal(20_000, 19)
    values[np.random.default_rng(20).random(20_000) < 0.9] = 0.0
    acc = put(values, place.device)
    assert np.count_nonzero(values) < k
    assert_holds(place.top_k(acc, k), values, oracle_top_k(values, k), place.device)


# --- who owns what


@each_case
def test_no_call_changes_its_input(place: Place, values: np.ndarray) -> None:
    acc = put(values, place.device)
    for k in (1, 7, 1000, 5000):
        place.top_k(acc, k)
        place.above(acc, 0.1)
        place.normal_threshold(acc, k)
    assert acc.cpu().numpy().view(np.int32).tolist() == values.view(np.int32).tolist()


def test_results_own_their_memory(place: Place) -> None:
    values = normal(1000, 12)
    for k in (1, 7, 500, 1000, 5000):
        acc = put(values, place.device)
        best, above = place.top_k(acc, k), place.above(acc, 0.0)
        acc.fill_(7.0)
        assert_holds(best, values, oracle_top_k(values, k), place.device)
        assert_holds(above, values, oracle_above(values, 0.0), place.device)
        best.values.fill_(9.0)
        assert bool((acc == 7.0).all())


def test_part_of_a_larger_tensor_is_selected_from_by_its_own_indices(place: Place) -> None:
    values = normal(1000, 13)
    part = put(values, place.device)[101:801]
    assert_holds(place.top_k(part, 10), values[101:801], oracle_top_k(values[101:801], 10), place.device)


# --- the normal fit


@pytest.mark.parametrize(("scale", "mean"), [(1e-30, 0.0), (1e-3, 0.0), (1.0, 0.0), (1e30, 0.0), (1.0, 0.3)])
def test_normal_threshold_takes_about_k_of_normal_data(place: Place, scale: float, mean: float) -> None:
    acc = put(normal(50_000, 14, scale=scale, mean=mean), place.device)
    for k in (50, 500, 5000):
        assert 3 * k / 4 <= len(place.above(acc, place.normal_threshold(acc, k))) <= 2 * k


def test_normal_threshold_is_the_quantile_of_the_fit(place: Place) -> None:
    n, scale = 50_000, 0.25
    acc = put(normal(n, 17, scale=scale), place.device)
    for k in (100, 1000, 10_000):
        quantile = scale * NormalDist().inv_cdf(1 - k / (2 * n))
        assert place.normal_threshold(acc, k) == pytest.approx(quantile, rel=0.02)


@pytest.mark.parametrize("freedom", [0.5, 1.5, 3.0])
def test_normal_threshold_takes_enough_of_heavy_tails(place: Place, freedom: float) -> None:
    acc = put(heavy_tails(20_000, 16, freedom), place.device)
    for k in (1, 20, 200, 2000):
        assert len(place.above(acc, place.normal_threshold(acc, k))) >= 3 * k / 4


@each_case
def test_normal_threshold_takes_enough_and_no_zero(place: Place, values: np.ndarray) -> None:
    acc = put(values, place.device)
    for k in KS:
        threshold = place.normal_threshold(acc, k)
        assert math.isfinite(threshold)
        assert threshold >= 0.0
        taken = place.above(acc, threshold)
        assert len(taken) >= min(math.ceil(3 * k / 4), int(np.count_nonzero(values)))
        assert len(taken) == int(torch.count_nonzero(taken.values))


@LAW
@given(values=ARRAYS, k=st.integers(1, 50))
def test_normal_threshold_takes_enough_of_any_input(place: Place, values: np.ndarray, k: int) -> None:
    acc = put(values, place.device)
    threshold = place.normal_threshold(acc, k)
    assert math.isfinite(threshold)
    assert threshold >= 0.0
    taken = int(torch.count_nonzero(place.above(acc, threshold).values))
    assert taken >= min(math.ceil(3 * k / 4), int(np.count_nonzero(values)))


def test_normal_threshold_of_zeros_is_zero(place: Place) -> None:
    for k in (1, 10, 1000, 2000):
        assert place.normal_threshold(torch.zeros(1000, device=place.device), k) == 0.0


@pytest.mark.parametrize("value", [-0.1, 1.0, 3e38, 1e-38, SMALLEST])
def test_normal_threshold_of_a_constant_takes_all_of_it(place: Place, value: float) -> None:
    acc = torch.full((1000,), value, device=place.device)
    for k in (1, 10, 999, 1000):
        assert len(place.above(acc, place.normal_threshold(acc, k))) == 1000


# --- one that knows its bucket

N, K = 4000, 40
LIMIT = largest_safe(4)
SYNTHETIC = Synthetic(N, 0)


class Watched:
    """Kernels that count how often all of an `acc` is looked at, after the pass that made it."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.full_looks = 0
        self.passes = 0

    def accumulate(self, *arguments: object) -> Callable[[], Seen]:
        self.passes += 1
        return self._kernels.accumulate(*arguments)  # type: ignore[arg-type]

    def above(self, values: torch.Tensor, floor: float, room: int) -> SparseVector | None:
        self.full_looks += values.numel() == N
        return self._kernels.above(values, floor, room)

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernels, name)


each_kernels = pytest.mark.parametrize("kernels", NAMES)


def bucket_selector(kernels: str) -> tuple[BucketSelector, Watched]:
    watched = Watched(make_kernels(kernels).on(CPU))
    return BucketSelector(DeviceKernels({"cpu": lambda: watched}), CPU, CPU), watched  # type: ignore[dict-item]


def steady(step: int) -> np.ndarray:
    """The same distribution every time, at other places."""
    return normal(N, 1000 + step)


def heavy(step: int) -> np.ndarray:
    return heavy_tails(N, 2000 + step, freedom=3.0)


def persistent(step: int) -> np.ndarray:
    """What is large once stays so, under noise."""
    return SYNTHETIC.at(step).numpy()


SEQUENCES: dict[str, Callable[[int], np.ndarray]] = {
    "steady": steady,
    "persistent": persistent,
    "growing": lambda step: steady(0) + 0.1 * steady(step),
    "spike": lambda step: steady(step) * np.float32(10.0 if step == 12 else 1.0),
    "drop": lambda step: steady(step) * np.float32(0.1 if step >= 12 else 1.0),
    "on and off": lambda step: steady(step) * np.float32(step % 3 == 0),
    "zeros": lambda _: np.zeros(N, dtype=np.float32),
    "zeros at first": lambda step: steady(step) * np.float32(step >= 8),
    "all tied": lambda _: np.full(N, -0.25, dtype=np.float32),
    "all tied, growing": lambda step: np.full(N, 0.25 * (step + 1), dtype=np.float32),
    "ties": lambda step: ties(N, step),
    "one-hot": lambda step: one_hot(N, step, 1.0 + step),
    "fewer than k": lambda step: few_nonzeros(N, step),
    "denormals": lambda step: (steady(step) * 1e-40).astype(np.float32),
    "near the limit": lambda step: np.clip(steady(step) * np.float32(2e37), -LIMIT, LIMIT).astype(np.float32),
}


GUESSES: dict[str, Callable[[float], float]] = {
    "absent": lambda _: math.inf,
    "far too high": lambda kth: 100.0 * kth,
    "a little too high": lambda kth: float(np.nextafter(np.float32(kth), np.float32(np.inf))),
    "just right": lambda kth: kth,
    "good": lambda kth: 0.95 * kth,
    "too low": lambda kth: 0.01 * kth,
    "zero": lambda _: 0.0,
}
ROOMS = {"for all": N, "for a few more than k": 4 * K, "for none": 0}


def passed_over(kernels: str, values: np.ndarray, floor: float, room: int) -> Accumulated:
    """As a pass leaves it that compared with this floor, whoever guessed it."""
    floor, out = min(floor, LIMIT), torch.empty(len(values))
    return Accumulated(
        out, floor, make_kernels(kernels).on(CPU).accumulate(None, torch.from_numpy(values), out, floor, room, CPU)
    )


def assert_asked_alike(selector: BucketSelector, acc: Accumulated) -> None:
    """Everything a reducer may ask, twice: what is selected does not depend on what was seen or asked before."""
    values, reference = acc.values.numpy(), ReferenceSelector()
    kth = oracle_kth(values, K)
    for _ in range(2):
        for threshold in (kth, 0.97 * kth, 0.5 * kth, 1.1 * kth, 0.0, acc.floor):
            same(selector.above(acc, threshold), reference.above(acc, threshold))
        for k in (K, 1, K - 1, K + 5, 3 * K, N, N + 1):
            assert_holds(selector.top_k(acc, k), values, oracle_top_k(values, k), CPU)
        assert selector.normal_threshold(acc, K) == reference.normal_threshold(acc, K)


@each_kernels
@pytest.mark.parametrize("guess", GUESSES.values(), ids=GUESSES)
@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("kind", ["steady", "ties", "fewer than k", "zeros", "all tied", "denormals"])
def test_what_is_selected_does_not_depend_on_the_guess(
    kernels: str, guess: Callable[[float], float], room: int, kind: str
) -> None:
    values = SEQUENCES[kind](3)
    acc = passed_over(kernels, values, guess(oracle_kth(values, K)), room)
    assert_asked_alike(BucketSelector(make_kernels(kernels), CPU, CPU), acc)


@each_kernels
@pytest.mark.parametrize("feedback", [True, False], ids=["with residual", "gradients alone"])
@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_what_is_selected_does_not_depend_on_what_is_remembered(
    sequence: Callable[[int], np.ndarray], feedback: bool, kernels: str
) -> None:
    remembering, _ = bucket_selector(kernels)
    residual: torch.Tensor | None = None
    for step in range(18):
        fresh = torch.from_numpy(sequence(step))
        expected = fresh.clone() if residual is None else residual + fresh
        acc = remembering.accumulate(residual, fresh, torch.empty(N), K, LIMIT)
        assert torch.equal(acc.values.view(torch.int32), expected.view(torch.int32))
        assert_asked_alike(remembering, acc)
        other = Accumulated(torch.from_numpy(normal(N, step)))
        assert_holds(remembering.top_k(other, K), other.values.numpy(), oracle_top_k(other.values.numpy(), K), CPU)
        best = remembering.top_k(acc, K)
        if feedback:
            residual = acc.values
            residual[best.indices] = 0.0


@each_kernels
@LAW
@given(data=st.data(), n=st.integers(1, 60))
def test_any_sequence_of_steps_is_selected_from_exactly(kernels: str, data: st.DataObject, n: int) -> None:
    remembering, _ = bucket_selector(kernels)
    for _ in range(data.draw(st.integers(1, 6))):
        values = np.array(data.draw(st.lists(FINITE, min_size=n, max_size=n)), dtype=np.float32)
        k = data.draw(st.integers(1, n))
        acc = remembering.accumulate(None, torch.from_numpy(values), torch.empty(n), k, LIMIT)
        assert (acc.largest <= LIMIT) == (float(np.abs(values).max()) <= LIMIT)
        assert_holds(remembering.top_k(acc, k), values, oracle_top_k(values, k), CPU)
        threshold = data.draw(st.sampled_from([abs(float(value)) for value in values]))
        assert_holds(remembering.above(acc, threshold), values, oracle_above(values, threshold), CPU)


# --- parameters that take no part in a step

HELD = Layout.of([("a", 1), ("b", 999), ("c", 1500), ("d", 1499), ("e", 1)])


@each_kernels
@pytest.mark.parametrize("guess", GUESSES.values(), ids=GUESSES)
@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("names", ["", "a", "c", "ae", "bd", "abcde"])
def test_what_is_held_out_is_zero_and_never_selected(
    kernels: str, guess: Callable[[float], float], room: int, names: str
) -> None:
    values = steady(4)
    acc = passed_over(kernels, values.copy(), guess(oracle_kth(values, K)), room)
    slots = [slot for slot in HELD.slots if slot.name in names]
    held = acc.hold_out(slots)
    for slot in slots:
        values[slot.offset : slot.offset + slot.numel] = 0.0
    assert held.values is acc.values
    assert held.values.numpy().view(np.int32).tolist() == values.view(np.int32).tolist()
    assert held.floor == acc.floor
    if held.candidates is not None:
        assert_holds(held.candidates, values, oracle_above(values, max(held.floor, SMALLEST)), CPU)
    assert_asked_alike(BucketSelector(make_kernels(kernels), CPU, CPU), held)


def test_what_is_held_out_costs_no_other_look() -> None:
    remembering, watched = bucket_selector("numba")
    for step in range(4):
        remembering.top_k(remembering.accumulate(None, torch.from_numpy(steady(step)), torch.empty(N), K, LIMIT), K)
    acc = remembering.accumulate(None, torch.from_numpy(steady(5)), torch.empty(N), K, LIMIT)
    watched.full_looks = 0
    held = acc.hold_out(HELD.slots[:1])
    assert_holds(remembering.top_k(held, K), held.values.numpy(), oracle_top_k(held.values.numpy(), K), CPU)
    assert watched.full_looks == 0


def test_what_was_seen_is_asked_for_once_and_only_when_it_is_needed() -> None:
    """It may wait for a GPU."""
    asked = []

    def see() -> Seen:
        asked.append(1)
        return Seen(3.0, SparseVector.empty(4, CPU))

    acc = Accumulated(torch.zeros(4), 5.0, see)
    assert acc.hold_out([]) is acc
    assert not asked
    assert acc.largest == 3.0
    assert acc.candidates is not None
    assert acc.largest == 3.0
    assert len(asked) == 1
    unseen = Accumulated(torch.ones(4))
    assert (unseen.floor, unseen.largest, unseen.candidates) == (math.inf, 0.0, None)


# --- how often all elements are looked at


@each_kernels
@pytest.mark.parametrize(
    ("sequence", "steps_before", "feedback"),
    [
        (steady, 10, False),
        (steady, 10, True),
        (heavy, 10, False),
        (heavy, 10, True),
        (SEQUENCES["growing"], 10, False),
        (SEQUENCES["growing"], 60, True),
        (persistent, 10, True),
        (persistent, 250, True),
    ],
    ids=[
        *("normal", "normal with residual", "heavy", "heavy with residual", "alike", "alike with residual"),
        *("persistent", "persistent for long"),
    ],
)
def test_steady_steps_look_at_all_of_acc_once(
    sequence: Callable[[int], np.ndarray], steps_before: int, feedback: bool, kernels: str
) -> None:
    """While `acc` is made: what the last step guessed is good enough but for a few steps of fifty.

    Where gradients persist, residuals fill up: as time goes by, more and more lie just below the k-th.
    """
    remembering, watched = bucket_selector(kernels)
    residual: torch.Tensor | None = None
    for step in range(steps_before + 50):
        if step == steps_before:
            watched.full_looks = watched.passes = 0
        acc = remembering.accumulate(residual, torch.from_numpy(sequence(step)), torch.empty(N), K, LIMIT)
        best = remembering.top_k(acc, K)
        if feedback:
            residual = acc.values
            residual[best.indices] = 0.0
    assert watched.passes == 50
    assert watched.full_looks <= 5


@each_kernels
@pytest.mark.parametrize(
    ("bad", "beyond"),
    [
        (math.nan, True),
        (math.inf, True),
        (-math.inf, True),
        (1.1 * LIMIT, True),
        (-LARGEST, True),
        (0.9 * LIMIT, False),
        (0.0, False),
    ],
    ids=str,
)
def test_the_largest_tells_of_what_is_beyond_the_limit(kernels: str, bad: float, beyond: bool) -> None:
    """Whatever is remembered, in a gradient or already owed, and though far more than there is room for is found."""
    for steps_before in (0, 3):
        for scale in (1.0, 100.0, 0.0):
            for k in (0, 1, K):  # none are chosen in a dense step
                remembering, _ = bucket_selector(kernels)
                for step in range(steps_before):
                    fresh = torch.from_numpy(steady(step))
                    remembering.top_k(remembering.accumulate(None, fresh, torch.empty(N), K, LIMIT), K)
                gradient = torch.from_numpy(steady(9)) * scale
                owed = torch.zeros(N)
                for holder in (gradient, owed):
                    holder[1234] = bad
                    if holder is owed:
                        gradient[1234] = 0.0
                    acc = remembering.accumulate(owed, gradient, torch.empty(N), k, LIMIT)
                    assert (acc.largest <= LIMIT) == (not beyond)


@each_kernels
def test_the_largest_is_that_of_its_pass(kernels: str) -> None:
    """Of what reached the floor: the spike, once a floor is known."""
    remembering, _ = bucket_selector(kernels)
    remembering.top_k(remembering.accumulate(None, torch.from_numpy(steady(0)), torch.empty(N), K, LIMIT), K)
    passes = []
    for spike in (1e30, 5e20, 1e30):
        values = torch.from_numpy(steady(1))
        values[77] = -spike
        passes.append((remembering.accumulate(None, values, torch.empty(N), K, LIMIT), spike))
    for acc, spike in reversed(passes):
        assert acc.largest == float(np.float32(spike))


def test_a_bucket_selects_for_its_home() -> None:
    """Here nowhere; in earnest the host, for what a GPU made."""
    nowhere = torch.device("meta")
    remembering = BucketSelector(make_kernels("torch"), CPU, nowhere)
    acc = remembering.accumulate(None, torch.from_numpy(steady(0)), torch.empty(N), K, LIMIT)
    for found in (remembering.above(acc, 1.0), remembering.above(acc, 100.0)):
        assert found.indices.device == found.values.device == nowhere


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: the whole suite ran on the CPU alone")
def test_the_suite_ran_on_cuda_too() -> None:
    assert ("triton", "cuda") in PLACES
