"""The contract of oktopk.select.base.Selector, for every implementation on every device there is.

The oracle is a stable argsort of -|x| in numpy: it knows nothing of thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.checks.finite import largest_safe
from oktopk.kernels.base import Kernels, Seen
from oktopk.kernels.by_device import best_kernels, numba_kernels
from oktopk.kernels.torch_ops import TorchKernels
from oktopk.metrics import stopwatch
from oktopk.metrics.stopwatch import Stopwatch
from oktopk.select.base import Selector
from oktopk.select.bucket_selector import BucketSelector
from oktopk.select.kernel_selector import KernelSelector
from oktopk.select.timing import TimedSelector
from oktopk.select.torch_ops import TorchSelector
from oktopk.sparse_vector import SparseVector
from tests.gradients import Synthetic


def timed_torch() -> Selector:
    return TimedSelector(TorchSelector(), Stopwatch())


def over_numba() -> Selector:
    return KernelSelector(numba_kernels())


def over_the_best() -> Selector:
    return KernelSelector(best_kernels())


def with_a_bucket() -> Selector:
    """Which has seen nothing of the tensors it is asked about."""
    return BucketSelector(KernelSelector(best_kernels()), best_kernels(), torch.device("cpu"))


ON_CPU: list[Callable[[], Selector]] = [TorchSelector, timed_torch, over_numba, with_a_bucket]
ON_CUDA: list[Callable[[], Selector]] = [TorchSelector, timed_torch, over_the_best]
SELECTORS = [(make, "cpu") for make in ON_CPU]
if torch.cuda.is_available():
    SELECTORS += [(make, "cuda") for make in ON_CUDA]
LAW = settings(derandomize=True, deadline=None, max_examples=80)
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)

FINITE = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, SMALLEST, -SMALLEST, 3 * SMALLEST, LARGEST, -LARGEST]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(width=32, min_value=-3.0, max_value=3.0),
)
ARRAYS = st.lists(FINITE, min_size=1, max_size=40).map(lambda values: np.array(values, dtype=np.float32))


@pytest.fixture(params=SELECTORS, ids=lambda pair: f"{pair[0].__name__}-{pair[1]}", scope="module")
def both(request: pytest.FixtureRequest) -> tuple[Selector, torch.device]:
    make, device = request.param
    return make(), torch.device(device)


@pytest.fixture(scope="module")
def selector(both: tuple[Selector, torch.device]) -> Selector:
    return both[0]


@pytest.fixture(scope="module")
def device(both: tuple[Selector, torch.device]) -> torch.device:
    return both[1]


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
def test_top_k_is_exact_and_lower_indices_win_ties(
    selector: Selector, device: torch.device, values: np.ndarray
) -> None:
    for k in KS:
        assert_holds(selector.top_k(put(values, device), k), values, oracle_top_k(values, k), device)


@each_case
def test_kth_magnitude_is_exact(selector: Selector, device: torch.device, values: np.ndarray) -> None:
    for k in KS:
        assert selector.kth_magnitude(put(values, device), k) == oracle_kth(values, k)


@each_case
def test_above_takes_all_ties_and_no_zero(selector: Selector, device: torch.device, values: np.ndarray) -> None:
    thresholds = {0.0, SMALLEST, float(np.float32(0.1)), LARGEST, *(oracle_kth(values, k) for k in KS)}
    for threshold in thresholds:
        expected = oracle_above(values, threshold)
        assert_holds(selector.above(put(values, device), threshold), values, expected, device)


@LAW
@given(values=ARRAYS, k=st.integers(1, 50))
def test_top_k_and_kth_magnitude_are_exact_for_any_input(
    selector: Selector, device: torch.device, values: np.ndarray, k: int
) -> None:
    acc = put(values, device)
    assert_holds(selector.top_k(acc, k), values, oracle_top_k(values, k), device)
    assert selector.kth_magnitude(acc, k) == oracle_kth(values, k)


@LAW
@given(data=st.data(), values=ARRAYS)
def test_above_is_exact_for_any_input(
    selector: Selector, device: torch.device, data: st.DataObject, values: np.ndarray
) -> None:
    present = st.sampled_from([abs(value) for value in values.tolist()])
    threshold = data.draw(st.one_of(present, st.floats(width=32, min_value=0.0, max_value=LARGEST)))
    assert_holds(selector.above(put(values, device), threshold), values, oracle_above(values, threshold), device)


@pytest.mark.parametrize("threshold", [1e-46, 1e-50, 1e-300, 5e-324])
def test_above_never_takes_a_zero_where_fp32_rounds_the_threshold_to_zero(
    selector: Selector, device: torch.device, threshold: float
) -> None:
    values = np.array([0.0, SMALLEST, -0.0, 2.0], dtype=np.float32)
    assert_holds(selector.above(put(values, device), threshold), values, [1, 3], device)


@pytest.mark.parametrize("threshold", [1e39, 1e300, math.inf])
def test_above_takes_nothing_where_the_threshold_is_beyond_fp32(
    selector: Selector, device: torch.device, threshold: float
) -> None:
    values = np.array([0.0, LARGEST, -LARGEST], dtype=np.float32)
    assert_holds(selector.above(put(values, device), threshold), values, [], device)


def test_top_k_is_exact_in_a_large_input_with_a_tie_at_the_cut(selector: Selector, device: torch.device) -> None:
    values = np.round(normal(200_000, 11) * 50).astype(np.float32)
    for k in (1, 2000, 150_000):
        assert_holds(selector.top_k(put(values, device), k), values, oracle_top_k(values, k), device)


@pytest.mark.parametrize("k", [2048, 3000, 61 * 1024, 100_000])
@pytest.mark.parametrize("period", [2, 59, 61, 1024])
@pytest.mark.parametrize("often", [True, False], ids=["large where sampled", "small where sampled"])
def test_top_k_is_exact_where_every_so_manieth_element_is_unlike_the_rest(
    selector: Selector, device: torch.device, k: int, period: int, often: bool
) -> None:
    """A sample of it may show far too much, or nothing."""
    values = normal(130_000, 18)
    values[::period] *= 1000.0 if often else 0.0
    acc = put(values, device)
    assert_holds(selector.top_k(acc, k), values, oracle_top_k(values, k), device)
    assert selector.kth_magnitude(acc, k) == oracle_kth(values, k)


@pytest.mark.parametrize("k", [2500, 5000, 20_000])
def test_fewer_non_zeros_than_a_large_k(selector: Selector, device: torch.device, k: int) -> None:
    values = normal(20_000, 19)
    values[np.random.default_rng(20).random(20_000) < 0.9] = 0.0
    acc = put(values, device)
    assert np.count_nonzero(values) < k
    assert_holds(selector.top_k(acc, k), values, oracle_top_k(values, k), device)
    assert selector.kth_magnitude(acc, k) == 0.0


# --- who owns what


@each_case
def test_no_call_changes_its_input(selector: Selector, device: torch.device, values: np.ndarray) -> None:
    acc = put(values, device)
    for k in (1, 7, 1000, 5000):
        selector.top_k(acc, k)
        selector.above(acc, 0.1)
        selector.kth_magnitude(acc, k)
        selector.normal_threshold(acc, k)
    assert acc.cpu().numpy().view(np.int32).tolist() == values.view(np.int32).tolist()


def test_results_own_their_memory(selector: Selector, device: torch.device) -> None:
    values = normal(1000, 12)
    for k in (1, 7, 500, 1000, 5000):
        acc = put(values, device)
        best, above = selector.top_k(acc, k), selector.above(acc, 0.0)
        acc.fill_(7.0)
        assert_holds(best, values, oracle_top_k(values, k), device)
        assert_holds(above, values, oracle_above(values, 0.0), device)
        best.values.fill_(9.0)
        assert bool((acc == 7.0).all())


def test_part_of_a_larger_tensor_is_selected_from_by_its_own_indices(selector: Selector, device: torch.device) -> None:
    values = normal(1000, 13)
    part = put(values, device)[101:801]
    assert_holds(selector.top_k(part, 10), values[101:801], oracle_top_k(values[101:801], 10), device)


# --- the normal fit


@pytest.mark.parametrize(("scale", "mean"), [(1e-30, 0.0), (1e-3, 0.0), (1.0, 0.0), (1e30, 0.0), (1.0, 0.3)])
def test_normal_threshold_takes_about_k_of_normal_data(
    selector: Selector, device: torch.device, scale: float, mean: float
) -> None:
    acc = put(normal(50_000, 14, scale=scale, mean=mean), device)
    for k in (50, 500, 5000):
        assert 3 * k / 4 <= len(selector.above(acc, selector.normal_threshold(acc, k))) <= 2 * k


def test_normal_threshold_is_the_quantile_of_the_fit(selector: Selector, device: torch.device) -> None:
    n, scale = 50_000, 0.25
    acc = put(normal(n, 17, scale=scale), device)
    for k in (100, 1000, 10_000):
        quantile = scale * NormalDist().inv_cdf(1 - k / (2 * n))
        assert selector.normal_threshold(acc, k) == pytest.approx(quantile, rel=0.02)


@pytest.mark.parametrize("freedom", [0.5, 1.5, 3.0])
def test_normal_threshold_takes_enough_of_heavy_tails(selector: Selector, device: torch.device, freedom: float) -> None:
    acc = put(heavy_tails(20_000, 16, freedom), device)
    for k in (1, 20, 200, 2000):
        assert len(selector.above(acc, selector.normal_threshold(acc, k))) >= 3 * k / 4


@each_case
def test_normal_threshold_takes_enough_and_no_zero(
    selector: Selector, device: torch.device, values: np.ndarray
) -> None:
    acc = put(values, device)
    for k in KS:
        threshold = selector.normal_threshold(acc, k)
        assert math.isfinite(threshold)
        assert threshold >= 0.0
        taken = selector.above(acc, threshold)
        assert len(taken) >= min(math.ceil(3 * k / 4), int(np.count_nonzero(values)))
        assert len(taken) == int(torch.count_nonzero(taken.values))


@LAW
@given(values=ARRAYS, k=st.integers(1, 50))
def test_normal_threshold_takes_enough_of_any_input(
    selector: Selector, device: torch.device, values: np.ndarray, k: int
) -> None:
    acc = put(values, device)
    threshold = selector.normal_threshold(acc, k)
    assert math.isfinite(threshold)
    assert threshold >= 0.0
    taken = int(torch.count_nonzero(selector.above(acc, threshold).values))
    assert taken >= min(math.ceil(3 * k / 4), int(np.count_nonzero(values)))


def test_normal_threshold_of_zeros_is_zero(selector: Selector, device: torch.device) -> None:
    for k in (1, 10, 1000, 2000):
        assert selector.normal_threshold(torch.zeros(1000, device=device), k) == 0.0


@pytest.mark.parametrize("value", [-0.1, 1.0, 3e38, 1e-38, SMALLEST])
def test_normal_threshold_of_a_constant_takes_all_of_it(selector: Selector, device: torch.device, value: float) -> None:
    acc = torch.full((1000,), value, device=device)
    for k in (1, 10, 999, 1000):
        assert len(selector.above(acc, selector.normal_threshold(acc, k))) == 1000


# --- the wrapper


def test_timed_selector_adds_up_the_seconds_and_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 10.0, 12.0, 20.0, 20.25])
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    clock_of_calls = Stopwatch()
    timed = TimedSelector(TorchSelector(), clock_of_calls)
    assert clock_of_calls.take() == 0.0
    timed.top_k(torch.ones(10), 2)
    timed.above(torch.ones(10), 0.5)
    assert clock_of_calls.take() == 2.5
    timed.kth_magnitude(torch.ones(10), 2)
    assert clock_of_calls.take() == 0.25
    assert clock_of_calls.take() == 0.0


def test_timed_selector_passes_on_what_the_inner_one_raises() -> None:
    class Broken(TorchSelector):
        def top_k(self, acc: torch.Tensor, k: int) -> SparseVector:
            raise ArithmeticError(f"{acc.numel()} {k}")

    with pytest.raises(ArithmeticError, match="4 2"):
        TimedSelector(Broken(), Stopwatch()).top_k(torch.ones(4), 2)


# --- one that knows its bucket

N, K = 4000, 40
LIMIT = largest_safe(4)
CPU = torch.device("cpu")
SYNTHETIC = Synthetic(N, 0)


class Watched:
    """Selector and kernels in one, which count how often all of an `acc` is looked at, after the pass that made it."""

    def __init__(self, selector: Selector, kernels: Kernels) -> None:
        self._selector = selector
        self._kernels = kernels
        self.full_looks = 0
        self.passes = 0

    def _look(self, values: torch.Tensor) -> None:
        self.full_looks += values.numel() == N

    def accumulate(self, *arguments: object) -> Callable[[], Seen]:
        self.passes += 1
        return self._kernels.accumulate(*arguments)  # type: ignore[arg-type]

    def top_k(self, acc: torch.Tensor, k: int) -> SparseVector:
        self._look(acc)
        return self._selector.top_k(acc, k)

    def above(self, acc: torch.Tensor, threshold: float) -> SparseVector:
        self._look(acc)
        return self._selector.above(acc, threshold)

    def kth_magnitude(self, acc: torch.Tensor, k: int) -> float:
        self._look(acc)
        return self._selector.kth_magnitude(acc, k)

    def normal_threshold(self, acc: torch.Tensor, k: int) -> float:
        self._look(acc)
        return self._selector.normal_threshold(acc, k)


KERNELS: dict[str, Callable[[], Kernels]] = {"torch": TorchKernels, "numba": numba_kernels}
each_kernels = pytest.mark.parametrize("make_kernels", KERNELS.values(), ids=KERNELS)


def bucket_selector(make_kernels: Callable[[], Kernels]) -> tuple[BucketSelector, Watched]:
    kernels = make_kernels()
    watched = Watched(KernelSelector(kernels), kernels)
    return BucketSelector(watched, watched, CPU), watched  # type: ignore[arg-type]


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


@each_kernels
@pytest.mark.parametrize("feedback", [True, False], ids=["with residual", "gradients alone"])
@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_what_is_selected_does_not_depend_on_what_is_remembered(
    sequence: Callable[[int], np.ndarray], feedback: bool, make_kernels: Callable[[], Kernels]
) -> None:
    """Everything a reducer may ask, of the bucket's `acc` and of other tensors, before and after its top k."""
    remembering, _ = bucket_selector(make_kernels)
    plain = TorchSelector()
    residual: torch.Tensor | None = None
    for step in range(18):
        fresh = torch.from_numpy(sequence(step))
        expected = fresh.clone() if residual is None else residual + fresh
        acc = torch.empty(N)
        remembering.accumulate(residual, fresh, acc, K, LIMIT)
        assert torch.equal(acc.view(torch.int32), expected.view(torch.int32))
        values = acc.numpy()
        kth = oracle_kth(values, K)
        for _ in range(2):
            for threshold in (kth, 0.97 * kth, 0.5 * kth, 1.1 * kth, 0.0):
                same(remembering.above(acc, threshold), plain.above(acc, threshold))
            for k in (K, 1, K - 1, K + 1, 3 * K, N, N + 1):
                assert remembering.kth_magnitude(acc, k) == oracle_kth(values, k)
            best = remembering.top_k(acc, K)
            assert_holds(best, values, oracle_top_k(values, K), CPU)
            assert_holds(remembering.top_k(acc, K + 5), values, oracle_top_k(values, K + 5), CPU)
            assert remembering.normal_threshold(acc, K) == plain.normal_threshold(acc, K)
        other = torch.from_numpy(normal(N, step))
        assert_holds(remembering.top_k(other, K), other.numpy(), oracle_top_k(other.numpy(), K), CPU)
        remembering.forget()
        assert_holds(remembering.top_k(acc, K), values, oracle_top_k(values, K), CPU)
        if feedback:
            acc[best.indices] = 0.0
            residual = acc


