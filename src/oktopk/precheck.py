"""What all ranks must know of a bucket before they reduce it: who holds NaN or Inf, what has no gradient anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk.comm.base import Communicator
from oktopk.types import Bucket, Slot, ints


class NonFiniteGradientError(ArithmeticError):
    """A gradient held NaN or Inf; raised on every rank in the same step."""


@dataclass(frozen=True)
class Verdict:
    """The same on every rank."""

    nonfinite: dict[int, str]
    """rank -> the first of its parameters whose gradient is not finite"""
    unused: tuple[Slot, ...]
    """parameters without a gradient on any rank"""


def agree(bucket: Bucket, acc: Tensor, comm: Communicator) -> Verdict:
    """One small all_reduce of integers: P for the culprits, one for each parameter's use."""
    size, slots = comm.size, bucket.slots
    used = [int(slot.name not in bucket.missing) for slot in slots]
    votes = torch.tensor([0] * size + used, dtype=torch.int64)
    votes[comm.rank] = _first_bad_slot(bucket, acc)
    votes = votes.to(acc.device)
    if size > 1:
        comm.all_reduce(votes)
    counted = ints(votes)
    return Verdict(
        {rank: slots[bad - 1].name for rank, bad in enumerate(counted[:size]) if bad},
        tuple(slot for slot, users in zip(slots, counted[size:], strict=True) if users == 0),
    )


def first_nonfinite(values: Tensor) -> int | None:
    """Position of the first NaN or Inf. A finite sum proves that there is none, in one pass without a mask."""
    if bool(torch.isfinite(values.sum()).item()):
        return None
    bad = (~torch.isfinite(values)).nonzero()
    return int(bad[0].item()) if bad.numel() else None


def _first_bad_slot(bucket: Bucket, acc: Tensor) -> int:
    """Its number counted from 1; 0 for none."""
    position = first_nonfinite(acc)
    return 0 if position is None else 1 + bucket.slots.index(bucket.slot_at(position))
