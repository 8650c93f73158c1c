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

from oktopk.bucket import Bucket, Layout
from oktopk.feedback.momentum import Momentum
from oktopk.feedback.named_buffers import NamedBuffers, Spare
from oktopk.feedback.residual import Owed, Residual, write_mean
from oktopk.kernels.base import UpdateRule, Velocity
from oktopk.reduce.base import DenseReduction, Reduction, SparseReduction
from oktopk.registry import make_kernels
from oktopk.select import Accumulated
from oktopk.select.bucket_selector import BucketSelector
from oktopk.sparse_vector import SparseVector

LAW = settings(derandomize=True, deadline=None, max_examples=40)
Named = list[tuple[str, int]]
AB: Named = [("a", 2), ("b", 3)]
CPU = torch.device("cpu")
KERNELS = make_kernels("torch")
LIMIT = 1e38
Make = Callable[[], Residual]


def bucket_of(named: Named, gradient: torch.Tensor | list[float] | None = None) -> Bucket:
    layout = Layout.of(named)
    return Bucket(torch.zeros(layout.numel) if gradient is None else torch.as_tensor(gradient), layout)


def sparse(indices: list[int], values: list[float], length: int) -> SparseVector:
    return SparseVector(torch.tensor(indices, dtype=torch.int64), torch.tensor(values, dtype=torch.float32), length)


def plain() -> Residual:
    return Residual(KERNELS, Momentum("sent"))


class Correcting(Residual):
    """Every step follows the rule of momentum correction."""

    def __init__(self, momentum: float) -> None:
        super().__init__(KERNELS, Momentum("sent"))
        self._rule = UpdateRule(momentum=momentum)

    def compensate(
        self, bucket: Bucket, selector: BucketSelector, k: int, limit: float, rule: UpdateRule | None = None
    ) -> Owed:
        assert rule is None
        return super().compensate(bucket, selector, k, limit, self._rule)


def with_momentum(momentum: float = 0.5) -> Residual:
    return Correcting(momentum)


def compensate(feedback: Residual, bucket: Bucket, k: int = 1) -> Owed:
    return feedback.compensate(bucket, BucketSelector(KERNELS, CPU, CPU), k, LIMIT)


def apply_all(feedback: Residual, owed: Owed, rounding: Any = None) -> torch.Tensor | None:
    """A dense step."""
    return feedback.retain(owed, DenseReduction(owed.acc.values.clone()), rounding)


def apply_some(feedback: Residual, owed: Owed, contribution: SparseVector, rounding: Any = None) -> torch.Tensor | None:
    return feedback.retain(owed, reduction_of(contribution), rounding)


def apply_at(feedback: Residual, owed: Owed, indices: list[int]) -> torch.Tensor | None:
    """All that is owed at these places."""
    places = torch.tensor(indices, dtype=torch.int64)
    return apply_some(feedback, owed, SparseVector.at(owed.acc.values, places))


def reduction_of(contribution: SparseVector) -> Reduction:
    return SparseReduction(contribution, contribution, local_count=len(contribution), global_count=len(contribution))


def keep(feedback: Residual, bucket: Bucket) -> None:
    """A step in which nothing was applied."""
    apply_at(feedback, compensate(feedback, bucket), [])
    feedback.commit()


def holding(by_name: dict[str, list[float]]) -> Residual:
    """A Residual that owes these."""
    feedback = plain()
    for name, values in by_name.items():
        keep(feedback, bucket_of([(name, len(values))], values))
    return feedback


def owed_in(feedback: Residual, named: Named) -> list[float]:
    """What a zero gradient would be compensated to; nothing is changed by asking."""
    found = compensate(feedback, bucket_of(named)).acc.values.tolist()
    feedback.roll_back()
    return found


def stored(feedback: Residual) -> dict[str, dict[str, list[int]]]:
    """All that is stored, bit for bit."""
    return {kind: {name: bits(v) for name, v in part.items()} for kind, part in tensors(feedback).items()}


