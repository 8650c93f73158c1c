"""Run-time checks of the two promises: nothing lost or applied twice, and the same bits on every rank.

The law is checked from scalar sums in fp64, plain and weighted by position (so that a value put in the wrong place
shows too). What fp32 rounding may have done is bounded by (P + 2) * 2^-23 of the mass that moved; a lost pair larger
than that is found. The hash is 64 bits wide: any single flipped bit changes it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from oktopk.comm.base import Communicator
from oktopk.types import Bucket, ints

_CHUNK = 1 << 22  # bounds the fp64 temporaries
_EPSILON = 2.0**-23


class GuardViolation(RuntimeError):
    """A promise was broken; the message names the step, the bucket, the ranks and by how much."""


@dataclass(frozen=True)
class _Sums:
    plain: float
    weighted: float
    mass: float


class Guard:
    """`before` the reduction, `after` what remains was worked out; both on every rank, at the same step."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._owed: _Sums | None = None

    def before(self, step: int, acc: Tensor) -> None:
        self._owed = _sums(acc) if self._every and step % self._every == 0 else None

    def after(self, step: int, bucket: Bucket, residual: Tensor | None, comm: Communicator) -> None:
        """`bucket.gradient` holds the mean as applied."""
        if self._owed is None:
            return
        self._check_law(step, bucket, self._owed, residual, comm)
        self._check_hash(step, bucket, comm)
        self._owed = None

    def _check_law(self, step: int, bucket: Bucket, owed: _Sums, residual: Tensor | None, comm: Communicator) -> None:
        applied = _sums(bucket.gradient)
        left = _Sums(0.0, 0.0, 0.0) if residual is None else _sums(residual)
        moved = abs(owed.mass - left.mass) + applied.mass
        totals = torch.zeros(comm.size, 3, dtype=torch.float64)
        given_up = [owed.plain - left.plain, owed.weighted - left.weighted, moved]
        totals[comm.rank] = torch.tensor(given_up, dtype=torch.float64)
        totals = totals.to(bucket.gradient.device)
        comm.all_reduce(totals)
        given = cast("list[list[float]]", totals.tolist())
        smallest = comm.size * bucket.numel * 2.0**-149  # denormals round by a whole unit each
        allowed = (comm.size + 2) * _EPSILON * sum(row[2] for row in given) + smallest
        for column, expected, what in (
            (0, applied.plain, "sum"),
            (1, applied.weighted, "position-weighted sum"),
        ):
            gap = sum(row[column] for row in given) - comm.size * expected
            if not abs(gap) <= allowed:
                shares = ", ".join(f"rank {rank}: {row[column]:.6g}" for rank, row in enumerate(given))
                raise GuardViolation(
                    f"step {step}, bucket {bucket.name}: the conservation law is broken by {gap:.6g} in the {what} "
                    f"(allowed {allowed:.2g}): {comm.size} * mean applied = {comm.size * expected:.6g}, "
                    f"but the residuals gave up {shares}"
                )

    def _check_hash(self, step: int, bucket: Bucket, comm: Communicator) -> None:
        hashes = torch.zeros(comm.size, dtype=torch.int64, device=bucket.gradient.device)
        hashes[comm.rank] = hash64(bucket.gradient)
        comm.all_reduce(hashes)
        found = ints(hashes)
        common, _ = Counter(found).most_common(1)[0]
        odd = [rank for rank, value in enumerate(found) if value != common]
        if odd:
            raise GuardViolation(
                f"step {step}, bucket {bucket.name}: what was applied differs between ranks: "
                f"rank(s) {', '.join(map(str, odd))} of {comm.size} hold other bits than the rest "
                f"({', '.join(f'{value & (2**64 - 1):#018x}' for value in found)})"
            )


def hash64(tensor: Tensor) -> Tensor:
    """Sum of the elements' bits times odd, position-dependent weights, mod 2^64, as an int64 scalar tensor."""
    flat = tensor.detach().reshape(-1)
    bits = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        position = torch.arange(start, start + part.numel(), device=flat.device)
        total += (part * ((position * -7046029254386353131) | 1)).sum()
    return total


def _sums(vector: Tensor) -> _Sums:
    flat = vector.detach().reshape(-1)
    totals = torch.zeros(3, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].double()
        weight = torch.arange(start, start + part.numel(), device=flat.device).remainder_(1021).double().div_(1021)
        totals += torch.stack([part.sum(), (part * weight).sum(), part.abs().sum()])
    return _Sums(*cast("list[float]", totals.tolist()))
