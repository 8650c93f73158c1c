"""The ways sparse vectors meet: everyone gets everything, each region is summed by its owner, pairs change hands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk import wire
from oktopk.comm.base import Communicator
from oktopk.kernels.base import Kernels
from oktopk.reduce.regions import equal_boundaries
from oktopk.sparse_vector import SparseVector

_BATCH = 4


@dataclass(frozen=True)
class Exchange:
    """Encodes with these kernels, sends values in this encoding.

    Whoever sends values rounds them first and stands in for the difference: see `rounded`.
    """

    kernels: Kernels
    values: wire.ValueEncoding = wire.ValueEncoding.FP32

    def rounded(self, vector: SparseVector) -> tuple[SparseVector, SparseVector | None]:
        """As it will arrive, and what that is more than it was; None: it is the same."""
        if self.values is wire.ValueEncoding.FP32:
            return vector, None
        sent = wire.rounded(vector, self.values)
        return sent, SparseVector(vector.indices, sent.values - vector.values, vector.length)

    def encode(self, vector: SparseVector) -> Tensor:
        return wire.encode(vector, self.values, self.kernels)

    def decode(self, buffer: Tensor, length: int) -> SparseVector:
        return wire.decode(buffer, length, self.kernels)

    def gather(self, mine: SparseVector, comm: Communicator) -> list[SparseVector]:
        """Everyone's vector, by rank: one message to each peer."""
        return self.decode_all(comm.all_gather_v(self.encode(mine)), mine, comm)

    def decode_all(self, buffers: Sequence[Tensor], mine: SparseVector, comm: Communicator) -> list[SparseVector]:
        """What everyone sent, by rank."""
        return [mine if rank == comm.rank else self.decode(buffer, mine.length) for rank, buffer in enumerate(buffers)]

    def gather_in_two_messages(self, mine: SparseVector, comm: Communicator) -> list[SparseVector]:
        """As `gather`, with indices and values travelling separately."""
        indices, values = wire.split_index_and_value(self.encode(mine))
        halves = zip(comm.all_gather_v(indices), comm.all_gather_v(values), strict=True)
        return self.decode_all([torch.cat(pair) for pair in halves], mine, comm)

    def reduce_regions(self, mine: SparseVector, boundaries: Sequence[int], comm: Communicator) -> SparseVector:
        """Send each region to its owner; sum what arrives for ours, a few at a time while the next are on their way.

        In rank order: the same bits wherever the boundaries lie.
        """
        pieces = mine.split(boundaries)
        nothing = torch.empty(0, dtype=torch.uint8, device=mine.indices.device)
        encoded = [nothing if rank == comm.rank else self.encode(piece) for rank, piece in enumerate(pieces)]
        arrived: list[SparseVector] = []
        for rank, buffer in enumerate(comm.all_to_all_each(encoded)):
            arrived.append(pieces[rank] if rank == comm.rank else self.decode(buffer, mine.length))
            if len(arrived) > _BATCH:
                arrived = [self.kernels.sum(arrived)]
        return self.kernels.sum(arrived)

    def rebalance(self, mine: SparseVector, shares: Sequence[int], comm: Communicator) -> SparseVector:
        """Move pairs between ranks so that each holds an equal part of the whole, in the same ascending order.

        `shares` are everyone's counts; `mine` are this rank's, which lie behind those of all lower ranks.
        """
        start = sum(shares[: comm.rank])
        inside = [min(max(edge - start, 0), len(mine)) for edge in equal_boundaries(sum(shares), comm.size)]
        nothing = torch.empty(0, dtype=torch.uint8, device=mine.indices.device)
        pieces = [mine.slice(*inside[rank : rank + 2]) for rank in range(comm.size)]
        received = comm.all_to_all_v([self.encode(piece) if len(piece) else nothing for piece in pieces])
        arrived = [self.decode(buffer, mine.length) for buffer in received if buffer.numel()]
        return join(arrived) if arrived else mine.slice(0, 0)


def join(pieces: Sequence[SparseVector]) -> SparseVector:
    """Vectors of disjoint, ascending index ranges as one."""
    return SparseVector(
        torch.cat([piece.indices for piece in pieces]),
        torch.cat([piece.values for piece in pieces]),
        pieces[0].length,
    )


def mean_of(total: SparseVector, num_ranks: int) -> SparseVector:
    return SparseVector(total.indices, total.values / num_ranks, total.length)