def same(found: SparseVector, expected: SparseVector) -> None:
    assert found.length == expected.length
    assert found.indices.tolist() == expected.indices.tolist()
    assert found.values.view(torch.int32).tolist() == expected.values.view(torch.int32).tolist()


@each_kernels
@LAW
@given(data=st.data(), n=st.integers(1, 60))
def test_any_sequence_of_steps_is_selected_from_exactly(
    make_kernels: Callable[[], Kernels], data: st.DataObject, n: int
) -> None:
    remembering, _ = bucket_selector(make_kernels)
    for _ in range(data.draw(st.integers(1, 6))):
        values = np.array(data.draw(st.lists(FINITE, min_size=n, max_size=n)), dtype=np.float32)
        k = data.draw(st.integers(1, n))
        acc = torch.empty(n)
        remembering.accumulate(None, torch.from_numpy(values), acc, k, LIMIT)
        largest = remembering.largest()
        assert (largest <= LIMIT) == (float(np.abs(values).max()) <= LIMIT)
        assert_holds(remembering.top_k(acc, k), values, oracle_top_k(values, k), CPU)
        threshold = data.draw(st.sampled_from([abs(float(value)) for value in values]))
        assert_holds(remembering.above(acc, threshold), values, oracle_above(values, threshold), CPU)


