"""Error feedback: what is kept, when, for whom, and that nothing is lost or shared."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.bucket import Bucket
from oktopk.feedback.residual import ErrorFeedback, MomentumResidual, NamedBuffers, Residual
from oktopk.sparse_vector import SparseVector

LAW = settings(derandomize=True, deadline=None, max_examples=40)
Layout = list[tuple[str, int]]
AB: Layout = [("a", 2), ("b", 3)]


def bucket_of(layout: Layout, gradient: torch.Tensor | list[float] | None = None) -> Bucket:
    if gradient is None:
        gradient = torch.zeros(sum(size for _, size in layout))
    return Bucket(torch.as_tensor(gradient), Bucket.layout(layout))


def sparse(indices: list[int], values: list[float], length: int) -> SparseVector:
    return SparseVector(torch.tensor(indices, dtype=torch.int64), torch.tensor(values, dtype=torch.float32), length)


def holding(by_name: dict[str, list[float]]) -> Residual:
    """A Residual that owes these."""
    feedback = Residual()
    for name, values in by_name.items():
        keep(feedback, bucket_of([(name, len(values))], values))
    return feedback


def keep(feedback: ErrorFeedback, bucket: Bucket) -> None:
    """A step in which nothing was applied."""
    acc = feedback.compensate(bucket)
    feedback.retain(bucket, acc, SparseVector.empty(bucket.numel, acc.device), None)
    feedback.commit()


def owed(feedback: ErrorFeedback, layout: Layout) -> list[float]:
    """What a zero gradient would be compensated to, in a Residual; nothing is changed by asking."""
    found = feedback.compensate(bucket_of(layout)).tolist()
    feedback.roll_back()
    return found


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.numpy().view(np.int32).tolist()


FEEDBACKS: list[Callable[[], ErrorFeedback]] = [Residual, lambda: MomentumResidual(0.5)]
each_feedback = pytest.mark.parametrize("make", FEEDBACKS, ids=["Residual", "MomentumResidual"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)


# --- the law: acc = residual + gradient


@each_feedback
@each_dtype
def test_the_first_acc_is_the_gradient_in_fp32_and_a_tensor_of_its_own(
    make: Callable[[], ErrorFeedback], dtype: torch.dtype
) -> None:
    bucket = bucket_of(AB, torch.tensor([0.1, -2.0, 3.0, 1e-3, 0.0], dtype=dtype))
    before = bucket.gradient.clone()
    acc = make().compensate(bucket)
    assert acc.dtype == torch.float32
    assert bits(acc) == bits(before.to(torch.float32))
    acc.fill_(9.0)
    assert torch.equal(bucket.gradient, before)


@each_dtype
def test_acc_is_residual_plus_gradient_in_fp32_for_any_dtype(dtype: torch.dtype) -> None:
    feedback = holding({"a": [0.3, 1e-8], "b": [-1.0, 2.0**-30, 7.0]})
    gradient = torch.tensor([0.1, 1.0, 3.0, 1e-3, -7.0], dtype=dtype)
    expected = np.array([0.3, 1e-8, -1.0, 2.0**-30, 7.0], dtype=np.float32) + gradient.float().numpy()
    acc = feedback.compensate(bucket_of(AB, gradient))
    assert acc.dtype == torch.float32
    assert bits(acc) == expected.view(np.int32).tolist()


@each_dtype
def test_the_residual_is_fp32_whatever_the_gradient_is(dtype: torch.dtype) -> None:
    feedback = Residual()
    keep(feedback, bucket_of([("a", 2)], torch.tensor([1.0, 2.0], dtype=dtype)))
    keep(feedback, bucket_of([("a", 2)], torch.tensor([2.0**-12, -2.0], dtype=dtype)))
    saved = feedback.state_dict()["residual"]["a"]
    assert saved.dtype == torch.float32
    assert saved.tolist() == [1.0 + 2.0**-12, 0.0]


def test_a_gradient_that_requires_grad_leaves_no_graph_behind() -> None:
    bucket = bucket_of([("a", 2)], torch.ones(2, requires_grad=True))
    feedback = Residual()
    assert not feedback.compensate(bucket).requires_grad
    keep(feedback, bucket)
    assert not feedback.compensate(bucket).requires_grad


@each_feedback
def test_compensate_leaves_what_is_stored_as_it_is(make: Callable[[], ErrorFeedback]) -> None:
    feedback = make()
    keep(feedback, bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0]))
    state = {kind: {n: v.tolist() for n, v in part.items()} for kind, part in feedback.state_dict().items()}
    first = feedback.compensate(bucket_of(AB, [1.0] * 5))
    expected = first.tolist()
    first.fill_(100.0)
    feedback.roll_back()
    assert feedback.compensate(bucket_of(AB, [1.0] * 5)).tolist() == expected
    feedback.roll_back()
    assert state == {kind: {n: v.tolist() for n, v in part.items()} for kind, part in feedback.state_dict().items()}


@LAW
@given(st.data())
def test_what_is_applied_and_what_is_kept_add_up_to_what_came_in(data: st.DataObject) -> None:
    """Integers, so that fp32 is exact: over any run of sparse, dense and rolled back steps nothing is lost."""
    feedback, n = Residual(), 5
    came_in, applied = np.zeros(n), np.zeros(n)
    for _ in range(data.draw(st.integers(1, 6))):
        gradient = data.draw(st.lists(st.integers(-1000, 1000), min_size=n, max_size=n))
        bucket = bucket_of(AB, torch.tensor(gradient, dtype=torch.float32))
        acc = feedback.compensate(bucket)
        np.testing.assert_array_equal(acc.numpy(), came_in - applied + gradient)
        kind = data.draw(st.sampled_from(["sparse", "dense", "rolled back"]))
        if kind == "dense":
            contribution: torch.Tensor | SparseVector = acc
            sent = acc.numpy().copy()
        else:
            indices = sorted(data.draw(st.sets(st.integers(0, n - 1))))
            contribution = SparseVector.at(acc, torch.tensor(indices, dtype=torch.int64))
            sent = contribution.to_dense().numpy()
        feedback.retain(bucket, acc, contribution, None)
        if kind == "rolled back":
            feedback.roll_back()
        else:
            feedback.commit()
            came_in += gradient
            applied += sent
    np.testing.assert_array_equal(owed(feedback, AB), came_in - applied)


# --- retain, commit, roll back


def test_retain_keeps_what_a_sparse_contribution_did_not_take() -> None:
    feedback = Residual()
    bucket = bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0])
    acc = feedback.compensate(bucket)
    left = feedback.retain(bucket, acc, sparse([1, 4], [2.0, 1.5], 5), None)
    assert left is not None
    assert left.tolist() == [1.0, 0.0, 3.0, 4.0, 3.5]
    feedback.commit()
    assert owed(feedback, AB) == [1.0, 0.0, 3.0, 4.0, 3.5]


def test_retain_keeps_what_a_dense_contribution_did_not_take() -> None:
    feedback = Residual()
    bucket = bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0])
    left = feedback.retain(bucket, feedback.compensate(bucket), torch.tensor([1.0, 0.0, 3.5, 0.0, 5.0]), None)
    feedback.commit()
    assert left is not None
    assert left.tolist() == [0.0, 2.0, -0.5, 4.0, 0.0]
    assert owed(feedback, AB) == [0.0, 2.0, -0.5, 4.0, 0.0]


def test_retain_of_everything_leaves_nothing() -> None:
    feedback = holding({"a": [1.0, 2.0], "b": [3.0, 4.0, 5.0]})
    bucket = bucket_of(AB, [1.0] * 5)
    acc = feedback.compensate(bucket)
    assert feedback.retain(bucket, acc, acc, None) is None
    feedback.commit()
    assert owed(feedback, AB) == [0.0] * 5
    assert feedback.state_dict() == {"residual": {}}


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        (torch.tensor([0.25, 0.0, -0.5, 0.0, 0.0]), [0.25, 0.0, -0.5, 0.0, 0.0]),
        (sparse([0, 2], [0.25, -0.5], 5), [0.25, 0.0, -0.5, 0.0, 0.0]),
    ],
    ids=["dense", "sparse"],
)
def test_what_rounding_took_from_a_dense_step_is_kept(rounding: Any, expected: list[float]) -> None:
    feedback = Residual()
    bucket = bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0])
    acc = feedback.compensate(bucket)
    left = feedback.retain(bucket, acc, acc, rounding)
    feedback.commit()
    assert left is not None
    assert left.tolist() == expected
    assert owed(feedback, AB) == expected


def test_what_rounding_took_from_a_sparse_step_is_kept_beside_the_rest() -> None:
    feedback = Residual()
    bucket = bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0])
    acc = feedback.compensate(bucket)
    feedback.retain(bucket, acc, sparse([0, 2], [1.0, 3.0], 5), sparse([0, 2, 3], [0.25, -0.5, 1.0], 5))
    feedback.commit()
    assert owed(feedback, AB) == [0.25, 2.0, -0.5, 5.0, 5.0]


@each_feedback
def test_nothing_is_kept_before_commit(make: Callable[[], ErrorFeedback]) -> None:
    feedback = make()
    bucket = bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0])
    acc = feedback.compensate(bucket)
    feedback.retain(bucket, acc, sparse([0], [1.0], 5), None)
    assert all(not part for part in feedback.state_dict().values())
    feedback.commit()
    assert feedback.state_dict()["residual"]["a"].tolist() == [0.0, 2.0]
    assert feedback.state_dict()["residual"]["b"].tolist() == [3.0, 4.0, 5.0]


@each_feedback
def test_roll_back_forgets_every_bucket_since_the_last_commit(make: Callable[[], ErrorFeedback]) -> None:
    feedback, untouched = make(), make()
    for each in (feedback, untouched):
        keep(each, bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0]))
        keep(each, bucket_of([("c", 1)], [6.0]))
    for bucket in (bucket_of(AB, [10.0] * 5), bucket_of([("c", 1)], [10.0])):
        acc = feedback.compensate(bucket)
        feedback.retain(bucket, acc, SparseVector.at(acc, torch.tensor([0])), None)
    feedback.roll_back()
    feedback.commit()
    for layout in (AB, [("c", 1)]):
        assert owed(feedback, layout) == owed(untouched, layout)


@each_feedback
def test_one_commit_keeps_all_the_buckets_of_a_step(make: Callable[[], ErrorFeedback]) -> None:
    together, apart = make(), make()
    for _ in range(2):
        for bucket in (bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0]), bucket_of([("c", 1)], [6.0])):
            for each in (together, apart):
                acc = each.compensate(bucket)
                each.retain(bucket, acc, SparseVector.at(acc, torch.tensor([0])), None)
            apart.commit()
        together.commit()
    for layout in (AB, [("c", 1)]):
        assert owed(together, layout) == owed(apart, layout)
    assert any(owed(together, AB))


@each_feedback
def test_two_instances_share_nothing(make: Callable[[], ErrorFeedback]) -> None:
    one, other = make(), make()
    keep(one, bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0]))
    assert owed(other, AB) == [0.0] * 5
    assert all(not part for part in other.state_dict().values())
    keep(other, bucket_of(AB, [-1.0] * 5))
    assert one.state_dict()["residual"]["a"].tolist() == [1.0, 2.0]


# --- bucket rebuilds


OLD: list[Layout] = [[("a", 2), ("b", 3)], [("c", 1)]]
REBUILDS: dict[str, list[Layout]] = {
    "same": OLD,
    "order within a bucket changed": [[("b", 3), ("a", 2)], [("c", 1)]],
    "order of the buckets changed": [[("c", 1)], [("a", 2), ("b", 3)]],
    "merged": [[("c", 1), ("b", 3), ("a", 2)]],
    "split": [[("b", 3)], [("a", 2)], [("c", 1)]],
    "moved between buckets": [[("a", 2)], [("c", 1), ("b", 3)]],
}


@each_feedback
@pytest.mark.parametrize("layouts", REBUILDS.values(), ids=REBUILDS)
def test_residuals_follow_their_parameters_through_a_rebuild(
    make: Callable[[], ErrorFeedback], layouts: list[Layout]
) -> None:
    """The same gradients by name, with and without a rebuild half way: the same debts by name."""
    rng = np.random.default_rng(3)
    rebuilt, steady = make(), make()
    for step in range(6):
        by_name = {name: rng.integers(-8, 9, size).tolist() for name, size in (("a", 2), ("b", 3), ("c", 1))}
        for feedback, used in ((rebuilt, layouts if step >= 3 else OLD), (steady, OLD)):
            for layout in used:
                bucket = bucket_of(layout, [float(value) for name, _ in layout for value in by_name[name]])
                acc = feedback.compensate(bucket)
                sent = [slot.offset for slot in bucket.slots if step % 2 == 0 or slot.name == "a"]
                feedback.retain(bucket, acc, SparseVector.at(acc, torch.tensor(sent, dtype=torch.int64)), None)
            feedback.commit()
    for kind, part in steady.state_dict().items():
        assert {n: v.tolist() for n, v in rebuilt.state_dict()[kind].items()} == {
            n: v.tolist() for n, v in part.items()
        }
        assert any(any(v.tolist()) for v in part.values())


def test_a_rebuilt_layout_gathers_by_name_and_absent_means_zero() -> None:
    feedback = holding({"a": [1.0, 2.0], "b": [3.0, 4.0, 5.0]})
    assert owed(feedback, [("b", 3), ("new", 2), ("a", 2)]) == [3.0, 4.0, 5.0, 0.0, 0.0, 1.0, 2.0]
    assert owed(feedback, [("new", 2)]) == [0.0, 0.0]


def test_going_back_to_an_old_layout_finds_the_newest_values() -> None:
    memory = NamedBuffers()
    memory.put(bucket_of(AB), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    memory.put(bucket_of([("a", 2)]), torch.tensor([10.0, 20.0]))
    found = memory.get(bucket_of(AB))
    assert found is not None
    assert found.tolist() == [10.0, 20.0, 3.0, 4.0, 5.0]


def test_going_back_to_an_old_layout_does_not_revive_what_was_taken() -> None:
    memory = NamedBuffers()
    memory.put(bucket_of(AB), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    memory.take(bucket_of([("a", 2)]))
    found = memory.get(bucket_of(AB))
    assert found is not None
    assert found.tolist() == [0.0, 0.0, 3.0, 4.0, 5.0]


def test_a_dense_step_in_another_layout_applies_a_residual_once() -> None:
    """Kept as one bucket, applied in full as two, then one bucket again: the debt is paid."""
    feedback = Residual()
    keep(feedback, bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0]))
    for layout in ([("a", 2)], [("b", 3)]):
        bucket = bucket_of(layout)
        acc = feedback.compensate(bucket)
        assert any(acc.tolist())
        feedback.retain(bucket, acc, acc, None)
    feedback.commit()
    assert owed(feedback, AB) == [0.0] * 5


Action = tuple[str, Layout]
LAYOUTS: list[Layout] = [AB, [("b", 3), ("a", 2)], [("a", 2)], [("b", 3)], [("c", 1), ("a", 2)], [("c", 1)]]


@LAW
@given(st.lists(st.tuples(st.sampled_from(["put", "take", "get"]), st.sampled_from(LAYOUTS)), max_size=8))
def test_named_buffers_are_a_dictionary_from_name_to_values(actions: list[Action]) -> None:
    memory, oracle = NamedBuffers(), dict[str, list[float]]()
    for turn, (action, layout) in enumerate(actions):
        bucket = bucket_of(layout)
        if action == "put":
            flat = [10.0 * turn + i for i in range(bucket.numel)]
            memory.put(bucket, torch.tensor(flat))
            oracle |= {slot.name: flat[slot.offset : slot.offset + slot.numel] for slot in bucket.slots}
        elif action == "take":
            memory.take(bucket)
            for slot in bucket.slots:
                oracle.pop(slot.name, None)
        found = memory.get(bucket)
        expected = [value for name, size in layout for value in oracle.get(name, [0.0] * size)]
        assert (found.tolist() if found is not None else [0.0] * bucket.numel) == expected
        assert {name: value.tolist() for name, value in memory.state_dict().items()} == oracle


def test_named_buffers_hand_out_the_same_memory_for_a_known_layout() -> None:
    memory = NamedBuffers()
    flat = torch.arange(5.0)
    memory.put(bucket_of(AB), flat)
    assert memory.get(bucket_of(AB)) is flat
    assert memory.get(bucket_of([("z", 1)])) is None


def test_taking_gives_the_memory_back_only_where_it_was_one_tensor_of_that_layout() -> None:
    memory = NamedBuffers()
    flat = torch.arange(5.0)
    memory.put(bucket_of(AB), flat)
    assert memory.take(bucket_of([("a", 2)])) is None
    memory.put(bucket_of(AB), flat)
    assert memory.take(bucket_of(AB)) is flat
    assert memory.take(bucket_of(AB)) is None
    assert memory.get(bucket_of(AB)) is None
    assert memory.state_dict() == {}


# --- whose addition, and in which memory


@each_feedback
@each_dtype
def test_the_last_addition_is_the_callers(make: Callable[[], ErrorFeedback], dtype: torch.dtype) -> None:
    """It gets no residual at first, later what is stored; its result is `acc`, its `out` nobody else's memory."""
    feedback = make()
    calls: list[torch.Tensor | None] = []

    def accumulate(residual: torch.Tensor | None, gradient: torch.Tensor, out: torch.Tensor) -> None:
        assert (out.dtype, out.shape, out.is_contiguous()) == (torch.float32, gradient.shape, True)
        calls.append(None if residual is None else residual.clone())
        total = gradient.float() if residual is None else residual + gradient.float()
        out.copy_(total + 1000.0)

    bucket = bucket_of(AB, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=dtype))
    acc = feedback.compensate(bucket, accumulate)
    assert acc.tolist() == [1001.0, 1002.0, 1003.0, 1004.0, 1005.0]
    feedback.retain(bucket, acc, sparse([0], [1001.0], 5), None)
    feedback.commit()
    feedback.compensate(bucket, accumulate)
    assert calls[0] is None
    assert calls[1] is not None
    assert calls[1].tolist() == [0.0, 1002.0, 1003.0, 1004.0, 1005.0]


