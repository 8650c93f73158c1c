"""Run-time checks of the two promises: nothing lost or applied twice, and the same bits on every rank.

The vector is cut into up to 1024 parts. In each, what the residuals gave up must be what was applied, in fp64 sums with
weights that depend on the position (so that a value put in the wrong place shows too). What fp32 rounding may have done
is bounded by (P + 2) * 2^-23 of the mass that moved in that part: a lost or doubled pair is far above it. The hash is
64 bits wide: any single flipped bit changes it.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from oktopk.bucket import Bucket
from oktopk.comm.base import Communicator
from oktopk.feedback.momentum import put_back
from oktopk.feedback.residual import Owed
from oktopk.kernels.torch_ops import hash_words
from oktopk.sparse_vector import ints

_PARTS = 1024
_BLOCK = 1 << 22  # elements looked at at once: bounds the fp64 temporaries
_EPSILON = 2.0**-23
_SMALLEST = 2.0**-149  # denormals round by a whole unit each


class GuardViolation(RuntimeError):
    """A promise was broken; the message names the step, the bucket, the ranks and by how much."""


class Guard:
    """`before` the reduction, `after` what remains was worked out; both on every rank, at the same step."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._owed: Tensor | None = None

    def before(self, step: int, owed: Owed) -> None:
        self._owed = None
        if self._every and step % self._every == 0:
            self._owed = owed.acc.values.clone()
            for slot in owed.held:  # they owe what they owed before, and give up nothing
                put_back(slot, owed.before, self._owed)

    def after(self, step: int, bucket: Bucket, residual: Tensor | None, comm: Communicator) -> None:
        """`bucket.flat` holds the mean as applied. Every rank finds the same, and raises alike."""
        owed, self._owed = self._owed, None
        if owed is None:
            return
        _check_hash(step, bucket, comm)
        given_up = owed if residual is None else owed.double() - residual
        _check_law(step, bucket, given_up, comm)


def _check_hash(step: int, bucket: Bucket, comm: Communicator) -> None:
    hashes = torch.zeros(comm.size, dtype=torch.int64, device=bucket.flat.device)
    hashes[comm.rank] = hash64(bucket.flat)
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


def _check_law(step: int, bucket: Bucket, given_up: Tensor, comm: Communicator) -> None:
    mine = _probe(given_up)
    total = mine.clone()
    comm.all_reduce(total)
    applied = _probe(bucket.flat)
    gap = (total[0] - comm.size * applied[0]).abs()
    size = _part_size(bucket.numel)
    allowed = (comm.size + 2) * (_EPSILON * (total[1] + comm.size * applied[1]) + size * _SMALLEST)
    worst = int((gap - allowed).argmax().item())
    if bool(gap[worst] <= allowed[worst]):
        return
    shares = torch.zeros(comm.size, dtype=torch.float64, device=mine.device)
    shares[comm.rank] = mine[0, worst]
    comm.all_reduce(shares)
    first, last = worst * size, min(bucket.numel, (worst + 1) * size) - 1
    raise GuardViolation(
        f"step {step}, bucket {bucket.name}: the conservation law is broken by {float(gap[worst]):.6g} in elements "
        f"{first} to {last} (from {bucket.layout.slot_at(first).name} on; allowed {float(allowed[worst]):.2g}): "
        f"{comm.size} * mean applied = {comm.size * float(applied[0, worst]):.6g}, but the residuals gave up "
        + ", ".join(f"{float(share):.6g} on rank {rank}" for rank, share in enumerate(shares))
    )


def hash64(tensor: Tensor) -> Tensor:
    """A hash of the elements' bits."""
    flat = tensor.detach().reshape(-1)
    return hash_words(flat.view(torch.int16 if flat.element_size() == 2 else torch.int32))


def _part_size(n: int) -> int:
    return -(-n // _PARTS)


def _probe(vector: Tensor) -> Tensor:
    """For each part, the weighted sum and the mass: (2, parts)."""
    flat = vector.detach().reshape(-1)
    size = _part_size(flat.numel())
    sums = torch.zeros(2, -(-flat.numel() // size), dtype=torch.float64, device=flat.device)
    rows = max(1, _BLOCK // size)
    for row in range(0, sums.shape[1], rows):
        block = flat[row * size : (row + rows) * size].double()
        block = torch.nn.functional.pad(block, (0, -block.numel() % size))
        weights = torch.arange(block.numel(), device=flat.device).remainder_(1021).double().div_(1021).add_(1.0)
        sums[0, row : row + rows] = (block * weights).view(-1, size).sum(1)
        sums[1, row : row + rows] = block.abs().view(-1, size).sum(1)
    return sums
