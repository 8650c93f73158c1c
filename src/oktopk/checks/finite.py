"""What all ranks must know of a bucket before they reduce it: who holds NaN or Inf, what has no gradient anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk.bucket import Bucket, Slot
from oktopk.comm.base import Communicator
from oktopk.sparse_vector import ints

_SAFE = 0.99  # sums are rounded, and so is each of them in bf16, by up to 2^-8: stay below the largest fp32


class NonFiniteGradientError(ArithmeticError):
    """A gradient held NaN or Inf; raised on every rank in the same step."""


@dataclass(frozen=True)
class Verdict:
    """The same on every rank."""

    nonfinite: dict[int, str]
    """rank -> the first of its parameters whose gradient is not finite, or so large that the sum would not be"""
    unused: tuple[Slot, ...]
    """parameters without a gradient on any rank"""


def largest_safe(num_ranks: int) -> float:
    """A magnitude of which `num_ranks` can be summed in fp32; an fp32 number itself."""
    return float(torch.tensor(_SAFE * torch.finfo(torch.float32).max / num_ranks).item())


def agree(bucket: Bucket, acc: Tensor, largest: float, comm: Communicator) -> Verdict:
    """One small all_reduce of integers: P for the culprits, one for each parameter's use.

    `largest` is the largest magnitude in `acc`, or any number that is safe.
    """
    size, slots = comm.size, bucket.slots
    used = [int(slot.name not in bucket.missing) for slot in slots]
    votes = torch.tensor([0] * size + used, dtype=torch.int64)
    votes[comm.rank] = _first_bad_slot(bucket, acc, largest, size)
    votes = votes.to(comm.home(acc.device))
    if size > 1:
        comm.all_reduce(votes)
    counted = ints(votes)
    return Verdict(
        {rank: slots[bad - 1].name for rank, bad in enumerate(counted[:size]) if bad},
        tuple(slot for slot, users in zip(slots, counted[size:], strict=True) if users == 0),
    )


def _first_bad_slot(bucket: Bucket, acc: Tensor, largest: float, num_ranks: int) -> int:
    """The first parameter with NaN, Inf, or a value that P of its kind would sum to Inf; counted from 1, 0 for none."""
    limit = largest_safe(num_ranks)
    if largest <= limit:  # NaN is not
        return 0
    position = int((~(acc.abs() <= limit)).nonzero()[0].item())
    return 1 + bucket.slots.index(bucket.slot_at(position))