def tensors(feedback: Residual) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of its state."""
    return {kind: part for kind, part in feedback.state_dict().items() if kind != "own_velocity"}


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.numpy().view(np.int32).tolist()


each_feedback = pytest.mark.parametrize("make", [plain, with_momentum])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)


# --- the law: acc = residual + gradient


@each_feedback
@each_dtype
def test_the_first_acc_is_the_gradient_in_fp32_and_a_tensor_of_its_own(make: Make, dtype: torch.dtype) -> None:
    bucket = bucket_of(AB, torch.tensor([0.1, -2.0, 3.0, 1e-3, 0.0], dtype=dtype))
    before = bucket.flat.clone()
    owed = compensate(make(), bucket)
    assert owed.acc.values.dtype == torch.float32
    assert bits(owed.acc.values) == bits(before.to(torch.float32))
    owed.acc.values.fill_(9.0)
    assert torch.equal(bucket.flat, before)


@each_dtype
def test_acc_is_residual_plus_gradient_in_fp32_for_any_dtype(dtype: torch.dtype) -> None:
    feedback = holding({"a": [0.3, 1e-8], "b": [-1.0, 2.0**-30, 7.0]})
    gradient = torch.tensor([0.1, 1.0, 3.0, 1e-3, -7.0], dtype=dtype)
    expected = np.array([0.3, 1e-8, -1.0, 2.0**-30, 7.0], dtype=np.float32) + gradient.float().numpy()
    owed = compensate(feedback, bucket_of(AB, gradient))
    assert owed.acc.values.dtype == torch.float32
    assert bits(owed.acc.values) == expected.view(np.int32).tolist()


@each_dtype
def test_the_residual_is_fp32_whatever_the_gradient_is(dtype: torch.dtype) -> None:
    feedback = plain()
    keep(feedback, bucket_of([("a", 2)], torch.tensor([1.0, 2.0], dtype=dtype)))
    keep(feedback, bucket_of([("a", 2)], torch.tensor([2.0**-12, -2.0], dtype=dtype)))
    saved = feedback.state_dict()["residual"]["a"]
    assert saved.dtype == torch.float32
    assert saved.tolist() == [1.0 + 2.0**-12, 0.0]


def test_a_gradient_that_requires_grad_leaves_no_graph_behind() -> None:
    bucket = bucket_of([("a", 2)], torch.ones(2, requires_grad=True))
    feedback = plain()
    assert not compensate(feedback, bucket).acc.values.requires_grad
    keep(feedback, bucket)
    assert not compensate(feedback, bucket).acc.values.requires_grad


@each_feedback
def test_compensate_leaves_what_is_stored_as_it_is(make: Make) -> None:
    feedback = make()
    keep(feedback, bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0]))
    state = stored(feedback)
    first = compensate(feedback, bucket_of(AB, [1.0] * 5)).acc.values
    expected = first.tolist()
    first.fill_(100.0)
    feedback.roll_back()
    assert compensate(feedback, bucket_of(AB, [1.0] * 5)).acc.values.tolist() == expected
    feedback.roll_back()
    assert stored(feedback) == state


@LAW
@given(st.data())
def test_what_is_applied_and_what_is_kept_add_up_to_what_came_in(data: st.DataObject) -> None:
    """Integers, so that fp32 is exact: over any run of sparse, dense and rolled back steps nothing is lost."""
    feedback, n = plain(), 5
    came_in, applied = np.zeros(n), np.zeros(n)
    for _ in range(data.draw(st.integers(1, 6))):
        gradient = data.draw(st.lists(st.integers(-1000, 1000), min_size=n, max_size=n))
        bucket = bucket_of(AB, torch.tensor(gradient, dtype=torch.float32))
        owed = compensate(feedback, bucket)
        np.testing.assert_array_equal(owed.acc.values.numpy(), came_in - applied + gradient)
        kind = data.draw(st.sampled_from(["sparse", "dense", "rolled back"]))
        indices = list(range(n)) if kind == "dense" else sorted(data.draw(st.sets(st.integers(0, n - 1))))
        sent = np.zeros(n)
        sent[indices] = owed.acc.values.numpy()[indices]
        if kind == "dense":
            apply_all(feedback, owed)
        else:
            apply_at(feedback, owed, indices)
        if kind == "rolled back":
            feedback.roll_back()
        else:
            feedback.commit()
            came_in += gradient
            applied += sent
    np.testing.assert_array_equal(owed_in(feedback, AB), came_in - applied)


# --- retain, commit, roll back


def test_retain_keeps_what_a_sparse_contribution_did_not_take() -> None:
    feedback = plain()
    bucket = bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0])
    owed = compensate(feedback, bucket)
    left = apply_some(feedback, owed, sparse([1, 4], [2.0, 1.5], 5))
    assert left is not None
    assert left.tolist() == [1.0, 0.0, 3.0, 4.0, 3.5]
    feedback.commit()
    assert owed_in(feedback, AB) == [1.0, 0.0, 3.0, 4.0, 3.5]


def test_retain_of_everything_leaves_nothing() -> None:
    feedback = holding({"a": [1.0, 2.0], "b": [3.0, 4.0, 5.0]})
    bucket = bucket_of(AB, [1.0] * 5)
    owed = compensate(feedback, bucket)
    assert apply_all(feedback, owed) is None
    feedback.commit()
    assert owed_in(feedback, AB) == [0.0] * 5
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
    feedback = plain()
    bucket = bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0])
    owed = compensate(feedback, bucket)
    left = apply_all(feedback, owed, rounding)
    feedback.commit()
    assert left is not None
    assert left.tolist() == expected
    assert owed_in(feedback, AB) == expected


def test_what_rounding_took_from_a_sparse_step_is_kept_beside_the_rest() -> None:
    feedback = plain()
    bucket = bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0])
    owed = compensate(feedback, bucket)
    apply_some(feedback, owed, sparse([0, 2], [1.0, 3.0], 5), sparse([0, 2, 3], [0.25, -0.5, 1.0], 5))
    feedback.commit()
    assert owed_in(feedback, AB) == [0.25, 2.0, -0.5, 5.0, 5.0]


@each_feedback
def test_nothing_is_kept_before_commit(make: Make) -> None:
    feedback = make()
    bucket = bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0])
    owed = compensate(feedback, bucket)
    apply_some(feedback, owed, sparse([0], [1.0], 5))
    assert all(not part for part in feedback.state_dict().values())
    feedback.commit()
    assert feedback.state_dict()["residual"]["a"].tolist() == [0.0, 2.0]
    assert feedback.state_dict()["residual"]["b"].tolist() == [3.0, 4.0, 5.0]


@each_feedback
def test_roll_back_forgets_every_bucket_since_the_last_commit(make: Make) -> None:
    feedback, untouched = make(), make()
    for each in (feedback, untouched):
        keep(each, bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0]))
        keep(each, bucket_of([("c", 1)], [6.0]))
    for bucket in (bucket_of(AB, [10.0] * 5), bucket_of([("c", 1)], [10.0])):
        owed = compensate(feedback, bucket)
        apply_at(feedback, owed, [0])
    feedback.roll_back()
    feedback.commit()
    for layout in (AB, [("c", 1)]):
        assert owed_in(feedback, layout) == owed_in(untouched, layout)


@each_feedback
def test_one_commit_keeps_all_the_buckets_of_a_step(make: Make) -> None:
    together, apart = make(), make()
    for _ in range(2):
        for bucket in (bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0]), bucket_of([("c", 1)], [6.0])):
            for each in (together, apart):
                owed = compensate(each, bucket)
                apply_at(each, owed, [0])
            apart.commit()
        together.commit()
    for layout in (AB, [("c", 1)]):
        assert owed_in(together, layout) == owed_in(apart, layout)
    assert any(owed_in(together, AB))


@each_feedback
def test_two_instances_share_nothing(make: Make) -> None:
    one, other = make(), make()
    keep(one, bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0]))
    assert owed_in(other, AB) == [0.0] * 5
    assert all(not part for part in other.state_dict().values())
    keep(other, bucket_of(AB, [-1.0] * 5))
    assert one.state_dict()["residual"]["a"].tolist() == [1.0, 2.0]


# --- bucket rebuilds


OLD: list[Named] = [[("a", 2), ("b", 3)], [("c", 1)]]
REBUILDS: dict[str, list[Named]] = {
    "same": OLD,
    "order within a bucket changed": [[("b", 3), ("a", 2)], [("c", 1)]],
    "order of the buckets changed": [[("c", 1)], [("a", 2), ("b", 3)]],
    "merged": [[("c", 1), ("b", 3), ("a", 2)]],
    "split": [[("b", 3)], [("a", 2)], [("c", 1)]],
    "moved between buckets": [[("a", 2)], [("c", 1), ("b", 3)]],
}


@each_feedback
@pytest.mark.parametrize("layouts", REBUILDS.values(), ids=REBUILDS)
def test_residuals_follow_their_parameters_through_a_rebuild(make: Make, layouts: list[Named]) -> None:
    """The same gradients by name, with and without a rebuild half way: the same debts by name."""
    rng = np.random.default_rng(3)
    rebuilt, steady = make(), make()
    for step in range(6):
        by_name = {name: rng.integers(-8, 9, size).tolist() for name, size in (("a", 2), ("b", 3), ("c", 1))}
        for feedback, used in ((rebuilt, layouts if step >= 3 else OLD), (steady, OLD)):
            for layout in used:
                bucket = bucket_of(layout, [float(value) for name, _ in layout for value in by_name[name]])
                owed = compensate(feedback, bucket)
                sent = [slot.offset for slot in bucket.slots if step % 2 == 0 or slot.name == "a"]
                apply_at(feedback, owed, sent)
            feedback.commit()
    for kind, part in tensors(steady).items():
        assert {n: v.tolist() for n, v in tensors(rebuilt)[kind].items()} == {n: v.tolist() for n, v in part.items()}
        assert any(any(v.tolist()) for v in part.values())


def test_a_rebuilt_layout_gathers_by_name_and_absent_means_zero() -> None:
    feedback = holding({"a": [1.0, 2.0], "b": [3.0, 4.0, 5.0]})
    assert owed_in(feedback, [("b", 3), ("new", 2), ("a", 2)]) == [3.0, 4.0, 5.0, 0.0, 0.0, 1.0, 2.0]
    assert owed_in(feedback, [("new", 2)]) == [0.0, 0.0]


def test_going_back_to_an_old_layout_finds_the_newest_values() -> None:
    memory = NamedBuffers()
    memory.replace(bucket_of(AB), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    memory.replace(bucket_of([("a", 2)]), torch.tensor([10.0, 20.0]))
    found = memory.get(bucket_of(AB))
    assert found is not None
    assert found.tolist() == [10.0, 20.0, 3.0, 4.0, 5.0]


def test_going_back_to_an_old_layout_does_not_revive_what_was_taken() -> None:
    memory = NamedBuffers()
    memory.replace(bucket_of(AB), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    memory.replace(bucket_of([("a", 2)]), None)
    found = memory.get(bucket_of(AB))
    assert found is not None
    assert found.tolist() == [0.0, 0.0, 3.0, 4.0, 5.0]


def test_a_dense_step_in_another_layout_applies_a_residual_once() -> None:
    """Kept as one bucket, applied in full as two, then one bucket again: the debt is paid."""
    feedback = plain()
    keep(feedback, bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0]))
    for layout in ([("a", 2)], [("b", 3)]):
        bucket = bucket_of(layout)
        owed = compensate(feedback, bucket)
        assert any(owed.acc.values.tolist())
        apply_all(feedback, owed)
    feedback.commit()
    assert owed_in(feedback, AB) == [0.0] * 5


Action = tuple[str, Named]
LAYOUTS: list[Named] = [AB, [("b", 3), ("a", 2)], [("a", 2)], [("b", 3)], [("c", 1), ("a", 2)], [("c", 1)]]


@LAW
@given(st.lists(st.tuples(st.sampled_from(["put", "take", "get"]), st.sampled_from(LAYOUTS)), max_size=8))
def test_named_buffers_are_a_dictionary_from_name_to_values(actions: list[Action]) -> None:
    memory, oracle = NamedBuffers(), dict[str, list[float]]()
    for turn, (action, layout) in enumerate(actions):
        bucket = bucket_of(layout)
        if action == "put":
            flat = [10.0 * turn + i for i in range(bucket.numel)]
            memory.replace(bucket, torch.tensor(flat))
            oracle |= {slot.name: flat[slot.offset : slot.offset + slot.numel] for slot in bucket.slots}
        elif action == "take":
            memory.replace(bucket, None)
            for slot in bucket.slots:
                oracle.pop(slot.name, None)
        found = memory.get(bucket)
        expected = [value for name, size in layout for value in oracle.get(name, [0.0] * size)]
        assert (found.tolist() if found is not None else [0.0] * bucket.numel) == expected
        assert {name: value.tolist() for name, value in memory.state_dict().items()} == oracle


def test_named_buffers_hand_out_the_same_memory_for_a_known_layout() -> None:
    memory = NamedBuffers()
    flat = torch.arange(5.0)
    memory.replace(bucket_of(AB), flat)
    assert memory.get(bucket_of(AB)) is flat
    assert memory.get(bucket_of([("z", 1)])) is None


def test_taking_gives_the_memory_back_only_where_it_was_one_tensor_of_that_layout() -> None:
    memory = NamedBuffers()
    flat = torch.arange(5.0)
    memory.replace(bucket_of(AB), flat)
    assert memory.replace(bucket_of([("a", 2)]), None) is None
    memory.replace(bucket_of(AB), flat)
    assert memory.replace(bucket_of(AB), None) is flat
    assert memory.replace(bucket_of(AB), None) is None
    assert memory.get(bucket_of(AB)) is None
    assert memory.state_dict() == {}


# --- whose addition, and in which memory


class Asked(BucketSelector):
    """Remembers what it was asked for, with what was stored as it was then."""

    def __init__(self) -> None:
        super().__init__(KERNELS, CPU, CPU)
        self.residuals: list[list[float] | None] = []
        self.velocities: list[list[float] | None] = []
        self.looking: list[tuple[int, float]] = []

    def accumulate(
        self,
        residual: torch.Tensor | None,
        gradient: torch.Tensor,
        out: torch.Tensor,
        k: int,
        limit: float,
        velocity: Velocity | None = None,
    ) -> Accumulated:
        assert (out.dtype, out.shape, out.is_contiguous()) == (torch.float32, gradient.shape, True)
        self.residuals.append(None if residual is None else residual.tolist())
        old = None if velocity is None else velocity.old
        self.velocities.append(None if old is None else old.tolist())
        self.looking.append((k, limit))
        return super().accumulate(residual, gradient, out, k, limit, velocity)


@each_feedback
@each_dtype
def test_one_pass_of_the_selector_adds_and_looks(make: Make, dtype: torch.dtype) -> None:
    """It gets no residual at first, later what is stored; its result is what is owed."""
    feedback, selector = make(), Asked()
    moves = make is with_momentum
    for step in range(2):
        bucket = bucket_of(AB, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=dtype))
        owed = feedback.compensate(bucket, selector, 2 + step, LIMIT)
        assert (owed.bucket, owed.held) == (bucket, ())
        apply_at(feedback, owed, [0])
        feedback.commit()
    assert selector.looking == [(2, LIMIT), (3, LIMIT)]
    assert selector.residuals == [None, [0.0, 2.0, 3.0, 4.0, 5.0]]
    assert selector.velocities == [None, [0.0, 2.0, 3.0, 4.0, 5.0] if moves else None]


def test_the_memory_of_the_last_step_is_used_again_two_steps_later() -> None:
    """What a step gives up is where the next one puts its `acc`: two buffers take turns."""
    feedback = plain()
    addresses = []
    for _ in range(8):
        bucket = bucket_of([("a", 1000)], torch.ones(1000))
        owed = compensate(feedback, bucket)
        addresses.append(owed.acc.values.data_ptr())
        apply_at(feedback, owed, [3])
        feedback.commit()
    assert addresses[2:] == addresses[:-2]
    assert addresses[0] != addresses[1]
    assert owed_in(feedback, [("a", 1000)])[:5] == [8.0, 8.0, 8.0, 0.0, 8.0]


def test_memory_that_is_used_again_never_holds_two_debts() -> None:
    """Buckets of the same and of other sizes, committed together or one by one, some in full: names keep theirs."""
    generator = torch.Generator().manual_seed(6)
    sizes = {"a": 8, "b": 8, "c": 5, "d": 8}
    feedback = plain()
    expected = {name: torch.zeros(size) for name, size in sizes.items()}
    for step in range(12):
        for name, size in sizes.items():
            gradient = torch.randint(-9, 10, (size,), generator=generator).float()
            bucket = bucket_of([(name, size)], gradient)
            owed = compensate(feedback, bucket)
            expected[name] += gradient
            assert owed.acc.values.tolist() == expected[name].tolist()
            if (step + size) % 4 == 0 and name != "b":
                apply_all(feedback, owed)
                expected[name].zero_()
            else:
                apply_at(feedback, owed, [step % size])
                expected[name][step % size] = 0.0
            if step % 3 == 0:
                feedback.commit()
        feedback.commit()
    for name, size in sizes.items():
        assert owed_in(feedback, [(name, size)]) == expected[name].tolist()


@each_feedback
def test_a_rolled_back_step_leaves_what_is_stored_bit_for_bit(make: Make) -> None:
    """Also where it wrote into its `acc`, or its `accumulate` put NaN there; the next step starts from the same."""
    generator = torch.Generator().manual_seed(9)
    feedback = make()
    for _ in range(4):  # so that memory is already being used again
        bucket = bucket_of(AB, torch.randn(5, generator=generator))
        owed = compensate(feedback, bucket)
        apply_at(feedback, owed, [1])
        feedback.commit()
    before = stored(feedback)
    gradient = torch.randn(5, generator=generator)
    expected = bits(compensate(feedback, bucket_of(AB, gradient)).acc.values)
    feedback.roll_back()
    for retains in (False, True, True):
        bucket = bucket_of(AB, [float("nan"), float("inf"), 1.0, 2.0, 3.0])
        owed = compensate(feedback, bucket)
        if retains:
            apply_at(feedback, owed, [0, 4])
        owed.acc.values.fill_(float("nan"))
        feedback.roll_back()
        assert stored(feedback) == before
    assert bits(compensate(feedback, bucket_of(AB, gradient)).acc.values) == expected


# --- saved state


@each_feedback
def test_state_goes_through_a_file_and_continues_bit_for_bit(make: Make) -> None:
    generator = torch.Generator().manual_seed(5)

    def step(feedback: Residual, gradient: torch.Tensor) -> torch.Tensor:
        bucket = bucket_of(AB, gradient)
        owed = compensate(feedback, bucket)
        owed_now = owed.acc.values.clone()
        apply_at(feedback, owed, [1, 3])
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
    restored = plain()
    restored.load_state_dict(saved)
    assert owed_in(restored, [("b", 3), ("a", 2)]) == [3.0, 4.0, 5.0, 1.0, 2.0]


def test_saved_state_is_a_copy_in_both_directions() -> None:
    feedback = holding({"a": [1.0, 2.0]})
    saved = feedback.state_dict()
    keep(feedback, bucket_of([("a", 2)], [1.0, 1.0]))
    assert saved["residual"]["a"].tolist() == [1.0, 2.0]
    restored = plain()
    restored.load_state_dict(saved)
    saved["residual"]["a"].fill_(50.0)
    assert owed_in(restored, [("a", 2)]) == [1.0, 2.0]


def test_saved_state_has_only_the_parameters_own_memory() -> None:
    feedback = plain()
    keep(feedback, bucket_of([("a", 2), ("b", 1000)], torch.ones(1002)))
    assert feedback.state_dict()["residual"]["a"].untyped_storage().nbytes() == 8


def test_state_of_another_dtype_or_shape_is_loaded_flat_and_fp32() -> None:
    restored = plain()
    restored.load_state_dict({"residual": {"a": torch.tensor([[1.0], [2.0]], dtype=torch.float64)}})
    assert owed_in(restored, [("a", 2)]) == [1.0, 2.0]
    assert restored.state_dict()["residual"]["a"].dtype == torch.float32


@each_feedback
def test_loading_replaces_everything_that_was_there(make: Make) -> None:
    saved = make()
    keep(saved, bucket_of([("a", 2)], [1.0, 2.0]))
    restored, expected = make(), make()
    keep(restored, bucket_of(AB, [9.0] * 5))
    owed = compensate(restored, bucket_of(AB, [9.0] * 5))
    apply_at(restored, owed, [])
    restored.load_state_dict(saved.state_dict())
    expected.load_state_dict(saved.state_dict())
    restored.commit()  # what was pending belongs to the time before
    assert owed_in(restored, AB) == owed_in(expected, AB)
    assert restored.state_dict().keys() == saved.state_dict().keys()
    for kind, part in tensors(saved).items():
        assert {n: v.tolist() for n, v in restored.state_dict()[kind].items()} == {
            n: v.tolist() for n, v in part.items()
        }


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("make", "part"),
    [(plain, "residual"), (with_momentum, "residual"), (with_momentum, "velocity")],
)
def test_damaged_state_is_refused_by_name_and_changes_nothing(make: Make, part: str, bad: float) -> None:
    feedback = make()
    keep(feedback, bucket_of(AB, [1.0, 2.0, 3.0, 4.0, 5.0]))
    before = owed_in(feedback, AB)
    saved = make()
    keep(saved, bucket_of(AB, [9.0] * 5))
    state = saved.state_dict()
    state[part]["b"][1] = bad
    with pytest.raises(ValueError, match=r"'b'.*NaN or Inf"):
        feedback.load_state_dict(state)
    assert owed_in(feedback, AB) == before


def test_state_that_overflows_fp32_is_refused() -> None:
    feedback = plain()
    with pytest.raises(ValueError, match="'a'"):
        feedback.load_state_dict({"residual": {"a": torch.tensor([1e300, 0.0], dtype=torch.float64)}})


def test_state_without_momentum_starts_with_no_velocity() -> None:
    feedback = with_momentum(0.5)
    keep(feedback, bucket_of([("a", 2)], [100.0, 100.0]))
    feedback.load_state_dict(holding({"a": [1.0, 2.0]}).state_dict())
    assert owed_in(feedback, [("a", 2)]) == [1.0, 2.0]


# --- momentum correction


def test_momentum_correction_is_dgc() -> None:
    """Lin et al. 2018: u = m u + g, v = v + u, send v at the mask, zero u and v there. Two buckets, 10 steps."""
    rng = np.random.default_rng(7)
    momentum, sizes = 0.9, {"first": 6, "second": 4}
    feedback = with_momentum(momentum)
    velocity = {name: np.zeros(n) for name, n in sizes.items()}
    residual = {name: np.zeros(n) for name, n in sizes.items()}
    for _ in range(10):
        for name, n in sizes.items():
            gradient = rng.normal(size=n)
            mask = rng.random(n) < 0.4
            velocity[name] = momentum * velocity[name] + gradient
            residual[name] = residual[name] + velocity[name]

            bucket = bucket_of([(name, n)], torch.tensor(gradient, dtype=torch.float32))
            owed = compensate(feedback, bucket)
            np.testing.assert_allclose(owed.acc.values.numpy(), residual[name], rtol=1e-5, atol=1e-5)
            left = apply_at(feedback, owed, mask.nonzero()[0].tolist())

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
    feedback, found = with_momentum(0.9), start.clone()
    for _ in range(10):
        gradient = torch.randn(5, generator=generator)
        expected.grad = gradient.clone()
        optimizer.step()
        bucket = bucket_of(AB, gradient)
        owed = compensate(feedback, bucket)
        found -= 0.1 * owed.acc.values
        assert apply_all(feedback, owed) is None
        feedback.commit()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)


def test_what_only_stands_in_for_a_sums_rounding_does_not_forget_the_velocity() -> None:
    """An owner of a region subtracts what rounding a sum gained, also where it sent nothing of its own."""
    feedback = with_momentum(0.5)
    bucket = bucket_of([("a", 3)], [4.0, 8.0, 16.0])
    owed = compensate(feedback, bucket)
    apply_some(feedback, owed, sparse([0, 1, 2], [4.0 + 2.0**-8, 2.0**-8, -(2.0**-8)], 3))
    feedback.commit()
    assert feedback.state_dict()["velocity"]["a"].tolist() == [0.0, 8.0, 16.0]
    assert feedback.state_dict()["residual"]["a"].tolist() == [-(2.0**-8), 8.0 - 2.0**-8, 16.0 + 2.0**-8]


def test_a_rolled_back_step_leaves_the_velocity_as_it_was() -> None:
    feedback = with_momentum(0.5)
    bucket = bucket_of([("a", 2)], [4.0, 8.0])
    owed = compensate(feedback, bucket)
    apply_all(feedback, owed)
    feedback.commit()
    owed = compensate(feedback, bucket)
    apply_at(feedback, owed, [0, 1])
    feedback.roll_back()
    assert owed_in(feedback, [("a", 2)]) == [2.0, 4.0]


def test_the_velocity_is_forgotten_only_where_something_was_sent() -> None:
    feedback = with_momentum(0.5)
    bucket = bucket_of([("a", 2)], [4.0, 8.0])
    owed = compensate(feedback, bucket)
    apply_at(feedback, owed, [1])
    feedback.commit()
    assert feedback.state_dict()["velocity"]["a"].tolist() == [4.0, 0.0]
    assert owed_in(feedback, [("a", 2)]) == [4.0 + 2.0, 0.0]


@each_dtype
def test_the_velocity_is_fp32_whatever_the_gradient_is(dtype: torch.dtype) -> None:
    feedback = with_momentum(0.5)
    keep(feedback, bucket_of([("a", 1)], torch.tensor([1.0], dtype=dtype)))
    keep(feedback, bucket_of([("a", 1)], torch.tensor([2.0**-12], dtype=dtype)))
    velocity = feedback.state_dict()["velocity"]["a"]
    assert velocity.dtype == torch.float32
    assert velocity.tolist() == [0.5 + 2.0**-12]


# --- parameters that no rank has a gradient for

ABC: Named = [("a", 2), ("b", 3), ("c", 2)]


def bits_by_name(feedback: Residual, name: str) -> dict[str, list[int] | None]:
    return {kind: part.get(name) for kind, part in stored(feedback).items()}


def step_without(feedback: Residual, gradient: list[float], held: str, kind: str, k: int = 2) -> None:
    """A step in which these parameters have a gradient on no rank: it stands as zero in the bucket."""
    bucket = bucket_of(ABC, gradient)
    for slot in bucket.slots:
        if slot.name in held:
            slot.part(bucket.flat).zero_()
    owed = compensate(feedback, bucket, k)
    owed.hold([slot for slot in bucket.slots if slot.name in held])
    assert not any(slot.part(owed.acc.values).any() for slot in owed.held)
    if kind == "dense":
        apply_all(feedback, owed)
    elif kind == "dense, rounded":
        apply_all(feedback, owed, torch.full((7,), 2.0**-9))
    else:
        apply_some(feedback, owed, BucketSelector(KERNELS, CPU, CPU).top_k(owed.acc, k))
    feedback.commit()


@each_feedback
@pytest.mark.parametrize("kind", ["sparse", "dense", "dense, rounded"])
@pytest.mark.parametrize("held", ["b", "ac", "abc"])
def test_what_is_held_keeps_residual_and_velocity_bit_for_bit(make: Make, kind: str, held: str) -> None:
    """Step after step: m * v does not leak into what is owed, and nothing of it is applied or forgotten."""
    feedback = make()
    generator = torch.Generator().manual_seed(12)
    for _ in range(3):  # something is owed and something moves
        owed = compensate(feedback, bucket_of(ABC, torch.randn(7, generator=generator)))
        apply_at(feedback, owed, [1, 4])
        feedback.commit()
    before = {name: bits_by_name(feedback, name) for name in held}
    assert all(any(part) for parts in before.values() for part in parts.values() if part is not None)
    for _ in range(4):
        step_without(feedback, torch.randn(7, generator=generator).tolist(), held, kind)
        assert {name: bits_by_name(feedback, name) for name in held} == before


@each_feedback
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_what_is_not_held_goes_on_as_if_it_were_alone(make: Make, kind: str) -> None:
    together, alone = make(), make()
    for step in range(4):
        gradient = [1.0 + step, -2.0, 50.0, 60.0, 70.0, 3.0, -4.0 * step]
        step_without(together, gradient, "b" if step else "", "dense" if step == 0 else kind)
        rest: Named = [("a", 2), ("c", 2)]
        owed = compensate(alone, bucket_of(rest, gradient[:2] + gradient[5:]), 2)
        if kind == "dense" or step == 0:
            apply_all(alone, owed)
        else:
            apply_some(alone, owed, BucketSelector(KERNELS, CPU, CPU).top_k(owed.acc, 2))
        alone.commit()
    for name in "ac":
        for part, ours in bits_by_name(together, name).items():
            assert (ours or [0, 0]) == (bits_by_name(alone, name)[part] or [0, 0])


@each_feedback
def test_what_is_held_before_anything_was_owed_owes_nothing(make: Make) -> None:
    feedback = make()
    for kind in ("sparse", "dense", "dense, rounded"):
        step_without(feedback, [1.0, 2.0, 9.0, 9.0, 9.0, 3.0, 4.0], "b", kind)
        assert all(not any(part or [0]) for part in bits_by_name(feedback, "b").values())
        assert owed_in(feedback, [("b", 3)]) == [0.0] * 3


def test_velocity_waits_while_a_parameter_is_held_as_in_sgd() -> None:
    """torch.optim.SGD leaves the momentum of a parameter whose .grad is None alone; so do dense steps here."""
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.5)
    feedback, found = with_momentum(0.5), torch.zeros(5)
    for step in range(6):
        gradient = torch.arange(1.0, 6.0) * (step + 1)
        is_held = step % 2 == 1
        parameters[0].grad = gradient[:2].clone()
        parameters[1].grad = None if is_held else gradient[2:].clone()
        optimizer.step()
        if is_held:
            gradient[2:] = 0.0
        owed = compensate(feedback, bucket_of(AB, gradient))
        owed.hold(owed.bucket.slots[1:] if is_held else ())
        found -= owed.acc.values
        apply_all(feedback, owed)
        feedback.commit()
        assert found.tolist() == torch.cat([p.detach() for p in parameters]).tolist()


# --- writing the mean


@each_dtype
def test_a_mean_is_written_and_what_rounding_took_is_returned(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0 + 2.0**-12, 0.0, -3.0, 2.0**-9 + 2.0**-20, 7.0])
    for mean in (values, SparseVector.at(values, torch.tensor([0, 2, 3, 4]))):
        target = torch.full((5,), 9.0, dtype=dtype)
        rounding = write_mean(mean, target, KERNELS)
        assert target.tolist() == values.to(dtype).tolist()
        if dtype in (torch.float32, torch.float64):
            assert rounding is None
        else:
            lost = rounding.to_dense() if isinstance(rounding, SparseVector) else rounding
            assert lost is not None
            assert bits(target.float() + lost) == bits(values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_mean_that_the_dtype_cannot_hold_becomes_its_largest(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, 1.0])
    for mean in (values, SparseVector.at(values, torch.arange(3))):
        target = torch.zeros(3, dtype=dtype)
        rounding = write_mean(mean, target, KERNELS)
        assert target.tolist() == [largest, -largest, 1.0]
        lost = rounding.to_dense() if isinstance(rounding, SparseVector) else rounding
        assert lost is not None
        assert bool(torch.isfinite(lost).all())


# --- memory that a step has given up


def test_a_spare_is_handed_out_once_and_only_where_it_fits() -> None:
    spare, buffer = Spare(), torch.ones(4)
    spare.give(buffer)
    assert spare.take(torch.zeros(5)).numel() == 5
    assert spare.take(torch.zeros(4, dtype=torch.bfloat16)) is buffer
    other = spare.take(torch.zeros(4))
    assert other is not buffer
    assert other.dtype == torch.float32


def test_the_largest_spare_is_kept() -> None:
    spare, small, large = Spare(), torch.ones(2), torch.ones(4)
    for buffer in (large, small, None):
        spare.give(buffer)
    assert spare.take(torch.zeros(2)) is not small
    assert spare.take(torch.zeros(4)) is large
