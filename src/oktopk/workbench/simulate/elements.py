"""How many elements leave a rank, as the paper counts them, by wrapping a communicator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from oktopk.comm.base import Communicator
from oktopk.wire import HEADER_BYTES, IndexEncoding

_MAGIC = b"OKTK"


class ElementCounter:
    """Passes every call on; adds up the 4-byte words sent to other ranks: two for a pair of index and value.

    Pairs are read from the wire's header in each buffer. A run without gaps carries no indices, so its values count
    once. What has no header counts nothing: the second message where indices and values travel apart, lengths, and
    integers that are agreed upon. An all_reduce of fp32 is a dense one, 2n(P-1)/P by formula.
    """

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self._elements = 0.0

    def take(self) -> float:
        """The elements sent since the last call of this."""
        elements, self._elements = self._elements, 0.0
        return elements

    def all_reduce(self, tensor: Tensor) -> None:
        if tensor.dtype == torch.float32:
            self._elements += 2 * tensor.numel() * (self.size - 1) / self.size
        self._inner.all_reduce(tensor)

    def all_gather_v(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        self._elements += elements_in(buffer) * (self.size - 1)
        return self._inner.all_gather_v(buffer, sizes)

    def all_to_all_v(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        self._count_all(buffers)
        return self._inner.all_to_all_v(buffers)

    def all_to_all_each(self, buffers: Sequence[Tensor]) -> Iterator[Tensor]:
        self._count_all(buffers)
        return self._inner.all_to_all_each(buffers)

    def home(self, device: torch.device) -> torch.device:
        return self._inner.home(device)

    def send(self, buffer: Tensor, peer: int) -> None:
        self._elements += elements_in(buffer)
        self._inner.send(buffer, peer)

    def recv(self, peer: int, device: torch.device) -> Tensor:
        return self._inner.recv(peer, device)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._inner.broadcast(tensor, root)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()

    def release(self) -> None:
        self._inner.release()

    def _count_all(self, buffers: Sequence[Tensor]) -> None:
        self._elements += sum(elements_in(buffer) for peer, buffer in enumerate(buffers) if peer != self.rank)


def elements_in(buffer: Tensor) -> int:
    """Words of one encoded buffer (on the CPU), or of its first half; 0 for anything else."""
    if buffer.numel() < HEADER_BYTES:
        return 0
    header = buffer[:HEADER_BYTES].numpy().tobytes()
    if header[: len(_MAGIC)] != _MAGIC:
        return 0
    count = int.from_bytes(header[16:24], "little")
    return count if header[5] == IndexEncoding.RANGE else 2 * count
