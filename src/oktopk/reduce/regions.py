"""Cutting the index space into one region for each rank."""

from __future__ import annotations

import torch

from oktopk.comm.base import Communicator
from oktopk.sparse_vector import SparseVector, ints


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
