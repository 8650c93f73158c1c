"""What every call moved, by wrapping a communicator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oktopk.comm.base import Communicator
from oktopk.comm.sizes import LENGTH_BYTES, is_direct, ring_bytes


@dataclass(frozen=True)
class CommRecord:
    """One call on this rank. `peer` is None for collectives. `start_s` is on the monotonic clock.

    `sent_to` and `received_from` say how many bytes went to and came from each rank, lengths not counted, where this
    is known: the library below may take any way it likes.
    """

    operation: str
    peer: int | None
    bytes_sent: int
    bytes_received: int
    messages_sent: int
    messages_received: int
    start_s: float
    seconds: float
    sent_to: tuple[int, ...] = ()
    received_from: tuple[int, ...] = ()


@dataclass(frozen=True)
class Traffic:
    """The sum of some records."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    seconds: float = 0.0

    @staticmethod
    def of(records: Sequence[CommRecord]) -> Traffic:
        return Traffic(
            sum(r.bytes_sent for r in records),
            sum(r.bytes_received for r in records),
            sum(r.messages_sent for r in records),
            sum(r.messages_received for r in records),
            sum(r.seconds for r in records),
        )

    def counts(self) -> dict[str, Any]:
        return {
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "messages_sent": self.messages_sent,
            "messages_received": self.messages_received,
        }

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            self.messages_sent + other.messages_sent,
            self.messages_received + other.messages_received,
            self.seconds + other.seconds,
        )


class CountingCommunicator:
    """Passes every call on and records it.

    all_gather_v, all_to_all_v, send and recv are counted exactly, with the 8 bytes of length before each buffer:
    that is how the pairwise transports move them; small all_reduces too, which go straight to every peer. Larger ones,
    broadcast and barrier belong to the library below, so they are counted by the usual algorithms: ring, binomial
    tree, and one empty message to each of log2(P) peers. Records are kept until they are taken, or `tell` gets each.
    """

    def __init__(self, inner: Communicator, tell: Callable[[CommRecord], None] | None = None) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self._records: list[CommRecord] = []
        self._tell = tell or self._keep

    def take(self) -> list[CommRecord]:
        """The records since the last call of this."""
        records, self._records = self._records, []
        return records

    def all_reduce(self, tensor: Tensor) -> None:
        start = time.monotonic()
        self._inner.all_reduce(tensor)
        num_bytes = tensor.numel() * tensor.element_size()
        if is_direct(num_bytes, self.size):
            self._record_swap("all_reduce", [num_bytes] * self.size, [num_bytes] * self.size, False, start)
        else:
            moved, messages = ring_bytes(num_bytes, self.size), 2 * (self.size - 1)
            self._record("all_reduce", None, moved, moved, messages, messages, start)

    def all_gather_v(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        start = time.monotonic()
        incoming = self._inner.all_gather_v(buffer, sizes)
        self._record_swap("all_gather_v", [buffer.numel()] * self.size, _sizes(incoming), sizes is None, start)
        return incoming

    def all_to_all_v(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        start = time.monotonic()
        incoming = self._inner.all_to_all_v(buffers)
        self._record_swap("all_to_all_v", _sizes(buffers), _sizes(incoming), True, start)
        return incoming

    def all_to_all_each(self, buffers: Sequence[Tensor]) -> Iterator[Tensor]:
        """Its time is what was spent waiting, without what is done with a buffer before the next is asked for."""
        start = time.monotonic()
        arriving = self._inner.all_to_all_each(buffers)
        incoming: list[Tensor] = []
        seconds = time.monotonic() - start
        while True:
            waiting = time.monotonic()
            buffer = next(arriving, None)
            seconds += time.monotonic() - waiting
            if buffer is None:
                break
            incoming.append(buffer)
            yield buffer
        self._record_swap("all_to_all_v", _sizes(buffers), _sizes(incoming), True, start, seconds)

    def home(self, device: torch.device) -> torch.device:
        return self._inner.home(device)

    def send(self, buffer: Tensor, peer: int) -> None:
        moved, messages = _volume([buffer.numel()])
        self._timed("send", peer, lambda: self._inner.send(buffer, peer), moved, 0, messages, 0)

    def recv(self, peer: int, device: torch.device) -> Tensor:
        start = time.monotonic()
        buffer = self._inner.recv(peer, device)
        moved, messages = _volume([buffer.numel()])
        self._record("recv", peer, 0, moved, 0, messages, start)
        return buffer

    def broadcast(self, tensor: Tensor, root: int) -> None:
        size = tensor.numel() * tensor.element_size()
        children = _binomial_children((self.rank - root) % self.size, self.size)
        received = int(self.rank != root)
        self._timed(
            "broadcast",
            None,
            lambda: self._inner.broadcast(tensor, root),
            size * children,
            size * received,
            children,
            received,
        )

    def barrier(self) -> None:
        rounds = (self.size - 1).bit_length()
        self._timed("barrier", None, self._inner.barrier, 0, 0, rounds, rounds)

    def close(self) -> None:
        self._inner.close()

    def release(self) -> None:
        self._inner.release()

    def _record_swap(
        self,
        operation: str,
        outgoing: list[int],
        incoming: list[int],
        with_lengths: bool,
        start: float,
        seconds: float | None = None,
    ) -> None:
        """Of calls that move so many bytes to and from each rank; what stays here does not count."""
        outgoing[self.rank] = incoming[self.rank] = 0
        num_lengths = self.size - 1 if with_lengths else 0
        sent, out = _volume(outgoing, num_lengths)
        received, into = _volume(incoming, num_lengths)
        by_peer = tuple(outgoing), tuple(incoming)
        self._record(operation, None, sent, received, out, into, start, seconds, *by_peer)

    def _timed(
        self,
        operation: str,
        peer: int | None,
        call: Callable[[], None],
        sent: int,
        received: int,
        out: int,
        into: int,
    ) -> None:
        start = time.monotonic()
        call()
        self._record(operation, peer, sent, received, out, into, start)

    def _record(
        self,
        operation: str,
        peer: int | None,
        sent: int,
        received: int,
        out: int,
        into: int,
        start: float,
        seconds: float | None = None,
        sent_to: tuple[int, ...] = (),
        received_from: tuple[int, ...] = (),
    ) -> None:
        seconds = time.monotonic() - start if seconds is None else seconds
        record = CommRecord(operation, peer, sent, received, out, into, start, seconds, sent_to, received_from)
        self._tell(record)

    def _keep(self, record: CommRecord) -> None:
        self._records.append(record)


def _sizes(buffers: Sequence[Tensor]) -> list[int]:
    return [buffer.numel() for buffer in buffers]


def _volume(sizes: Sequence[int], num_lengths: int = 1) -> tuple[int, int]:
    """Bytes and messages of buffers, with that many lengths before them."""
    return sum(sizes) + LENGTH_BYTES * num_lengths, num_lengths + sum(1 for size in sizes if size)


def _binomial_children(position: int, size: int) -> int:
    """How many ranks the one at `position` from the root passes a broadcast on to."""
    return sum(
        1 for shift in range((size - 1).bit_length()) if position < 1 << shift and position + (1 << shift) < size
    )