@each_feedback
def test_an_accumulate_that_sums_is_as_none_at_all(make: Callable[[], ErrorFeedback]) -> None:
    plain, given_one = make(), make()

    def accumulate(residual: torch.Tensor | None, gradient: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(gradient if residual is None else gradient + residual)

    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        bucket = bucket_of(AB, torch.randn(5, generator=generator))
        expected, found = plain.compensate(bucket), given_one.compensate(bucket, accumulate)
        assert bits(found) == bits(expected)
        for feedback, acc in ((plain, expected), (given_one, found)):
            feedback.retain(bucket, acc, SparseVector.at(acc, torch.tensor([2])), None)
            feedback.commit()


def test_the_memory_of_the_last_step_is_used_again_two_steps_later() -> None:
    """What a step gives up is where the next one puts its `acc`: two buffers take turns."""
    feedback = Residual()
    addresses = []
    for _ in range(8):
        bucket = bucket_of([("a", 1000)], torch.ones(1000))
        acc = feedback.compensate(bucket)
        addresses.append(acc.data_ptr())
        feedback.retain(bucket, acc, SparseVector.at(acc, torch.tensor([3])), None)
        feedback.commit()
    assert addresses[2:] == addresses[:-2]
    assert addresses[0] != addresses[1]
    assert owed(feedback, [("a", 1000)])[:5] == [8.0, 8.0, 8.0, 0.0, 8.0]


def test_memory_that_is_used_again_never_holds_two_debts() -> None:
    """Buckets of the same and of other sizes, committed together or one by one, some in full: names keep theirs."""
    generator = torch.Generator().manual_seed(6)
    sizes = {"a": 8, "b": 8, "c": 5, "d": 8}
    feedback = Residual()
    expected = {name: torch.zeros(size) for name, size in sizes.items()}
    for step in range(12):
        for name, size in sizes.items():
            gradient = torch.randint(-9, 10, (size,), generator=generator).float()
            bucket = bucket_of([(name, size)], gradient)
            acc = feedback.compensate(bucket)
            expected[name] += gradient
            assert acc.tolist() == expected[name].tolist()
            if (step + size) % 4 == 0 and name != "b":
                feedback.retain(bucket, acc, acc, None)
                expected[name].zero_()
            else:
                feedback.retain(bucket, acc, SparseVector.at(acc, torch.tensor([step % size])), None)
                expected[name][step % size] = 0.0
            if step % 3 == 0:
                feedback.commit()
        feedback.commit()
    for name, size in sizes.items():
        assert owed(feedback, [(name, size)]) == expected[name].tolist()


@each_feedback
def test_a_rolled_back_step_leaves_what_is_stored_bit_for_bit(make: Callable[[], ErrorFeedback]) -> None:
    """Also where it wrote into its `acc`, or its `accumulate` put NaN there; the next step starts from the same."""
    generator = torch.Generator().manual_seed(9)
    feedback = make()
    for _ in range(4):  # so that memory is already being used again
        bucket = bucket_of(AB, torch.randn(5, generator=generator))
        acc = feedback.compensate(bucket)
        feedback.retain(bucket, acc, SparseVector.at(acc, torch.tensor([1])), None)
        feedback.commit()
    before = {kind: {n: bits(v) for n, v in part.items()} for kind, part in feedback.state_dict().items()}
    gradient = torch.randn(5, generator=generator)
    expected = bits(feedback.compensate(bucket_of(AB, gradient)))
    feedback.roll_back()
    for retains in (False, True, True):
        bucket = bucket_of(AB, [float("nan"), float("inf"), 1.0, 2.0, 3.0])
        acc = feedback.compensate(bucket)
        if retains:
            feedback.retain(bucket, acc, SparseVector.at(acc, torch.tensor([0, 4])), None)
        acc.fill_(float("nan"))
        feedback.roll_back()
        after = {kind: {n: bits(v) for n, v in part.items()} for kind, part in feedback.state_dict().items()}
        assert after == before
    assert bits(feedback.compensate(bucket_of(AB, gradient))) == expected


# --- saved state


@each_feedback
def test_state_goes_through_a_file_and_continues_bit_for_bit(make: Callable[[], ErrorFeedback]) -> None:
    generator = torch.Generator().manual_seed(5)

    def step(feedback: ErrorFeedback, gradient: torch.Tensor) -> torch.Tensor:
        bucket = bucket_of(AB, gradient)
        acc = feedback.compensate(bucket)
        owed_now = acc.clone()
        feedback.retain(bucket, acc, SparseVector.at(acc, torch.tensor([1, 3])), None)
        feedback.commit()
        return owed_now

    original, restored = make(), make()
    for _ in range(3):
        step(original, torch.randn(5, generator=generator))
    restored.load_state_dict(through_a_file(original.state_dict()))
    for _ in range(3):
        gradient = torch.randn(5, generator=generator)
        assert bits(step(restored, gradient)) == bits(step(original, gradient))


def test_state_may_be_loaded_into_another_layout() -> None:
    saved = through_a_file(holding({"a": [1.0, 2.0], "b": [3.0, 4.0, 5.0]}).state_dict())
    restored = Residual()
    restored.load_state_dict(saved)
    assert owed(restored, [("b", 3), ("a", 2)]) == [3.0, 4.0, 5.0, 1.0, 2.0]


def test_saved_state_is_a_copy_in_both_directions() -> None:
    feedback = holding({"a": [1.0, 2.0]})
    saved = feedback.state_dict()
    keep(feedback, bucket_of([("a", 2)], [1.0, 1.0]))
    assert saved["residual"]["a"].tolist() == [1.0, 2.0]
    restored = Residual()
    restored.load_state_dict(saved)
    saved["residual"]["a"].fill_(50.0)
    assert owed(restored, [("a", 2)]) == [1.0, 2.0]


def test_saved_state_has_only_the_parameters_own_memory() -> None:
    feedback = Residual()
    keep(feedback, bucket_of([("a", 2), ("b", 1000)], torch.ones(1002)))
    assert feedback.state_dict()["residual"]["a"].untyped_storage().nbytes() == 8


def test_state_of_another_dtype_or_shape_is_loaded_flat_and_fp32() -> None:
    restored = Residual()
    restored.load_state_dict({"residual": {"a": torch.tensor([[1.0], [2.0]], dtype=torch.float64)}})
    assert owed(restored, [("a", 2)]) == [1.0, 2.0]
    assert restored.state_dict()["residual"]["a"].dtype == torch.float32


@each_feedback
def test_loading_replaces_everything_that_was_there(make: Callable[[], ErrorFeedback]) -> None:
    saved = make()
    keep(saved, bucket_of([("a", 2)], [1.0, 2.0]))
    restored, expected = make(), make()
    keep(restored, bucket_of(AB, [9.0] * 5))
    acc = restored.compensate(bucket_of(AB, [9.0] * 5))
    restored.retain(bucket_of(AB), acc, SparseVector.empty(5, acc.device), None)
    restored.load_state_dict(saved.state_dict())
    expected.load_state_dict(saved.state_dict())
    restored.commit()  # what was pending belongs to the time before
    assert owed(restored, AB) == owed(expected, AB)
    assert restored.state_dict().keys() == saved.state_dict().keys()
    for kind, part in saved.state_dict().items():
        assert {n: v.tolist() for n, v in restored.state_dict()[kind].items()} == {
            n: v.tolist() for n, v in part.items()
        }


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("make", "part"),
    [(FEEDBACKS[0], "residual"), (FEEDBACKS[1], "residual"), (FEEDBACKS[1], "velocity")],
    ids=["Residual", "MomentumResidual", "velocity"],
)
def test_damaged_state_is_refused_by_name_and_changes_nothing(
    make: Callable[[], ErrorFeedback], part: str, bad: float
) -> None:
    feedback = make()
    keep(feedback, bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0]))
    before = owed(feedback, AB)
    saved = make()
    keep(saved, bucket_of(AB, [9.0] * 5))
    state = saved.state_dict()
    state[part]["b"][1] = bad
    with pytest.raises(ValueError, match=r"'b'.*NaN or Inf"):
        feedback.load_state_dict(state)
    assert owed(feedback, AB) == before


