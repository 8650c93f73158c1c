"""P ranks as threads of one process: the same results every time, for laws, large P and injected faults."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from oktopk.comm.base import CommunicationError, check_buffer

T = TypeVar("T")
SIMULATION_TIMEOUT_S = 60.0
OPERATIONS = ("all_reduce", "all_gather_v", "all_to_all_v", "send", "recv", "broadcast", "barrier")
_BATON_PATIENCE_S = 2.0


class InjectedFault(RuntimeError):
    """What `fail_at` raises on the rank it names."""


@dataclass(frozen=True)
class _Fault:
    rank: int
    operation: str
    call: int


@dataclass
class _Meeting:
    """One collective: everyone brings a value; the last to arrive works out everyone's result."""

    operation: str
    values: dict[int, Any] = field(default_factory=dict[int, Any])
    results: Sequence[Any] | None = None


class _Baton:
    """Lets one rank compute at a time: hundreds of threads fighting for the interpreter would be far slower.

    Ranks pass it on while they wait in the communicator. If they also wait elsewhere (a thread that is not a rank's
    communicates for it, or nobody passes on for long), it is dissolved and everyone runs freely: results are the same.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._times_passed = 0
        self._dissolved = False

    def take(self) -> None:
        if self._dissolved:
            return
        taken, seen = False, -1
        while not taken and seen != self._times_passed:  # as long as others pass it on, it will come
            seen = self._times_passed
            taken = self._lock.acquire(timeout=_BATON_PATIENCE_S)
        if taken and not self._dissolved:
            self._holder = threading.get_ident()
            return
        self._dissolved = True
        if taken:
            self._lock.release()

    def pass_on(self) -> None:
        if self._dissolved:
            return
        if self._holder != threading.get_ident():
            self._dissolved = True
        self._times_passed += 1
        if self._holder is not None:
            self._holder = None
            self._lock.release()


class World:
    """What the ranks of one simulation share: meetings for collectives, mailboxes for messages, planned faults."""

    def __init__(self, size: int, timeout_s: float = SIMULATION_TIMEOUT_S) -> None:
        if size < 1:
            raise ValueError(f"a simulation needs at least one rank, got {size}")
        self.size = size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._meetings: dict[int, _Meeting] = {}
        self._mail: dict[tuple[int, int], deque[Tensor]] = {}
        self._faults: list[_Fault] = []
        self._broken: str | None = None
        self.baton = _Baton()

    def fail_at(self, rank: int, operation: str, call: int = 1) -> World:
        """Raise InjectedFault on `rank` at its `call`-th call of `operation`. Returns the world, for chaining."""
        if operation not in OPERATIONS:
            raise ValueError(f"operation={operation!r}: unknown; known: {', '.join(OPERATIONS)}")
        self._faults.append(_Fault(rank, operation, call))
        return self

    def check_fault(self, rank: int, operation: str, call: int) -> None:
        if _Fault(rank, operation, call) in self._faults:
            raise InjectedFault(f"rank {rank}: injected fault at {operation}, call {call}")

    def break_off(self, reason: str) -> None:
        """Wake everyone up: whoever waits, or comes to wait, gets a CommunicationError with this reason."""
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()

    def meet(
        self, rank: int, turn: int, operation: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]
    ) -> Any:
        """Bring `value` to the `turn`-th collective; leave with this rank's share of what `combine` makes of all."""
        with self._changed:
            meeting = self._meetings.setdefault(turn, _Meeting(operation))
            if meeting.operation != operation:
                reason = f"rank {rank} called {operation} where others called {meeting.operation}"
                self._broken = self._broken or reason
                self._changed.notify_all()
                raise CommunicationError(f"rank {rank} of {self.size}: {operation} failed: {reason}")
            meeting.values[rank] = value
            if len(meeting.values) == self.size:
                meeting.results = combine([meeting.values[r] for r in range(self.size)])
                del self._meetings[turn]
                self._changed.notify_all()
            else:
                self._wait_for(rank, operation, lambda: meeting.results is not None)
            assert meeting.results is not None
            return meeting.results[rank]

    def post(self, source: int, target: int, buffer: Tensor) -> None:
        with self._changed:
            self._mail.setdefault((source, target), deque()).append(buffer)
            self._changed.notify_all()

    def fetch(self, source: int, target: int) -> Tensor:
        with self._changed:
            box = self._mail.setdefault((source, target), deque())
            self._wait_for(target, f"recv from rank {source}", lambda: bool(box))
            return box.popleft()

    def _wait_for(self, rank: int, operation: str, ready: Callable[[], bool]) -> None:
        if not self._changed.wait_for(lambda: ready() or self._broken is not None, self.timeout_s):
            self._broken = f"timeout after {self.timeout_s:g} s: a peer did not take part"
            self._changed.notify_all()
        if not ready():
            raise CommunicationError(f"rank {rank} of {self.size}: {operation} failed: {self._broken}")


