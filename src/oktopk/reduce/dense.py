"""dense (none): every element, by the communicator's own allreduce."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from oktopk.comm.base import Communicator
from oktopk.reduce.base import DenseReduction, Stateless
from oktopk.reduce.description import Bound, ReducerDescription
from oktopk.reduce.narrow import Packing
from oktopk.reduce.regions import equal_boundaries
from oktopk.reduce.volume import SteadyStep, Volume, all_reduce
from oktopk.select.base import Accumulated


class Dense(Stateless):
    """Sends 2n(P-1)/P elements."""

    def __init__(self, packing: Packing | None = None) -> None:
        """With a packing, values travel in it: each of P regions is summed by its owner and then copied to all.

        Who rounds owes the difference: the sender of a value, and the owner of a sum.
        """
        self._packing = packing

    def reduce(self, acc: Accumulated, comm: Communicator, k: int) -> DenseReduction:  # noqa: ARG002 - a dense k is n
        if self._packing is not None and comm.size > 1:
            return _reduce_packed(acc.values, comm, self._packing)
        mean = acc.values.clone()
        comm.all_reduce(mean)
        mean /= comm.size
        return DenseReduction(mean)


def _reduce_packed(values: Tensor, comm: Communicator, packing: Packing) -> DenseReduction:
    device, home = values.device, comm.home(values.device)
    edges = equal_boundaries(values.numel(), comm.size)
    counts = [stop - start for start, stop in pairwise(edges)]
    packed = [packing.pack(values[start:stop]).to(home) for start, stop in pairwise(edges)]
    left = torch.cat([packing.unpack(each.to(device), count) for each, count in zip(packed, counts, strict=True)])
    torch.sub(values, left, out=left)
    mine = counts[comm.rank]
    total = torch.zeros(mine, device=device)
    for buffer in comm.all_to_all_each(packed):  # in rank order: the same bits every time
        total += packing.unpack(buffer.to(device), mine)
    outgoing = packing.pack(total).to(home)
    gathered = comm.all_gather_v(outgoing, [each.numel() for each in packed])
    sums = [packing.unpack(each.to(device), count) for each, count in zip(gathered, counts, strict=True)]
    left[edges[comm.rank] : edges[comm.rank + 1]] += total - sums[comm.rank]
    return DenseReduction(torch.cat(sums).div_(comm.size), left)


# --- its description

_FP32_BYTES = 4


def _volume(step: SteadyStep) -> Volume:
    elements = 2.0 * step.n * step.num_peers / step.num_ranks
    return Volume(float(step.n), (all_reduce(_FP32_BYTES * step.n, step.num_ranks, elements),))


DENSE = ReducerDescription(
    name="dense",
    aliases=("none",),
    factory=lambda _: Dense(),
    bound=Bound("2n(P-1)/P", lambda n, _, num_ranks: 2 * n * (num_ranks - 1) / num_ranks),
    volume=_volume,
    work=None,
)
