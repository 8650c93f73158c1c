"""The two ways sparse vectors meet: everyone gets everything, or each region is summed by its owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oktopk import wire
from oktopk.comm.base import Communicator
from oktopk.types import SparseVector


def gather(mine: SparseVector, comm: Communicator) -> list[SparseVector]:
    """Everyone's vector, by rank: one message to each peer."""
    return [wire.decode(buffer, mine.length) for buffer in comm.all_gather_v(wire.encode(mine))]


def gather_in_two_messages(mine: SparseVector, comm: Communicator) -> list[SparseVector]:
    """As `gather`, with indices and values travelling separately."""
    indices, values = wire.split_index_and_value(wire.encode(mine))
    halves = zip(comm.all_gather_v(indices), comm.all_gather_v(values), strict=True)
    return [wire.decode(torch.cat(pair), mine.length) for pair in halves]


def reduce_regions(mine: SparseVector, boundaries: Sequence[int], comm: Communicator) -> SparseVector:
    """Send each region to its owner; sum what arrives for ours, in rank order."""
    pieces = [wire.encode(piece) for piece in mine.split(boundaries)]
    return SparseVector.sum([wire.decode(buffer, mine.length) for buffer in comm.all_to_all_v(pieces)])


def join(pieces: Sequence[SparseVector]) -> SparseVector:
    """Vectors of disjoint, ascending index ranges as one."""
    return SparseVector(
        torch.cat([piece.indices for piece in pieces]),
        torch.cat([piece.values for piece in pieces]),
        pieces[0].length,
    )


def mean_of(total: SparseVector, num_ranks: int) -> SparseVector:
    return SparseVector(total.indices, total.values / num_ranks, total.length)
