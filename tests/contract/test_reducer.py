"""One contract, every reducer: the conservation law, identical ranks, the edges, the bytes."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.comm import simulate
from oktopk.registry import REDUCERS
from oktopk.select import Accumulated
from tests import gradients
from tests.contract.reducer_checks import Case, Step, assert_lawful, assert_same_steps, drive, drive_over
from tests.contract.reference_selector import ReferenceSelector
from tests.worlds import GlooWorld, run_mpi

NAMES = list(REDUCERS)
STEPS = 70  # crosses tau = 64 and tau' = 32, with the steps right after them


def drawn(name: str, kind: str, turn: int, steps: int, **more: Any) -> tuple[int, Case]:
    """A number of ranks and a case, other ones for each reducer, kind and turn."""
    rng = random.Random(f"{name} {kind} {turn}")
    size, n = rng.randint(1, 7), rng.randint(1, 203)
    k = max(1, round(rng.choice([0.01, 0.05, 0.3, 1.0]) * n))
    selector = rng.choice(["bucket", "forgetful"])
    drawn_too = {key: rng.choice(value) for key, value in more.items() if isinstance(value, list)}
    return size, Case(name, kind, n, k, steps, rng.randint(0, 2**31), selector=selector, **(more | drawn_too))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", gradients.KINDS)
def test_law_over_simulated_ranks(name: str, kind: str) -> None:
    size, case = drawn(name, kind, 0, STEPS)
    assert_lawful(simulate(size, lambda comm: drive(comm, case)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [16, 64])
def test_law_over_many_ranks(name: str, size: int) -> None:
    case = Case(name, "heavy", n=500, k=10, steps=5 if size == 64 else 34, seed=5, tau=4, tau_prime=2)
    assert_lawful(simulate(size, lambda comm: drive(comm, case)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["heavy", "ties"])
def test_law_over_gloo(name: str, kind: str, gloo: GlooWorld) -> None:
    assert_lawful(gloo.run(drive_over, "torch", Case(name, kind, n=301, k=9, steps=STEPS, seed=3)))


@pytest.mark.parametrize("size", [2, 3])
def test_law_over_mpi(size: int) -> None:
    cases = [Case(name, "heavy", n=301, k=9, steps=STEPS, seed=3) for name in NAMES]
    for by_rank in zip(*run_mpi(size, drive_all_over_mpi, cases), strict=True):
        assert_lawful(list(by_rank))


def drive_all_over_mpi(cases: list[Case]) -> list[list[Step]]:
    return [drive_over("mpi", case) for case in cases]


# --- values in bf16

KERNELS = ["torch", "numba"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", gradients.KINDS)
def test_law_where_values_travel_in_bf16(name: str, kind: str) -> None:
    """What rounding takes away stays owed, for every number of ranks."""
    more: dict[str, Any] = {"kernels": KERNELS, "thresholds": ["exact", "reuse"]}
    for turn in range(2):
        size, case = drawn(name, kind, turn, 14, tau=5, tau_prime=3, wire_dtype="bf16", **more)
        assert_lawful(simulate(size, lambda comm, case=case: drive(comm, case)))


@pytest.mark.parametrize("name", NAMES)
def test_law_in_bf16_over_gloo(name: str, gloo_worlds: dict[int, GlooWorld]) -> None:
    case = Case(name, "heavy", n=301, k=9, steps=12, seed=3, tau=4, wire_dtype="bf16")
    assert_lawful(gloo_worlds[3].run(drive_over, "torch", case))


@pytest.mark.parametrize("wire_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_safe_to_sum_stays_finite_and_lawful(name: str, wire_dtype: str) -> None:
    """The largest that the check lets pass, on all ranks in the same places: no rounding carries it too far."""
    for size in (1, 2, 3, 4, 8):
        case = Case(name, "at_the_limit", n=60, k=12, steps=1, wire_dtype=wire_dtype)
        assert_lawful(simulate(size, lambda comm, case=case: drive(comm, case)))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dense"])
def test_what_is_applied_in_bf16_are_numbers_that_it_carries(name: str) -> None:
    """On one rank: whoever sends nothing rounds alike."""
    case = Case(name, "heavy", n=200, k=20, steps=5, wire_dtype="bf16")
    for step in simulate(1, lambda comm: drive(comm, case))[0]:
        assert bool(torch.count_nonzero(step.mean))
        assert torch.equal(step.mean, step.mean.to(torch.bfloat16).float())
        assert not torch.equal(step.acc, step.acc.to(torch.bfloat16).float())


# --- whatever does the work, the bits are the same


@pytest.mark.parametrize("wire_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_all_kernels_take_the_same_steps(name: str, wire_dtype: str) -> None:
    for kind in ("heavy", "ties", "tiny", "moving", "some_silent"):
        steps = {}
        for kernels in KERNELS:
            case = Case(*(name, kind, 203, 8, 10), seed=17, tau=4, tau_prime=3, kernels=kernels, wire_dtype=wire_dtype)
            steps[kernels] = simulate(3, lambda comm, case=case: drive(comm, case))
        assert_same_steps(steps["torch"], steps["numba"])


@pytest.mark.parametrize("thresholds", ["exact", "reuse"])
@pytest.mark.parametrize("selector", ["bucket", "forgetful"])
def test_all_kernels_take_the_same_steps_with_many_elements(selector: str, thresholds: str) -> None:
    """Enough of them for samples to be taken, for room to run short, and for counts not to be exactly k."""
    first, other = (
        Case("oktopk", "synthetic", 100_000, 3000, 6, kernels=kernels, thresholds=thresholds, selector=selector)
        for kernels in KERNELS
    )
    assert_same_steps(
        simulate(2, lambda comm: drive(comm, first)),
        simulate(2, lambda comm: drive(comm, other)),
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dense"])
@pytest.mark.parametrize("kind", ["synthetic_spike", "synthetic_drop", "ties", "some_silent", "tiny"])
def test_a_selector_that_remembers_takes_the_steps_of_one_that_looks_at_everything(name: str, kind: str) -> None:
    reference, remembering = (
        Case(name, kind, 900, 20, 24, seed=19, tau=4, tau_prime=3, selector=selector)
        for selector in ("reference", "bucket")
    )
    assert_same_steps(
        simulate(2, lambda comm: drive(comm, reference)),
        simulate(2, lambda comm: drive(comm, remembering)),
    )


@pytest.mark.parametrize("kind", gradients.KINDS)
def test_law_where_thresholds_are_reused(kind: str) -> None:
    for size in (1, 3, 4):
        case = Case("oktopk", kind, n=203, k=8, steps=30, seed=11, tau=7, tau_prime=5, thresholds="reuse")
        assert_lawful(simulate(size, lambda comm, case=case: drive(comm, case)))


# --- edges


@pytest.mark.parametrize("name", NAMES)
def test_all_elements_at_density_one_are_the_dense_mean(name: str) -> None:
    case = Case(name, "normal", n=50, k=50, steps=3, seed=2)
    by_rank = simulate(4, lambda comm: drive(comm, case))
    for together in zip(*by_rank, strict=True):
        expected = torch.stack([step.acc for step in together]).mean(0)
        torch.testing.assert_close(together[0].mean, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_fewer_elements_than_ranks(name: str, n: int) -> None:
    case = Case(name, "normal", n=n, k=1, steps=4, seed=7, tau=2, tau_prime=2)
    assert_lawful(simulate(7, lambda comm: drive(comm, case)))


def largest(acc: torch.Tensor, k: int) -> np.ndarray:
    """Where the k largest lie; lower indices win ties."""
    return np.argsort(-np.abs(acc.numpy()), kind="stable")[:k]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("dense", "oktopk")])  # oktopk: see below
def test_counts_are_those_of_the_table_while_residuals_grow(name: str) -> None:
    """README's: exactly k here, but for the two that go by a threshold; k in all, or the union of what was chosen."""
    case = Case(name, "synthetic", n=20_000, k=200, steps=STEPS)
    by_rank = simulate(4, lambda comm: drive(comm, case))
    for number, together in enumerate(zip(*by_rank, strict=True)):
        chosen = set[int]()
        for step in together:
            count = step.reduction.local_count
            chosen |= set(largest(step.acc, count).tolist())
            if name.startswith("gaussiank"):
                threshold = ReferenceSelector().normal_threshold(Accumulated(step.acc), case.k)
                assert count == int((step.acc.abs() >= threshold).sum()) >= 0.75 * case.k, f"step {number}"
            elif name == "topkAopt":
                assert 0.75 * case.k <= count <= case.k, f"step {number}"
            else:
                assert count == case.k, f"step {number}"
        applied = set(together[0].mean.numpy().nonzero()[0].tolist())
        assert len(applied) == together[0].reduction.global_count
        if name in ("topkA2", "gtopk"):
            assert len(applied) == case.k, f"step {number}"
            assert applied < chosen
        else:
            assert applied == chosen, f"step {number}"


