"""What all ranks must know of a bucket before they reduce it: who holds NaN or Inf, what has no gradient anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oktopk.bucket import Bucket, Slot
from oktopk.comm.base import Communicator
from oktopk.select.base import Accumulated
from oktopk.sparse_vector import ints

_SAFE = 0.99  # sums are rounded, and so is each of them in bf16, by up to 2^-8: stay below the largest fp32


class NonFiniteGradientError(ArithmeticError):
    """A gradient held NaN or Inf; raised on every rank in the same step."""


@dataclass(frozen=True)
class Verdict:
    """The same on every rank.

    Attributes:
        nonfinite: For each rank at fault, the first of its parameters whose gradient is not finite, or so large that
            the sum would not be.
        unused: Parameters without a gradient on any rank.
    """

    nonfinite: dict[int, str]
    unused: tuple[Slot, ...]


def largest_safe(num_ranks: int) -> float:
    """A magnitude of which `num_ranks` can be summed in fp32; an fp32 number itself."""
    return float(torch.tensor(_SAFE * torch.finfo(torch.float32).max / num_ranks).item())


def agree(bucket: Bucket, acc: Accumulated, comm: Communicator) -> Verdict:
    """One all_reduce of P + 1 integers: who is at fault, and how many ranks miss a gradient.

    Where any does, a second one of an integer for each parameter finds those that nobody has a gradient for.
    """
    size, slots = comm.size, bucket.slots
    home = comm.home(acc.values.device)
    mine = [0] * size + [int(bool(bucket.missing))]
    mine[comm.rank] = _first_bad_slot(bucket, acc, size)
    votes = _summed(mine, home, comm)
    nonfinite = {rank: slots[bad - 1].name for rank, bad in enumerate(votes[:size]) if bad}
    if not votes[size]:
        return Verdict(nonfinite, ())
    used = _summed([int(slot.name not in bucket.missing) for slot in slots], home, comm)
    return Verdict(nonfinite, tuple(slot for slot, users in zip(slots, used, strict=True) if users == 0))


def _summed(values: list[int], home: torch.device, comm: Communicator) -> list[int]:
    if comm.size == 1:
        return values
    total = torch.tensor(values, dtype=torch.int64).to(home)
    comm.all_reduce(total)
    return ints(total)


def _first_bad_slot(bucket: Bucket, acc: Accumulated, num_ranks: int) -> int:
    """The first parameter with NaN, Inf, or a value that P of its kind would sum to Inf; counted from 1, 0 for none."""
    limit = largest_safe(num_ranks)
    if acc.largest <= limit:  # NaN is not
        return 0
    position = int((~(acc.values.abs() <= limit)).nonzero()[0].item())
    return 1 + bucket.slots.index(bucket.layout.slot_at(position))