def test_state_that_overflows_fp32_is_refused() -> None:
    feedback = Residual()
    with pytest.raises(ValueError, match="'a'"):
        feedback.load_state_dict({"residual": {"a": torch.tensor([1e300, 0.0], dtype=torch.float64)}})


def test_state_with_momentum_is_refused_without_it() -> None:
    saved = MomentumResidual(0.9)
    keep(saved, bucket_of(AB, [1.0] * 5))
    feedback = holding({"a": [1.0, 2.0]})
    with pytest.raises(ValueError, match="momentum_correction"):
        feedback.load_state_dict(saved.state_dict())
    assert owed(feedback, [("a", 2)]) == [1.0, 2.0]


def test_state_without_momentum_starts_with_no_velocity() -> None:
    feedback = MomentumResidual(0.5)
    keep(feedback, bucket_of([("a", 2)], [100.0, 100.0]))
    feedback.load_state_dict(holding({"a": [1.0, 2.0]}).state_dict())
    assert owed(feedback, [("a", 2)]) == [1.0, 2.0]


# --- momentum correction


def test_momentum_correction_is_dgc() -> None:
    """Lin et al. 2018: u = m u + g, v = v + u, send v at the mask, zero u and v there. Two buckets, 10 steps."""
    rng = np.random.default_rng(7)
    momentum, sizes = 0.9, {"first": 6, "second": 4}
    feedback = MomentumResidual(momentum)
    velocity = {name: np.zeros(n) for name, n in sizes.items()}
    residual = {name: np.zeros(n) for name, n in sizes.items()}
    for _ in range(10):
        for name, n in sizes.items():
            gradient = rng.normal(size=n)
            mask = rng.random(n) < 0.4
            velocity[name] = momentum * velocity[name] + gradient
            residual[name] = residual[name] + velocity[name]

            bucket = bucket_of([(name, n)], torch.tensor(gradient, dtype=torch.float32))
            acc = feedback.compensate(bucket)
            np.testing.assert_allclose(acc.numpy(), residual[name], rtol=1e-5, atol=1e-5)
            sent = SparseVector.at(acc, torch.from_numpy(mask.nonzero()[0]))
            left = feedback.retain(bucket, acc, sent, None)

            velocity[name][mask] = 0.0
            residual[name][mask] = 0.0
            assert left is not None
            np.testing.assert_allclose(left.numpy(), residual[name], rtol=1e-5, atol=1e-5)
        feedback.commit()
    for name in sizes:
        state = feedback.state_dict()
        np.testing.assert_allclose(state["velocity"][name].numpy(), velocity[name], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state["residual"][name].numpy(), residual[name], rtol=1e-5, atol=1e-5)