class SimulatedCommunicator:
    """One rank of a World."""

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self._turn = 0
        self._calls: Counter[str] = Counter()

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(self._collective("all_reduce", tensor.detach().clone(), _sum_for_all))

    def all_gather_v(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:  # noqa: ARG002
        check_buffer(buffer)
        gathered = self._collective("all_gather_v", buffer.clone(), lambda values: [values] * self.size)
        return [piece.clone() for piece in gathered]

    def all_to_all_v(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        if len(buffers) != self.size:
            raise ValueError(f"all_to_all_v needs one buffer for each of {self.size} ranks, got {len(buffers)}")
        for buffer in buffers:
            check_buffer(buffer)
        copies = [buffer.clone() for buffer in buffers]
        column: list[Tensor] = self._collective("all_to_all_v", copies, _transpose)
        return column

    def all_to_all_each(self, buffers: Sequence[Tensor]) -> Iterator[Tensor]:
        return iter(self.all_to_all_v(buffers))

    def home(self, device: torch.device) -> torch.device:
        return device

    def send(self, buffer: Tensor, peer: int) -> None:
        check_buffer(buffer)
        self._count("send")
        self._world.post(self.rank, peer, buffer.clone())

    def recv(self, peer: int, device: torch.device) -> Tensor:
        self._count("recv")
        self._world.baton.pass_on()
        try:
            return self._world.fetch(peer, self.rank).to(device)
        finally:
            self._world.baton.take()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        tensor.copy_(self._collective("broadcast", tensor.detach().clone(), lambda values: [values[root]] * self.size))

    def barrier(self) -> None:
        self._collective("barrier", None, lambda values: values)

    def close(self) -> None:
        pass

    def release(self) -> None:
        pass

    def _collective(self, operation: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        self._count(operation)
        self._turn += 1
        self._world.baton.pass_on()
        try:
            return self._world.meet(self.rank, self._turn, operation, value, combine)
        finally:
            self._world.baton.take()

    def _count(self, operation: str) -> None:
        self._calls[operation] += 1
        self._world.check_fault(self.rank, operation, self._calls[operation])


def simulate(num_ranks: int, fn: Callable[[SimulatedCommunicator], T], world: World | None = None) -> list[T]:
    """`[fn(comm) for every rank]`, each rank in a thread. Raises what the first failing rank raised.

    A rank that fails breaks off the others at once; ranks that stop taking part run into the world's timeout.
    """
    shared = world or World(num_ranks)
    if shared.size != num_ranks:
        raise ValueError(f"num_ranks={num_ranks}: but the world has {shared.size}")
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        shared.baton.take()
        try:
            results[rank] = fn(SimulatedCommunicator(shared, rank))
        except BaseException as error:
            failures.append(error)
            shared.break_off(f"rank {rank} failed: {error}")
        finally:
            shared.baton.pass_on()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank{rank}") for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(num_ranks)]


def _sum_for_all(values: list[Any]) -> Sequence[Any]:
    total = values[0].clone()
    for value in values[1:]:  # in rank order: the same bits every time
        total += value
    return [total] * len(values)


def _transpose(values: list[Any]) -> Sequence[Any]:
    return [list(column) for column in zip(*values, strict=True)]
