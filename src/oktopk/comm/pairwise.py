"""all_gather_v and all_to_all_v out of messages between pairs, for transports that refuse uneven lengths.

Every message is known, so what is counted is what moved: 8 bytes of length to each peer, then the buffers
(empty ones are not sent). A small all_reduce is one message to each peer as well: libraries take several rounds for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from oktopk.comm.base import check_buffer
from oktopk.comm.sizes import LENGTH_BYTES, is_direct

Messages = Sequence[tuple[int, Tensor]]  # (peer, buffer)


class PairwiseExchange(ABC):
    """Subclasses move messages; this class arranges them."""

    rank: int
    size: int

    @abstractmethod
    def _arrivals(self, operation: str, sends: Messages, receives: Messages) -> Generator[Tensor]:
        """Send and receive all at once; yields the buffers of `receives` in the order given, each when it is filled.

        When it has ended, the buffers of `sends` are free.
        """

    @abstractmethod
    def _library_all_reduce(self, tensor: Tensor) -> None:
        """As the transport's own library does it."""

    def all_reduce(self, tensor: Tensor) -> None:
        if not is_direct(tensor.numel() * tensor.element_size(), self.size):
            self._library_all_reduce(tensor)
            return
        everyones = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for _ in range(self.size)]
        everyones[self.rank].copy_(tensor)
        buffers = [one.reshape(-1).view(torch.uint8) for one in everyones]
        peers = [(self.rank + shift) % self.size for shift in range(1, self.size)]
        self._exchange(
            "all_reduce",
            [(peer, buffers[self.rank]) for peer in peers if tensor.numel()],
            [(peer, buffers[peer]) for peer in reversed(peers) if tensor.numel()],
        )
        total = everyones[0]
        for one in everyones[1:]:  # in rank order: the same bits everywhere
            total += one
        tensor.copy_(total)

    def all_gather_v(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        return list(self._swap("all_gather_v", [buffer] * self.size, sizes))

    def all_to_all_v(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        return list(self.all_to_all_each(buffers))

    def all_to_all_each(self, buffers: Sequence[Tensor]) -> Iterator[Tensor]:
        if len(buffers) != self.size:
            raise ValueError(f"all_to_all_v needs one buffer for each of {self.size} ranks, got {len(buffers)}")
        return self._swap("all_to_all_v", buffers)

    def send(self, buffer: Tensor, peer: int) -> None:
        self._exchange("send", [(peer, _length_of(buffer))], [])
        if buffer.numel():
            self._exchange("send", [(peer, buffer)], [])

    def recv(self, peer: int, device: torch.device) -> Tensor:
        length = torch.empty(LENGTH_BYTES, dtype=torch.uint8, device=device)
        self._exchange("recv", [], [(peer, length)])
        buffer = torch.empty(_read_length(length), dtype=torch.uint8, device=device)
        if buffer.numel():
            self._exchange("recv", [], [(peer, buffer)])
        return buffer

    def _swap(self, operation: str, outgoing: Sequence[Tensor], sizes: Sequence[int] | None = None) -> Iterator[Tensor]:
        """What arrives, by rank; `sizes` are those of what arrives, where they are known."""
        device = outgoing[self.rank].device
        # Rank r starts with r + 1, r + 2 and so on, so that no rank is flooded.
        targets = [(self.rank + shift) % self.size for shift in range(1, self.size)]
        sources = [peer for peer in range(self.size) if peer != self.rank]
        if sizes is None:
            lengths = [torch.empty(LENGTH_BYTES, dtype=torch.uint8, device=device) for _ in sources]
            self._exchange(
                operation,
                [(peer, _length_of(outgoing[peer])) for peer in targets],
                list(zip(sources, lengths, strict=True)),
            )
            expected = [_read_length(length) for length in lengths]
        else:
            expected = [sizes[peer] for peer in sources]
        incoming = [torch.empty(size, dtype=torch.uint8, device=device) for size in expected]
        arriving = self._arrivals(
            operation,
            [(peer, outgoing[peer]) for peer in targets if outgoing[peer].numel()],
            [(peer, buffer) for peer, buffer in zip(sources, incoming, strict=True) if buffer.numel()],
        )
        incoming.insert(self.rank, outgoing[self.rank].clone())
        return self._hand_out(incoming, arriving)

    def _hand_out(self, incoming: list[Tensor], arriving: Iterator[Tensor]) -> Iterator[Tensor]:
        for peer, buffer in enumerate(incoming):
            yield next(arriving) if buffer.numel() and peer != self.rank else buffer
        for _ in arriving:  # whatever is still on its way out
            pass

    def _exchange(self, operation: str, sends: Messages, receives: Messages) -> None:
        for _ in self._arrivals(operation, sends, receives):
            pass


def _length_of(buffer: Tensor) -> Tensor:
    check_buffer(buffer)
    return torch.tensor([buffer.numel()], dtype=torch.int64, device=buffer.device).view(torch.uint8)


def _read_length(buffer: Tensor) -> int:
    return int(buffer.view(torch.int64).item())
