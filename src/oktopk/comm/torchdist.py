"""A communicator over torch.distributed: Gloo and NCCL by the same code."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from oktopk.comm.base import DEFAULT_TIMEOUT_S, CommunicationError
from oktopk.comm.pairwise import Messages, PairwiseExchange

Works = list[dist.Work]
_TAG = 0


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def initialize(backend: str, rank: int, size: int, timeout_s: float, store: Store | None = None) -> None:
    """Join the process group that meets in `store`, unless this process is in one already.

    Without a store, MASTER_ADDR and MASTER_PORT say where the ranks meet.
    """
    if is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    if store is not None:
        store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


class TorchDistCommunicator(PairwiseExchange):
    """Makes a process group of its own (a collective call), so that nobody else's collectives get in between.

    Of the same ranks as `parent`, or of all of them. With NCCL tensors stay on the GPU; with Gloo, CUDA tensors pass
    through host memory.
    """

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S, parent: dist.ProcessGroup | None = None) -> None:
        if not is_initialized():
            raise ValueError("torch.distributed is not initialized: call init_process_group() first, or use torchrun")
        self._timeout_s = timeout_s
        members = dist.get_process_group_ranks(parent)
        # Ranks outside a part of the world do not call this, so its members meet on their own.
        self._is_part = len(members) < dist.get_world_size()
        self._group = cast(
            "dist.ProcessGroup",
            dist.new_group(members, timeout=timedelta(seconds=timeout_s), use_local_synchronization=self._is_part),
        )
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        backends = f"{dist.get_backend(self._group)},{dist.get_backend_config(self._group)}"
        self._on_host = "nccl" not in backends

    def _library_all_reduce(self, tensor: Tensor) -> None:
        with self._named("all_reduce"), self._reachable(tensor) as staged:
            dist.all_reduce(staged, group=self._group)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        with self._named("broadcast"), self._reachable(tensor) as staged:
            dist.broadcast(staged, group_src=root, group=self._group)

    def barrier(self) -> None:
        with self._named("barrier"):
            dist.barrier(group=self._group)

    def close(self) -> None:
        # A part's group keeps its name for as long as torch is initialized: under the same name a new one would find
        # the old one's addresses.
        if self.size and is_initialized() and not self._is_part:
            dist.destroy_process_group(self._group)
        self.size = 0

    def release(self) -> None:
        self.close()  # destroying a group asks nobody

    def home(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if self._on_host else device

    def _arrivals(self, operation: str, sends: Messages, receives: Messages) -> Generator[Tensor]:
        staged = [(peer, target, self._stage(target, copy=False)) for peer, target in receives]
        outgoing = [(peer, self._stage(buffer, copy=True)) for peer, buffer in sends]
        peers = sorted({peer for peer, _ in (*sends, *receives)})
        with self._named(operation, peers):
            start = self._start_one_by_one if self._on_host else self._start_together
            arriving, leaving = start([(peer, buffer) for peer, _, buffer in staged], outgoing)
        for number, (_, target, buffer) in enumerate(staged):
            self._await(operation, peers, arriving[number])
            if buffer is not target:
                target.copy_(buffer)
            yield target
        self._await(operation, peers, leaving)

    def _start_one_by_one(self, receives: Messages, sends: Messages) -> tuple[list[Works], Works]:
        """On the group itself: torch's checks of a batch cost more than a small message."""
        arriving: list[Works] = [[self._group.recv([buffer], peer, _TAG)] for peer, buffer in receives]
        return arriving, [self._group.send([buffer], peer, _TAG) for peer, buffer in sends]

    def _start_together(self, receives: Messages, sends: Messages) -> tuple[list[Works], Works]:
        """NCCL starts, and ends, a batch as one."""
        operations = [dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=peer) for peer, buffer in receives]
        operations += [dist.P2POp(dist.isend, buffer, group=self._group, group_peer=peer) for peer, buffer in sends]
        works: Works = dist.batch_isend_irecv(operations) if operations else []
        return [works for _ in receives], works

    def _await(self, operation: str, peers: list[int], works: Works) -> None:
        with self._named(operation, peers):
            for work in works:
                work.wait()

    def _stage(self, tensor: Tensor, copy: bool) -> Tensor:
        """Where the backend can reach it: the tensor itself, or its place (copy=False) or copy on the host."""
        if not (self._on_host and tensor.is_cuda):
            return tensor.contiguous() if copy else tensor
        return tensor.cpu() if copy else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    @contextmanager
    def _reachable(self, tensor: Tensor) -> Generator[Tensor]:
        """The tensor where the backend can change it; what it became is in the tensor afterwards."""
        staged = self._stage(tensor, copy=True)
        yield staged
        if staged is not tensor:
            tensor.copy_(staged)

    @contextmanager
    def _named(self, operation: str, peers: list[int] | None = None) -> Generator[None]:
        """Say who failed at what: the backend's own message names neither."""
        try:
            yield
        except RuntimeError as error:
            whom = f" with ranks {peers}" if peers else ""
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CommunicationError(
                f"rank {self.rank} of {self.size}: {operation}{whom} failed (timeout {self._timeout_s:g} s): {reason}"
            ) from error
