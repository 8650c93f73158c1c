"""Cutting the index space into one region for each rank, and sharing out pairs evenly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oktopk import wire
from oktopk.comm.base import Communicator
from oktopk.reduce.exchange import join
from oktopk.types import SparseVector, ints


def equal_boundaries(length: int, num_regions: int) -> list[int]:
    """num_regions + 1 edges from 0 to length, as even as whole numbers allow."""
    return [length * region // num_regions for region in range(num_regions + 1)]


def balanced_boundaries(chosen: SparseVector, comm: Communicator) -> list[int]:
    """Edges between which each region holds about as many chosen elements: the mean of every rank's own cuts.

    A rank that chose fewer elements than there are ranks votes for equal regions. Means of non-decreasing cuts are
    non-decreasing; regions may be empty. In 64 bits: sums of boundaries overflow 32 soon.
    """
    count, size = len(chosen), comm.size
    if count < size:
        cuts = torch.tensor(equal_boundaries(chosen.length, size)[1:-1], dtype=torch.int64)
    else:
        inner = torch.tensor(equal_boundaries(count, size)[1:-1], dtype=torch.int64, device=chosen.indices.device)
        cuts = chosen.indices[inner]
    cuts = cuts.to(chosen.indices.device)
    if size > 1:
        comm.all_reduce(cuts)
    return [0, *ints(cuts // size), chosen.length]


def rebalance(mine: SparseVector, shares: Sequence[int], comm: Communicator) -> SparseVector:
    """Move pairs between ranks so that each holds an equal part of the whole, in the same ascending order.

    `shares` are everyone's counts; `mine` are this rank's, which lie behind those of all lower ranks.
    """
    edges = equal_boundaries(sum(shares), comm.size)
    start = sum(shares[: comm.rank])
    pieces = [
        mine.slice(*(min(max(edge - start, 0), len(mine)) for edge in edges[rank : rank + 2]))
        for rank in range(comm.size)
    ]
    nothing = torch.empty(0, dtype=torch.uint8, device=mine.indices.device)
    received = comm.all_to_all_v([wire.encode(piece) if len(piece) else nothing for piece in pieces])
    arrived = [wire.decode(buffer, mine.length) for buffer in received if buffer.numel()]
    return join(arrived) if arrived else mine.slice(0, 0)
