"""Where the time of a reduction goes: every moment to exactly one stage, by a clock that only tests can move."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.comm import CommRecord, CountingCommunicator
from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.metrics.meter import STAGES, Cost, Meter, TimedExchange, TimedSelector
from oktopk.registry import make_kernels
from oktopk.select import Accumulated
from oktopk.sparse_vector import SparseVector

CPU = torch.device("cpu")


class Clock:
    """Whole seconds, so that sums are exact."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def run(self, seconds: float) -> None:
        self.now += seconds


def a_record(seconds: float, sent: int = 0) -> CommRecord:
    return CommRecord("all_gather_v", None, sent, sent + 1, 2, 3, start_s=0.0, seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> Meter:
    return Meter(clock)


def spent(cost: Cost) -> dict[str, float]:
    """The stages that took any time."""
    assert list(cost.seconds) == list(STAGES)
    return {stage: seconds for stage, seconds in cost.seconds.items() if seconds}


def test_there_are_six_stages() -> None:
    assert STAGES == ("meet", "select", "encode", "exchange", "combine", "apply")


def test_what_is_in_no_stage_is_combining(clock: Clock, meter: Meter) -> None:
    cost = Cost()
    clock.run(50.0)
    with meter.measure(cost):
        clock.run(3.0)
    clock.run(50.0)
    assert spent(cost) == {"combine": 3.0}


def test_a_stage_takes_its_time_from_the_one_around_it(clock: Clock, meter: Meter) -> None:
    cost = Cost()
    with meter.measure(cost):
        clock.run(1.0)
        with meter.stage("apply"):
            clock.run(2.0)
            with meter.stage("encode"):
                clock.run(4.0)
                with meter.stage("apply"):
                    clock.run(8.0)
                clock.run(16.0)
            clock.run(32.0)
        clock.run(64.0)
    assert spent(cost) == {"combine": 65.0, "apply": 42.0, "encode": 20.0}


def test_communication_is_exchange_and_in_a_meeting_waiting(clock: Clock, meter: Meter) -> None:
    cost = Cost()

    def communicate(seconds: float) -> None:
        clock.run(seconds)
        meter.record(a_record(seconds))

    with meter.measure(cost):
        with meter.meeting():
            clock.run(1.0)
            communicate(2.0)
            with meter.stage("select"):
                clock.run(4.0)
                communicate(8.0)
        communicate(16.0)
        with meter.stage("encode"):
            clock.run(32.0)
            communicate(64.0)
    assert spent(cost) == {"combine": 1.0, "meet": 10.0, "select": 4.0, "exchange": 80.0, "encode": 32.0}


def test_a_reduction_is_measured_in_two_parts_and_others_in_between(clock: Clock, meter: Meter) -> None:
    """Begun, then another one reduced, then reduced itself: as buckets that were prepared are."""
    one, other = Cost(), Cost()
    with meter.measure(one), meter.stage("select"):
        clock.run(1.0)
    clock.run(100.0)
    with meter.measure(other):
        clock.run(2.0)
    with meter.measure(one):
        clock.run(4.0)
    assert spent(one) == {"select": 1.0, "combine": 4.0}
    assert spent(other) == {"combine": 2.0}


def test_what_happens_between_reductions_is_nobodys(clock: Clock, meter: Meter) -> None:
    cost = Cost()
    with meter.measure(cost):
        clock.run(1.0)
    with meter.stage("apply"):
        clock.run(2.0)
        meter.record(a_record(1.0, sent=5))
    assert spent(cost) == {"combine": 1.0}
    assert cost.traffic == Cost().traffic


def test_traffic_is_that_of_the_reduction(meter: Meter) -> None:
    one, other = Cost(), Cost()
    with meter.measure(one):
        meter.record(a_record(0.0, sent=10))
        meter.record(a_record(0.0, sent=20))
    with meter.measure(other):
        meter.record(a_record(0.0, sent=1))
    assert (one.traffic.bytes_sent, one.traffic.bytes_received) == (30, 32)
    assert (one.traffic.messages_sent, one.traffic.messages_received) == (4, 6)
    assert (other.traffic.bytes_sent, other.traffic.bytes_received) == (1, 2)


@pytest.mark.parametrize("where", ["measure", "stage", "meeting"])
def test_an_error_books_what_it_took_and_leaves_nothing_behind(clock: Clock, meter: Meter, where: str) -> None:
    cost, after = Cost(), Cost()

    def fail() -> None:
        with ExitStack() as stack:
            stack.enter_context(meter.measure(cost))
            if where == "stage":
                stack.enter_context(meter.stage("encode"))
            elif where == "meeting":
                stack.enter_context(meter.meeting())
            clock.run(1.0)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert spent(cost) == {"encode" if where == "stage" else "combine": 1.0}
    with meter.measure(after):
        clock.run(2.0)
        clock.run(4.0)
        meter.record(a_record(4.0))
    assert spent(after) == {"combine": 2.0, "exchange": 4.0}


Turn = tuple[str, int]


@st.composite
def turns(draw: st.DrawFn) -> list[Turn]:
    """What happens in a reduction: it takes time, communicates, enters a stage or a meeting, or leaves the last one."""
    kinds = st.sampled_from(["run", "communicate", "meeting", "leave", *STAGES])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 9)), max_size=30))


