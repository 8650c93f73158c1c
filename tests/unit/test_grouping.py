"""make_groups: which gradients travel together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from oktopk.adapters.grouping import Group, Named, clip_, make_groups

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.zeros(shape, dtype=dtype))


def names(groups: list[Group]) -> list[list[str]]:
    return [[slot.name for slot in group.layout.slots] for group in groups]


def transformer(num_layers: int, width: int = 16) -> Named:
    """bf16 matrices between fp32 norms, as mixed-precision checkpoints have them."""
    named: Named = []
    for layer in range(num_layers):
        named.append((f"{layer}.norm", parameter(width)))
        named.append((f"{layer}.matrix", parameter(width, width, dtype=torch.bfloat16)))
    return named


def as_it_was(named: Named, cap_mb: float) -> list[list[str]]:
    """The rule before kinds were filled side by side: a group ends where the kind changes or the cap is reached."""
    groups: list[list[str]] = []
    room, kind = 0.0, None
    for name, p in reversed(named):
        size_mb = p.numel() * p.element_size() / 2**20
        if kind != p.dtype or size_mb > room:
            groups.append([])
            room = cap_mb
        groups[-1].append(name)
        room, kind = room - size_mb, p.dtype
    return groups


def some_models(dtypes: tuple[torch.dtype, ...]) -> st.SearchStrategy[Named]:
    kinds = st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=2), st.sampled_from(dtypes))
    return st.lists(kinds, min_size=1, max_size=20).map(
        lambda found: [(f"p{number}", parameter(*shape, dtype=dtype)) for number, (shape, dtype) in enumerate(found)]
    )


def test_interleaved_dtypes_make_one_group_each() -> None:
    named = transformer(48)
    assert len(as_it_was(named, 25.0)) == 96
    groups = make_groups(named, 25.0)
    assert len(groups) == 2
    assert {group.flat.dtype for group in groups} == {torch.float32, torch.bfloat16}
    by_dtype = {group.flat.dtype: names([group])[0] for group in groups}
    assert by_dtype[torch.float32] == [f"{layer}.norm" for layer in reversed(range(48))]
    assert by_dtype[torch.bfloat16] == [f"{layer}.matrix" for layer in reversed(range(48))]


def test_interleaved_dtypes_keep_to_the_cap() -> None:
    """Four matrices to a group; norms are small and come last, when the last of them is there."""
    named = transformer(48)
    cap_mb = 4 * 16 * 16 * 2 / 2**20
    groups = make_groups(named, cap_mb)
    matrices = [group for group in groups if group.flat.dtype == torch.bfloat16]
    assert [len(group.parameters) for group in matrices] == [4] * 12
    assert sum(len(group.parameters) for group in groups) == 96
    assert all(group.flat.numel() * group.flat.element_size() / 2**20 <= cap_mb for group in groups)


def test_with_dense_vectors_the_norms_are_one_dense_group_at_the_end() -> None:
    groups = make_groups(transformer(48), 25.0, dense_vectors=True)
    assert [(group.dense, group.flat.dtype) for group in groups] == [(False, torch.bfloat16), (True, torch.float32)]


@given(some_models((torch.float32,)), st.integers(1, 400))
def test_groups_of_one_dtype_are_as_before(named: Named, cap_bytes: int) -> None:
    assert names(make_groups(named, cap_bytes / 2**20)) == as_it_was(named, cap_bytes / 2**20)


@given(some_models((torch.float32,)), st.integers(1, 400))
def test_groups_of_one_dtype_with_dense_vectors_are_as_before(named: Named, cap_bytes: int) -> None:
    cap_mb = cap_bytes / 2**20
    vectors = [(name, p) for name, p in named if p.dim() == 1]
    others = [(name, p) for name, p in named if p.dim() != 1]
    groups = make_groups(named, cap_mb, dense_vectors=True)
    assert names(groups) == [*as_it_was(others, cap_mb), *as_it_was(vectors, cap_mb)]
    assert [group.dense for group in groups] == [False] * len(as_it_was(others, cap_mb)) + [True] * len(
        as_it_was(vectors, cap_mb)
    )


@given(some_models(DTYPES), st.integers(1, 400))
def test_whatever_the_dtypes(named: Named, cap_bytes: int) -> None:
    """Every parameter once; one dtype to a group; within the cap unless alone; each dtype in the order of backward."""
    groups = make_groups(named, cap_bytes / 2**20)
    found = [name for group in names(groups) for name in group]
    assert sorted(found) == sorted(name for name, _ in named)
    for group in groups:
        assert {p.dtype for p in group.parameters} == {group.flat.dtype}
        assert len(group.parameters) == 1 or group.flat.numel() * group.flat.element_size() <= cap_bytes
    for dtype in DTYPES:
        mine = [name for group in groups if group.flat.dtype == dtype for name in names([group])[0]]
        assert mine == [name for name, p in reversed(named) if p.dtype == dtype]
    assert len(groups) <= len(as_it_was(named, cap_bytes / 2**20))


@given(some_models(DTYPES), st.integers(1, 400))
def test_groups_stand_in_the_order_in_which_backward_can_fill_them(named: Named, cap_bytes: int) -> None:
    """By the last gradient each waits for, so none waits for one that comes later, unless another was full before."""
    groups = make_groups(named, cap_bytes / 2**20)
    position = {name: number for number, (name, _) in enumerate(reversed(named))}
    last_needed = [max(position[name] for name in group) for group in names(groups)]
    kinds = [group.flat.dtype for group in groups]
    open_ones = [max(i for i, k in enumerate(kinds) if k == kind) for kind in set(kinds)]
    still_open = [last_needed[i] for i in sorted(open_ones)]
    assert still_open == sorted(still_open)


# --- gradients in and out


def test_gradients_go_in_and_means_come_out_where_they_belong() -> None:
    named = [("a", parameter(2, 3)), ("b", parameter(4)), ("c", parameter(2))]
    (group,) = make_groups(named, 25.0)
    named[0][1].grad = torch.arange(6.0).view(2, 3).t().contiguous().t()  # not in memory order
    named[2][1].grad = torch.tensor([7.0, 8.0])
    group.mark_versions()
    bucket = group.fill()
    assert bucket.missing == {"b"}
    assert [slot.name for slot in bucket.slots] == ["c", "b", "a"]
    assert bucket.flat[:2].tolist() == [7.0, 8.0]
    assert bucket.flat[6:].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    bucket.flat.copy_(torch.arange(12.0))
    group.hand_back(frozenset({"c"}))
    assert named[2][1].grad is None
    assert named[1][1].grad is not None
    assert named[1][1].grad.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert named[0][1].grad.tolist() == [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
    named[1][1].grad.zero_()
    assert group.flat[2:6].tolist() == [2.0, 3.0, 4.0, 5.0], "a new gradient is no view of the group's memory"


def test_a_gradient_that_was_changed_meanwhile_is_refused_by_name() -> None:
    named = [("a", parameter(3)), ("b", parameter(2))]
    (group,) = make_groups(named, 25.0)
    for _, p in named:
        p.grad = torch.ones_like(p)
    group.mark_versions()
    group.fill()
    named[1][1].grad.mul_(2.0)  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(RuntimeError, match="'b' was changed while it was being reduced: do this instead"):
        group.check_versions("do this instead")
    group.mark_versions()
    group.check_versions("do this instead")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_clipping_leaves_what_is_not_finite_to_the_reduction(bad: float) -> None:
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor([bad])]
    clip_(gradients, 1.0)
    assert gradients[0].tolist() == [3.0, 4.0]


def test_clipping_scales_to_the_joint_norm_and_never_up() -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    clip_(gradients, 10.0)
    assert gradients[0].tolist() == [3.0, 0.0]
    clip_(gradients, 2.5)
    assert [g.tolist() for g in gradients] == [[1.5, 0.0], [2.0]]
    clip_([], 1.0)


def test_clipping_scales_to_the_joint_norm() -> None:
    """Here over one; the norm is joint."""
    gradients = [torch.full((4,), 3.0), torch.full((4,), 4.0)]
    clip_(gradients, 1.0)
    assert float(torch.cat(gradients).norm()) == pytest.approx(1.0)