@each_kernels
def test_what_was_changed_since_is_looked_at_anew(make_kernels: Callable[[], Kernels]) -> None:
    """In place, through a view, as parameters without a gradient are zeroed."""
    remembering, watched = bucket_selector(make_kernels)
    for step in range(4):
        acc = torch.empty(N)
        remembering.accumulate(None, torch.from_numpy(steady(step)), acc, K, LIMIT)
        remembering.top_k(acc, K)
    for change in (lambda part: part.zero_(), lambda part: part.mul_(-3.0), lambda part: part.fill_(7.0)):
        acc = torch.empty(N)
        remembering.accumulate(None, torch.from_numpy(steady(5)), acc, K, LIMIT)
        change(acc[1000:2500])
        values, before = acc.numpy().copy(), watched.full_looks
        assert_holds(remembering.top_k(acc, K), values, oracle_top_k(values, K), CPU)
        threshold = oracle_kth(values, K)
        assert_holds(remembering.above(acc, threshold), values, oracle_above(values, threshold), CPU)
        assert remembering.kth_magnitude(acc, K) == threshold
        assert watched.full_looks == before + 3


@each_kernels
def test_a_copy_of_the_bucket_is_another_tensor(make_kernels: Callable[[], Kernels]) -> None:
    remembering, watched = bucket_selector(make_kernels)
    acc = torch.empty(N)
    for step in range(4):
        remembering.accumulate(None, torch.from_numpy(steady(step)), acc, K, LIMIT)
        remembering.top_k(acc, K)
    before = watched.full_looks
    copied = acc.clone()
    assert_holds(remembering.top_k(copied, K), copied.numpy(), oracle_top_k(copied.numpy(), K), CPU)
    assert watched.full_looks == before + 1


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
    sequence: Callable[[int], np.ndarray], steps_before: int, feedback: bool, make_kernels: Callable[[], Kernels]
) -> None:
    """While `acc` is made: what the last step guessed is good enough but for a few steps of fifty.

    Where gradients persist, residuals fill up: as time goes by, more and more lie just below the k-th.
    """
    remembering, watched = bucket_selector(make_kernels)
    residual: torch.Tensor | None = None
    for step in range(steps_before + 50):
        if step == steps_before:
            watched.full_looks = watched.passes = 0
        acc = torch.empty(N)
        remembering.accumulate(residual, torch.from_numpy(sequence(step)), acc, K, LIMIT)
        best = remembering.top_k(acc, K)
        remembering.forget()
        if feedback:
            acc[best.indices] = 0.0
            residual = acc
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
def test_the_largest_tells_of_what_is_beyond_the_limit(
    make_kernels: Callable[[], Kernels], bad: float, beyond: bool
) -> None:
    """Whatever is remembered, in a gradient or already owed, and though far more than there is room for is found."""
    for steps_before in (0, 3):
        for scale in (1.0, 100.0, 0.0):
            for k in (0, 1, K):  # none are chosen in a dense step
                remembering, _ = bucket_selector(make_kernels)
                for step in range(steps_before):
                    acc = torch.empty(N)
                    remembering.accumulate(None, torch.from_numpy(steady(step)), acc, K, LIMIT)
                    remembering.top_k(acc, K)
                gradient = torch.from_numpy(steady(9)) * scale
                owed = torch.zeros(N)
                for holder in (gradient, owed):
                    holder[1234] = bad
                    if holder is owed:
                        gradient[1234] = 0.0
                    remembering.accumulate(owed, gradient, torch.empty(N), k, LIMIT)
                    largest = remembering.largest()
                    assert (largest <= LIMIT) == (not beyond)


