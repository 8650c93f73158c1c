"""SparseVector, names of layouts, reductions and StepStats against naive numpy oracles."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.bucket import Bucket, Layout
from oktopk.metrics.step_stats import StepStats
from oktopk.reduce.base import DenseReduction, SparseReduction
from oktopk.sparse_vector import SparseVector

LAW = settings(derandomize=True, deadline=None, max_examples=60)
CPU = torch.device("cpu")
# Sums of a few of these stay finite: an overflow would only test numpy's warnings.
VALUES = st.one_of(
    st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45]),
)


def vector(indices: list[int], values: list[float], length: int) -> SparseVector:
    return SparseVector(torch.tensor(indices, dtype=torch.int64), torch.tensor(values, dtype=torch.float32), length)


@st.composite
def sparse_vectors(draw: st.DrawFn, length: int | None = None) -> SparseVector:
    n = draw(st.integers(1, 24)) if length is None else length
    indices = sorted(draw(st.sets(st.integers(0, n - 1))))
    return vector(indices, [draw(VALUES) for _ in indices], n)


@st.composite
def lists_of_vectors(draw: st.DrawFn) -> list[SparseVector]:
    n = draw(st.integers(1, 24))
    return draw(st.lists(sparse_vectors(n), min_size=1, max_size=5))


def bits(values: torch.Tensor) -> list[int]:
    return values.numpy().view(np.int32).tolist()


def same(left: SparseVector, right: SparseVector) -> bool:
    return (
        left.length == right.length
        and left.indices.tolist() == right.indices.tolist()
        and bits(left.values) == bits(right.values)
    )


def oracle_dense(v: SparseVector) -> np.ndarray:
    dense = np.zeros(v.length, dtype=np.float32)
    for index, value in zip(v.indices.tolist(), v.values.numpy(), strict=True):
        dense[index] = value
    return dense


def oracle_sum(vectors: list[SparseVector]) -> dict[int, np.float32]:
    total: dict[int, np.float32] = {}
    for v in vectors:
        for index, value in zip(v.indices.tolist(), v.values.numpy(), strict=True):
            total[index] = np.float32(total.get(index, np.float32(0)) + value)
    return total


# --- SparseVector


@LAW
@given(lists_of_vectors())
def test_sum_is_the_union_with_values_added_in_the_given_order(vectors: list[SparseVector]) -> None:
    before = [(v.indices.clone(), v.values.clone()) for v in vectors]
    total = SparseVector.sum(vectors)
    expected = oracle_sum(vectors)
    assert total.length == vectors[0].length
    assert total.indices.dtype == torch.int64
    assert total.values.dtype == torch.float32
    assert total.indices.tolist() == sorted(expected)
    wanted = np.array([expected[index] for index in sorted(expected)], dtype=np.float32)
    assert bits(total.values + 0.0) == bits(torch.from_numpy(wanted) + 0.0)  # + 0.0: the sign of a zero is free
    for v, (indices, values) in zip(vectors, before, strict=True):
        assert torch.equal(v.indices, indices)
        assert bits(v.values) == bits(values)


def test_sum_depends_on_the_order_only_as_fp32_addition_does() -> None:
    big, one, minus_big = (vector([3], [value], 9) for value in (1e8, 1.0, -1e8))
    assert SparseVector.sum([big, one, minus_big]).values.tolist() == [0.0]
    assert SparseVector.sum([big, minus_big, one]).values.tolist() == [1.0]


def test_sum_keeps_an_index_whose_values_cancel() -> None:
    total = SparseVector.sum([vector([2], [1.5], 4), vector([2], [-1.5], 4)])
    assert total.indices.tolist() == [2]
    assert total.values.tolist() == [0.0]


def test_sum_of_one_vector_owns_its_memory() -> None:
    only = vector([1, 4], [2.0, -3.0], 5)
    total = SparseVector.sum([only])
    assert same(total, only)
    only.values.fill_(9.0)
    assert total.values.tolist() == [2.0, -3.0]


def test_sum_of_empty_vectors_is_empty() -> None:
    total = SparseVector.sum([SparseVector.empty(7, CPU), SparseVector.empty(7, CPU)])
    assert same(total, SparseVector.empty(7, CPU))


@LAW
@given(sparse_vectors())
def test_negate_flips_every_sign_and_nothing_else(v: SparseVector) -> None:
    negated = v.negate()
    assert negated.indices.tolist() == v.indices.tolist()
    assert negated.length == v.length
    assert bits(negated.values) == (v.values.numpy() * np.float32(-1)).view(np.int32).tolist()
    assert same(negated.negate(), v)


@LAW
@given(st.data(), sparse_vectors())
def test_where_keeps_exactly_the_masked_elements(data: st.DataObject, v: SparseVector) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(v), max_size=len(v)))
    kept = v.where(torch.tensor(mask, dtype=torch.bool))
    assert kept.indices.tolist() == [i for i, keep in zip(v.indices.tolist(), mask, strict=True) if keep]
    assert bits(kept.values) == [b for b, keep in zip(bits(v.values), mask, strict=True) if keep]
    assert kept.length == v.length


@LAW
@given(st.data(), sparse_vectors())
def test_restrict_to_is_the_intersection_of_indices(data: st.DataObject, v: SparseVector) -> None:
    allowed = data.draw(st.sets(st.integers(0, v.length - 1)))
    kept = v.restrict_to(torch.tensor(sorted(allowed), dtype=torch.int64))
    held = list(zip(v.indices.tolist(), bits(v.values), strict=True))
    assert kept.length == v.length
    assert list(zip(kept.indices.tolist(), bits(kept.values), strict=True)) == [e for e in held if e[0] in allowed]


def test_picked_takes_what_was_found_among_the_values() -> None:
    v = vector([1, 4, 6, 8], [1.0, -2.0, 3.0, 4.0], 9)
    found = vector([1, 3], [-2.0, 4.0], 4)
    assert same(v.picked(found), vector([4, 8], [-2.0, 4.0], 9))


def test_restrict_to_looks_at_indices_beyond_the_float_range_exactly() -> None:
    v = vector([2**24, 2**24 + 1, 2**31 + 3], [1.0, 2.0, 3.0], 2**31 + 5)
    kept = v.restrict_to(torch.tensor([2**24 + 1, 2**31 + 2], dtype=torch.int64))
    assert kept.indices.tolist() == [2**24 + 1]
    assert kept.values.tolist() == [2.0]


@LAW
@given(st.data(), sparse_vectors())
def test_split_cuts_into_regions_that_join_to_the_whole(data: st.DataObject, v: SparseVector) -> None:
    boundaries = [0, *sorted(data.draw(st.lists(st.integers(0, v.length), max_size=6))), v.length]
    pieces = v.split(boundaries)
    assert len(pieces) == len(boundaries) - 1
    for piece, (lo, hi) in zip(pieces, pairwise(boundaries), strict=True):
        assert piece.length == v.length
        assert piece.indices.tolist() == [i for i in v.indices.tolist() if lo <= i < hi]
        inside = np.zeros(v.length, dtype=np.float32)
        inside[lo:hi] = oracle_dense(v)[lo:hi]
        np.testing.assert_array_equal(oracle_dense(piece), inside)
    joined = SparseVector(torch.cat([p.indices for p in pieces]), torch.cat([p.values for p in pieces]), v.length)
    assert same(joined, v)
    np.testing.assert_array_equal(oracle_dense(SparseVector.sum(pieces)), oracle_dense(v))


def test_split_gives_empty_regions_where_boundaries_meet_or_nothing_lies() -> None:
    v = vector([0, 5, 9], [1.0, 2.0, 3.0], 10)
    pieces = v.split([0, 0, 1, 5, 5, 10, 10])
    assert [p.indices.tolist() for p in pieces] == [[], [0], [], [], [5, 9], []]
    assert [p.length for p in pieces] == [10] * 6


def test_split_of_an_empty_vector_gives_empty_regions() -> None:
    assert [len(p) for p in SparseVector.empty(10, CPU).split([0, 3, 3, 10])] == [0, 0, 0]


def test_split_beyond_32_bits() -> None:
    n = 2**33
    v = vector([0, 2**31, 2**32 + 1, n - 1], [1.0, 2.0, 3.0, 4.0], n)
    assert [p.values.tolist() for p in v.split([0, 2**31, 2**32 + 1, n])] == [[1.0], [2.0], [3.0, 4.0]]


def test_slice_takes_positions_as_views() -> None:
    v = vector([1, 4, 6, 8], [1.0, 2.0, 3.0, 4.0], 9)
    part = v.slice(1, 3)
    assert same(part, vector([4, 6], [2.0, 3.0], 9))
    assert part.indices.data_ptr() == v.indices[1:].data_ptr()
    assert part.values.data_ptr() == v.values[1:].data_ptr()
    assert len(v.slice(2, 2)) == 0
    assert same(v.slice(0, len(v)), v)


@LAW
@given(sparse_vectors())
def test_to_dense_has_the_values_in_place_and_zero_elsewhere(v: SparseVector) -> None:
    dense = v.to_dense()
    assert dense.dtype == torch.float32
    assert bits(dense) == oracle_dense(v).view(np.int32).tolist()


@LAW
@given(st.data(), st.lists(VALUES, min_size=1, max_size=24))
def test_at_takes_the_dense_elements_and_copies_them(data: st.DataObject, values: list[float]) -> None:
    dense = torch.tensor(values, dtype=torch.float32)
    indices = sorted(data.draw(st.sets(st.integers(0, len(values) - 1))))
    taken = SparseVector.at(dense, torch.tensor(indices, dtype=torch.int64))
    expected = [bits(dense)[i] for i in indices]
    dense.fill_(7.0)
    assert taken.length == len(values)
    assert taken.indices.tolist() == indices
    assert bits(taken.values) == expected


def test_empty_holds_nothing_and_is_all_zero_when_dense() -> None:
    nothing = SparseVector.empty(5, CPU)
    assert len(nothing) == 0
    assert (nothing.indices.dtype, nothing.values.dtype) == (torch.int64, torch.float32)
    assert nothing.to_dense().tolist() == [0.0] * 5


def test_len_counts_the_elements_held() -> None:
    assert len(vector([1, 2, 7], [0.0, 0.0, 0.0], 8)) == 3


# --- what a layout is called


def test_a_layouts_name_is_its_first_and_last_parameter() -> None:
    def named(*names: str) -> str:
        return Bucket(torch.zeros(len(names)), Layout.of([(name, 1) for name in names])).name

    assert named("fc.weight", "fc.bias", "out.weight") == "fc.weight..out.weight"
    assert named("fc.weight") == "fc.weight"


def test_a_layouts_key_is_what_saved_states_hold() -> None:
    assert Layout.of([("a", 2), ("b", 3)]).key == "a:2|b:3"


# --- reductions and StepStats


def test_of_a_dense_reduction_all_was_chosen_and_applied() -> None:
    dense = DenseReduction(torch.zeros(3))
    assert (dense.phase, dense.local_count, dense.global_count) == ("dense", 3, 3)
    assert (dense.local_threshold, dense.global_threshold) == (None, None)
    nothing = SparseVector.empty(3, CPU)
    assert SparseReduction(nothing, nothing, local_count=0, global_count=0).phase == "sparse"


def stats(phase: str, n: int, global_count: int) -> StepStats:
    return StepStats(step=0, bucket="b", phase=phase, n=n, k=1, local_count=0, global_count=global_count)


@LAW
@given(st.integers(1, 10**9))
def test_dense_metrics_are_those_of_all_elements(n: int) -> None:
    told = stats("dense", n, n)
    assert (told.sparsity, told.compression_ratio, told.communication_size) == (0.0, 1.0, 4 * n)


@LAW
@given(st.integers(1, 10**9).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_sparse_metrics_follow_the_applied_count(n_and_count: tuple[int, int]) -> None:
    n, count = n_and_count
    told = stats("sparse", n, count)
    assert told.sparsity == 1 - count / n
    assert told.compression_ratio == n / count
    assert told.communication_size == 8 * count


def test_sparse_metrics_stay_finite_where_nothing_was_applied() -> None:
    told = stats("sparse", 1000, 0)
    assert (told.sparsity, told.compression_ratio, told.communication_size) == (1.0, 1000.0, 0)


def test_metrics_do_not_depend_on_the_local_count() -> None:
    one, other = (
        StepStats(step=0, bucket="b", phase="sparse", n=100, k=10, local_count=local, global_count=20)
        for local in (1, 99)
    )
    assert (one.sparsity, one.compression_ratio, one.communication_size) == (0.8, 5.0, 160)
    assert (other.sparsity, other.compression_ratio, other.communication_size) == (0.8, 5.0, 160)