def test_dense_steps_with_momentum_correction_are_momentum_sgd() -> None:
    generator = torch.Generator().manual_seed(8)
    start = torch.randn(5, generator=generator)
    expected = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([expected], lr=0.1, momentum=0.9)
    feedback, found = MomentumResidual(0.9), start.clone()
    for _ in range(10):
        gradient = torch.randn(5, generator=generator)
        expected.grad = gradient.clone()
        optimizer.step()
        bucket = bucket_of(AB, gradient)
        acc = feedback.compensate(bucket)
        found -= 0.1 * acc
        assert feedback.retain(bucket, acc, acc, None) is None
        feedback.commit()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)


def test_what_only_stands_in_for_a_sums_rounding_does_not_forget_the_velocity() -> None:
    """An owner of a region subtracts what rounding a sum gained, also where it sent nothing of its own."""
    feedback = MomentumResidual(0.5)
    bucket = bucket_of([("a", 3)], [4.0, 8.0, 16.0])
    acc = feedback.compensate(bucket)
    feedback.retain(bucket, acc, sparse([0, 1, 2], [4.0 + 2.0**-8, 2.0**-8, -(2.0**-8)], 3), None)
    feedback.commit()
    assert feedback.state_dict()["velocity"]["a"].tolist() == [0.0, 8.0, 16.0]
    assert feedback.state_dict()["residual"]["a"].tolist() == [-(2.0**-8), 8.0 - 2.0**-8, 16.0 + 2.0**-8]