@each_kernels
def test_the_largest_is_that_of_the_last_pass(make_kernels: Callable[[], Kernels]) -> None:
    """Of what reached the floor: the spike, once a floor is known."""
    remembering, _ = bucket_selector(make_kernels)
    acc = torch.empty(N)
    remembering.accumulate(None, torch.from_numpy(steady(0)), acc, K, LIMIT)
    remembering.top_k(acc, K)
    for spike in (1e30, 5e20, 1e30):
        values = torch.from_numpy(steady(1))
        values[77] = -spike
        remembering.accumulate(None, values, acc, K, LIMIT)
        assert remembering.largest() == float(np.float32(spike))


def test_a_bucket_selects_for_its_home() -> None:
    """Here nowhere; in earnest the host, for what a GPU made."""
    nowhere = torch.device("meta")
    kernels = TorchKernels()
    remembering = BucketSelector(TorchSelector(), kernels, nowhere)
    acc = torch.empty(N)
    remembering.accumulate(None, torch.from_numpy(steady(0)), acc, K, LIMIT)
    for found in (remembering.above(acc, 1.0), remembering.above(acc, 100.0)):
        assert found.indices.device == found.values.device == nowhere


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: the whole suite ran on the CPU alone")
def test_the_suite_ran_on_cuda_too() -> None:
    assert any(device == "cuda" for _, device in SELECTORS)