def chosen_sums(accs: list[torch.Tensor], k: int) -> np.ndarray:
    """What each rank's k largest sum to, added in rank order; lower indices win ties."""
    total = np.zeros(accs[0].numel(), dtype=np.float32)
    for acc in accs:
        best = largest(acc, k)
        total[best] += acc.numpy()[best]
    return total


@pytest.mark.parametrize("kind", [*gradients.SCHEDULES, "ties", "all_tied", "spiky", "moving", "one_hot", "zeros"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("k", [40, 200])
def test_oktopk_counts_are_exact_in_every_step(kind: str, size: int, k: int) -> None:
    """k here, or all there is; k of the sums and up to k/64 more, or all that are not zero; larger ones first."""
    case = Case("oktopk", kind, n=20_000, k=k, steps=34, tau=16)
    by_rank = simulate(size, lambda comm: drive(comm, case))
    for number, together in enumerate(zip(*by_rank, strict=True)):
        for step in together:
            assert step.reduction.local_count == min(k, int(torch.count_nonzero(step.acc))), f"step {number}"
        sums = np.abs(chosen_sums([step.acc for step in together], k))
        global_count = together[0].reduction.global_count
        assert min(k, np.count_nonzero(sums)) <= global_count <= k + k // 64 <= 1.02 * k, f"step {number}"
        applied = together[0].mean.numpy() != 0
        assert np.count_nonzero(applied) == global_count
        if global_count:
            assert sums[applied].min() >= sums[~applied].max()


# --- oktopk against an independent, straightforward oracle


def oracle_step(accs: list[torch.Tensor], k: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Ok-Topk with exact thresholds, as the definition says it, with whole vectors."""
    n = accs[0].numel()
    chosen = []
    for acc in accs:
        order = sorted(range(n), key=lambda i: (-abs(float(acc[i])), i))[:k]
        mask = torch.zeros(n, dtype=torch.bool)
        mask[order] = True
        chosen.append(mask & (acc != 0))
    total = torch.zeros(n)
    for acc, mask in zip(accs, chosen, strict=True):
        total = total + torch.where(mask, acc, torch.zeros(n))
    applied = torch.zeros(n, dtype=torch.bool)
    applied[sorted(range(n), key=lambda i: (-abs(float(total[i])), i))[:k]] = True
    applied &= total != 0
    mean = torch.where(applied, total / len(accs), torch.zeros(n))
    residuals = [torch.where(mask & applied, torch.zeros(n), acc) for acc, mask in zip(accs, chosen, strict=True)]
    return mean, residuals


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=25)
@given(
    kind=st.sampled_from(gradients.KINDS),
    size=st.integers(1, 6),
    n=st.integers(1, 80),
    k=st.integers(1, 20),
    seed=st.integers(0, 2**31),
    thresholds=st.sampled_from(["exact", "reuse"]),
    selector=st.sampled_from(["bucket", "forgetful"]),
)
def test_oktopk_with_exact_thresholds_equals_the_oracle(
    kernels: str, kind: str, size: int, n: int, k: int, seed: int, thresholds: str, selector: str
) -> None:
    """Thresholds that are reused for one step are exact too."""
    case = Case(
        *("oktopk", kind, n, min(k, n), 8, seed),
        tau=3,
        tau_prime=1,
        kernels=kernels,
        thresholds=thresholds,
        selector=selector,
    )
    by_rank = simulate(size, lambda comm: drive(comm, case))
    for together in zip(*by_rank, strict=True):
        mean, residuals = oracle_step([step.acc for step in together], case.k)
        assert torch.equal(together[0].mean, mean)
        for step, residual in zip(together, residuals, strict=True):
            assert torch.equal(step.residual, residual)


# --- what moves

PER_MESSAGE_BYTES = 32 + 8 + 8  # wire header, length, and the first index of a run
NAMES_WITH_A_BOUND = ["dense", "topkA", "topkA2", "topkAopt", "topkDSA", "gtopk", "oktopk"]


def most_elements(name: str, n: int, k: int, P: int) -> float:
    return {
        "dense": 2 * n * (P - 1) / P,
        "topkA": 2 * k * (P - 1),
        "topkA2": 2 * k * (P - 1),
        "topkAopt": 2 * k * (P - 1),
        "topkDSA": (2 * k + n) * (P - 1) / P,
        "gtopk": 4 * k * math.log2(P),
        "oktopk": 6 * k * (P - 1) / P,
    }[name]


def all_reduce_bytes(num_bytes: int, P: int) -> int:
    """Straight to every peer, where that is at most 16 KB; else around a ring."""
    direct = num_bytes * (P - 1)
    return direct if direct <= 16384 else math.ceil(2 * num_bytes * (P - 1) / P)


def most_control(P: int) -> int:
    """Of oktopk: a histogram of 256 counts around the last threshold, four for its digits, and a few numbers each."""
    return 5 * all_reduce_bytes(8 * 256, P) + 3 * all_reduce_bytes(2 * 8 * P, P)


def control_bytes(step: Step) -> int:
    return sum(r.bytes_sent for r in step.traffic if r.operation == "all_reduce")


@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("name", NAMES_WITH_A_BOUND)
def test_bytes_sent_stay_within_the_formula(name: str, size: int) -> None:
    steps = STEPS if size <= 8 else 6
    case = Case(name, "synthetic", n=60_000, k=600, steps=steps, tau=64 if size <= 8 else 4)
    allowed = 4 * most_elements(name, case.n, case.k, size)
    for steps_of_rank in simulate(size, lambda comm: drive(comm, case)):
        for number, step in enumerate(steps_of_rank):
            bulk = [r for r in step.traffic if r.operation != "all_reduce" or name == "dense"]
            headers = PER_MESSAGE_BYTES * sum(r.messages_sent for r in bulk)
            sent = sum(r.bytes_sent for r in bulk)
            assert sent <= allowed + headers, f"step {number}: {sent} bytes, allowed {allowed:.0f} and {headers}"
            # agreeing on thresholds, counts and regions: a constant, whatever n and k are
            assert name == "dense" or control_bytes(step) <= (most_control(size) if name == "oktopk" else 0)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_step_in_bf16_costs_less_than_eight_bytes_for_each_of_k(size: int) -> None:
    """One byte of gap and two of value, to the owner and from it: 6.2 k(P-1)/P bytes for each rank, on average.

    What ranks agree on besides does not grow with n or k.
    """
    case = Case("oktopk", "synthetic", n=200_000, k=2000, steps=12, wire_dtype="bf16")
    allowed = 8 * case.k * (size - 1) / size
    for number, together in enumerate(zip(*simulate(size, lambda comm: drive(comm, case)), strict=True)):
        bulk = [r for step in together for r in step.traffic if r.operation != "all_reduce"]
        headers = PER_MESSAGE_BYTES * sum(r.messages_sent for r in bulk) / size
        sent = sum(r.bytes_sent for r in bulk) / size
        assert sent <= allowed + headers, f"step {number}: {sent} bytes, allowed {allowed:.0f} and {headers}"
        for step in together:
            assert control_bytes(step) <= most_control(size)


def test_exact_counts_usually_cost_one_histogram() -> None:
    """Once thresholds move slowly: it and the shares are the two all_reduces of most steps."""
    case = Case("oktopk", "synthetic", n=200_000, k=2000, steps=40)
    steps = simulate(4, lambda comm: drive(comm, case))[0][20:]
    few = [step for step in steps if sum(r.operation == "all_reduce" for r in step.traffic) == 2]
    assert len(few) >= 0.9 * len(steps)
    assert all(control_bytes(step) <= all_reduce_bytes(2048, 4) + all_reduce_bytes(2 * 8 * 4, 4) for step in few)


@pytest.mark.parametrize("kind", ["ties", "all_tied", "one_hot"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ties_do_not_break_the_bound_of_oktopk(kind: str, size: int) -> None:
    case = Case("oktopk", kind, n=20_000, k=200, steps=6, tau=2, tau_prime=2)
    allowed = 4 * most_elements("oktopk", case.n, case.k, size)
    for steps in simulate(size, lambda comm: drive(comm, case)):
        for step in steps:
            bulk = [r for r in step.traffic if r.operation != "all_reduce"]
            assert step.reduction.global_count <= case.k + case.k // 64
            assert sum(r.bytes_sent for r in bulk) <= allowed + PER_MESSAGE_BYTES * sum(r.messages_sent for r in bulk)


def test_the_global_threshold_is_reused_between_recomputes() -> None:
    """Once residuals have settled, only every tau' = 32 steps: an exact one takes several all_reduces of 256 counts."""
    case = Case("oktopk", "normal", n=2000, k=200, steps=STEPS, thresholds="reuse")
    steps = simulate(4, lambda comm: drive(comm, case))[0]
    exact = [number for number, step in enumerate(steps) if sum(r.operation == "all_reduce" for r in step.traffic) > 2]
    assert [number for number in exact if number > 20] == [32, 64]


def test_the_busiest_rank_of_oktopk_sends_less_than_that_of_any_other() -> None:
    """In every step and with all that is agreed on, at many ranks; and P/3 times less than an allgather, as the table
    says: 6k(P-1)/P elements instead of 2k(P-1)."""
    size, steps = 16, 3

    def busiest(name: str, *left_out: str) -> list[int]:
        case = Case(name, "synthetic", n=400_000, k=4000, steps=steps, tau=2)
        by_rank = simulate(size, lambda comm: drive(comm, case))
        return [
            max(sum(r.bytes_sent for r in step.traffic if r.operation not in left_out) for step in together)
            for together in zip(*by_rank, strict=True)
        ]

    ours, bulk = busiest("oktopk"), busiest("oktopk", "all_reduce")
    for name in NAMES:
        if name != "oktopk":
            theirs = busiest(name)
            assert all(mine < other for mine, other in zip(ours, theirs, strict=True)), f"{name}: {ours}, {theirs}"
            if name.startswith("topkA"):
                assert all(size / 3 * mine <= other for mine, other in zip(bulk, theirs, strict=True)), name


def test_gaussiankconcat_sends_one_message_where_gaussiank_sends_two() -> None:
    def messages(name: str) -> int:
        case = Case(name, "normal", n=1000, k=20, steps=1)
        return simulate(3, lambda comm: drive(comm, case))[0][0].traffic.__len__()

    assert messages("gaussiank") == 2
    assert messages("gaussiankconcat") == 1


def test_a_share_far_above_average_is_rebalanced() -> None:
    """Regions were agreed on spread data; then all large sums lie in one of them."""
    case = Case("oktopk", "moving", n=4000, k=80, steps=2)
    by_rank = simulate(8, lambda comm: drive(comm, case))
    assert_lawful(by_rank)
    second = [steps[1] for steps in by_rank]
    assert all(sum(r.operation == "all_to_all_v" for r in step.traffic) == 2 for step in second)
    gathers = [sum(r.bytes_sent for r in step.traffic if r.operation == "all_gather_v") for step in second]
    assert max(gathers) <= 1.3 * min(gathers)