def test_a_rolled_back_step_leaves_the_velocity_as_it_was() -> None:
    feedback = MomentumResidual(0.5)
    bucket = bucket_of([("a", 2)], [4.0, 8.0])
    acc = feedback.compensate(bucket)
    feedback.retain(bucket, acc, acc, None)
    feedback.commit()
    acc = feedback.compensate(bucket)
    feedback.retain(bucket, acc, SparseVector.at(acc, torch.tensor([0, 1])), None)
    feedback.roll_back()
    assert owed(feedback, [("a", 2)]) == [2.0, 4.0]


def test_the_velocity_is_forgotten_only_where_something_was_sent() -> None:
    feedback = MomentumResidual(0.5)
    bucket = bucket_of([("a", 2)], [4.0, 8.0])
    acc = feedback.compensate(bucket)
    feedback.retain(bucket, acc, SparseVector.at(acc, torch.tensor([1])), None)
    feedback.commit()
    assert feedback.state_dict()["velocity"]["a"].tolist() == [4.0, 0.0]
    assert owed(feedback, [("a", 2)]) == [4.0 + 2.0, 0.0]


@each_dtype
def test_the_velocity_is_fp32_whatever_the_gradient_is(dtype: torch.dtype) -> None:
    feedback = MomentumResidual(0.5)
    keep(feedback, bucket_of([("a", 1)], torch.tensor([1.0], dtype=dtype)))
    keep(feedback, bucket_of([("a", 1)], torch.tensor([2.0**-12], dtype=dtype)))
    velocity = feedback.state_dict()["velocity"]["a"]
    assert velocity.dtype == torch.float32
    assert velocity.tolist() == [0.5 + 2.0**-12]
