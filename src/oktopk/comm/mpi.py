"""A communicator over MPI (mpi4py), for mpirun and srun."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Generator
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from oktopk.comm.base import DEFAULT_TIMEOUT_S, CommunicationError
from oktopk.comm.pairwise import Messages, PairwiseExchange

_SPINS = 1000
_NAP_S = 50e-6


class MpiCommunicator(PairwiseExchange):
    """On a duplicate of COMM_WORLD, so that nobody else's messages get in between. CUDA tensors pass through the host.

    Every operation is started without blocking and then polled: MPI itself knows no timeout.
    """

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise ValueError("this MPI was started without MPI_THREAD_MULTIPLE, which background reductions need")
        self._timeout_s = timeout_s
        self._comm: Any = MPI.COMM_WORLD.Dup()
        self.rank = int(self._comm.Get_rank())
        self.size = int(self._comm.Get_size())
        self._gave_up = False

    def _library_all_reduce(self, tensor: Tensor) -> None:
        host = tensor.detach().cpu().contiguous()
        result = torch.empty_like(host)
        self._wait("all_reduce", [self._comm.Iallreduce(host.numpy(), result.numpy(), op=MPI.SUM)])
        tensor.copy_(result)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        host = tensor.detach().cpu().contiguous()
        self._wait("broadcast", [self._comm.Ibcast(host.reshape(-1).view(torch.uint8).numpy(), root=root)])
        tensor.copy_(host)

    def barrier(self) -> None:
        self._wait("barrier", [self._comm.Ibarrier()])

    def close(self) -> None:
        if self._comm is not None and not self._gave_up:  # MPI may still work on a request that timed out
            self._comm.Free()
        self._comm = None

    def release(self) -> None:
        self._comm = None  # freeing a communicator asks all ranks

    def home(self, device: torch.device) -> torch.device:  # noqa: ARG002 - whatever it was
        return torch.device("cpu")

    def _arrivals(self, operation: str, sends: Messages, receives: Messages) -> Generator[Tensor]:
        staged = [(target, target if target.device.type == "cpu" else target.cpu()) for _, target in receives]
        requests = [
            self._comm.Irecv(buffer.numpy(), source=peer)
            for (peer, _), (_, buffer) in zip(receives, staged, strict=True)
        ]
        outgoing = [(buffer.cpu().contiguous(), peer) for peer, buffer in sends]
        sending = [self._comm.Isend(buffer.numpy(), dest=peer) for buffer, peer in outgoing]
        peers = sorted({peer for peer, _ in (*sends, *receives)})
        for number, (target, buffer) in enumerate(staged):
            self._wait(operation, requests[number : number + 1], peers, requests + sending)
            if buffer is not target:
                target.copy_(buffer)
            yield target
        self._wait(operation, sending, peers)

    def _wait(
        self, operation: str, requests: list[Any], peers: list[int] | None = None, pending: list[Any] | None = None
    ) -> None:
        """For `requests`; `pending` are those that are under way with them."""
        deadline = time.monotonic() + self._timeout_s
        spins = 0
        while not MPI.Request.Testall(requests):
            spins += 1
            if spins > _SPINS:
                time.sleep(_NAP_S)
            if time.monotonic() > deadline:
                self._gave_up = True
                atexit.register(_abort, pending or requests)
                whom = f" with ranks {peers}" if peers else ""
                raise CommunicationError(
                    f"rank {self.rank} of {self.size}: {operation}{whom} failed (timeout {self._timeout_s:g} s): "
                    "a peer did not take part"
                )


def _abort(requests: list[Any]) -> None:
    """At exit, end the whole job: MPI cannot be finalized while a request is pending, and the others would wait.

    Holding `requests` until then keeps alive the buffers that MPI may still write into.
    """
    del requests
    sys.stdout.flush()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)
