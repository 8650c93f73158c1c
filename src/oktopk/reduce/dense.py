"""dense (none): every element, by the communicator's own allreduce."""

from __future__ import annotations

from torch import Tensor

from oktopk.comm.base import Communicator
from oktopk.reduce.base import Reduction, Stateless


class Dense(Stateless):
    """Sends 2n(P-1)/P elements."""

    def reduce(self, acc: Tensor, comm: Communicator, k: int) -> Reduction:  # noqa: ARG002 - a dense k is n
        mean = acc.clone()
        comm.all_reduce(mean)
        mean /= comm.size
        return Reduction(mean, acc, local_count=acc.numel(), global_count=acc.numel())
