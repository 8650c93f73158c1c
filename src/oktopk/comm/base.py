"""The contract of a communicator, and the one error it raises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

DEFAULT_TIMEOUT_S = 300.0


class CommunicationError(RuntimeError):
    """An exchange failed or took too long; the message names this rank and the operation."""


class Communicator(Protocol):
    """Blocking exchanges between `size` ranks. Every rank calls the same operations in the same order.

    Buffers are flat uint8 tensors of any length, zero included; results are new tensors on the device of what was
    passed in. No operation outlives the communicator's timeout: it raises CommunicationError instead.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place (fp32, fp64, int64), the same bits on every rank."""
        ...

    def all_gather_v(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Everyone's buffer, by rank; lengths may differ. Where all ranks know all `sizes`, these are not sent."""
        ...

    def all_to_all_v(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """`buffers[j]` goes to rank j; the result holds at i what rank i sent here."""
        ...

    def all_to_all_each(self, buffers: Sequence[Tensor]) -> Iterator[Tensor]:
        """As all_to_all_v, one by one, by rank: each when it is there, while others may still be on their way.

        To be read to its end, before anything else is called.
        """
        ...

    def home(self, device: torch.device) -> torch.device:
        """Where buffers made from tensors on `device` are best kept: the host, if they must pass through it."""
        ...

    def send(self, buffer: Tensor, peer: int) -> None:
        """To another rank, which calls `recv` for it; messages between two ranks stay in order."""
        ...

    def recv(self, peer: int, device: torch.device) -> Tensor:
        """The next buffer from `peer`, placed on `device`."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite `tensor` (same shape and dtype everywhere) with the root's, in place."""
        ...

    def barrier(self) -> None: ...

    def close(self) -> None:
        """Release what the communicator made for itself. All ranks call it."""
        ...

    def release(self) -> None:
        """As `close`, without the other ranks: the garbage collector comes when it likes."""
        ...


def check_buffer(buffer: Tensor) -> None:
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise ValueError(f"expected a flat uint8 buffer, got {buffer.dtype} of shape {tuple(buffer.shape)}")


def all_gather_int(comm: Communicator, value: int, device: torch.device) -> list[int]:
    """Everyone's integer, by rank."""
    return all_gather_ints(comm, [value], device)[0]


def all_gather_ints(comm: Communicator, values: Sequence[int], device: torch.device) -> list[list[int]]:
    """For each of the integers, everyone's, by rank: one small all_reduce."""
    mine = torch.zeros(len(values), comm.size, dtype=torch.int64)
    mine[:, comm.rank] = torch.tensor(values)
    mine = mine.to(device)
    comm.all_reduce(mine)
    return cast("list[list[int]]", mine.tolist())