@given(turns())
@settings(max_examples=200)
def test_the_stages_add_up_to_all_the_time_there_was(happened: list[Turn]) -> None:
    clock, cost = Clock(), Cost()
    meter = Meter(clock)
    expected = dict.fromkeys(STAGES, 0.0)
    around, meetings = ["combine"], 0
    start = clock.now
    with meter.measure(cost), ExitStack() as everything:
        open_now: list[tuple[ExitStack, bool]] = []
        for kind, seconds in happened:
            if kind == "run":
                clock.run(seconds)
                expected[around[-1]] += seconds
            elif kind == "communicate":
                clock.run(seconds)
                meter.record(a_record(seconds))
                expected["meet" if meetings else "exchange"] += seconds
            elif kind == "leave":
                if open_now:
                    inner, is_meeting = open_now.pop()
                    inner.close()
                    meetings -= is_meeting
                    if not is_meeting:
                        around.pop()
            elif kind != "meeting" or not meetings:  # a reduction meets once
                inner = everything.enter_context(ExitStack())
                inner.enter_context(meter.meeting() if kind == "meeting" else meter.stage(kind))
                open_now.append((inner, kind == "meeting"))
                if kind == "meeting":
                    meetings += 1
                else:
                    around.append(kind)
    assert cost.seconds == expected
    assert sum(cost.seconds.values()) == clock.now - start


# --- who books what


class Slow:
    """Kernels of which every call takes a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kernels = make_kernels("torch").on(CPU)

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: object, **more: object) -> object:
            self._clock.run(1.0)
            return getattr(self._kernels, name)(*arguments, **more)

        return call


class SlowOnes:
    def __init__(self, clock: Clock) -> None:
        self._slow = Slow(clock)

    def on(self, device: torch.device) -> Slow:  # noqa: ARG002
        return self._slow


def test_selecting_is_booked_as_such_and_a_dense_steps_sum_as_combining(clock: Clock, meter: Meter) -> None:
    selector = TimedSelector(SlowOnes(clock), CPU, CPU, meter)  # type: ignore[arg-type]
    gradient = torch.arange(1.0, 9.0)
    for k, stage in ((0, "combine"), (2, "select")):
        cost = Cost()
        with meter.measure(cost), meter.stage("apply"):
            selector.accumulate(None, gradient, torch.empty(8), k, 1e30)
        assert spent(cost) == {stage: 1.0}
    acc = Accumulated(gradient)
    calls: list[Callable[[], object]] = [lambda: selector.top_k(acc, 2), lambda: selector.above(acc, 3.0)]
    for call in calls:
        cost = Cost()
        with meter.measure(cost), meter.stage("apply"):
            call()
        assert set(spent(cost)) == {"select"}


def test_encoding_and_decoding_are_booked_as_such(clock: Clock, meter: Meter) -> None:
    exchange = TimedExchange(Slow(clock), meter=meter)  # type: ignore[arg-type]
    vector = SparseVector(torch.arange(0, 50, 3), torch.ones(17), 60)
    encoding, decoding = Cost(), Cost()
    with meter.measure(encoding):
        buffer = exchange.encode(vector)
    with meter.measure(decoding):
        found = exchange.decode(buffer, 60)
    assert found.indices.tolist() == vector.indices.tolist()
    assert set(spent(encoding)) == set(spent(decoding)) == {"encode"}


def test_a_counting_communicator_tells_the_meter() -> None:
    """On the real clock: only that it arrives."""
    meter = Meter()
    comm = CountingCommunicator(SimulatedCommunicator(World(1), 0), meter.record)
    cost = Cost()
    with meter.measure(cost):
        comm.all_reduce(torch.ones(3))
    assert cost.seconds["exchange"] > 0.0
    assert cost.seconds["combine"] >= 0.0
