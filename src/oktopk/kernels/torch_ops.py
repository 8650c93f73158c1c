"""The kernels in plain torch: exact, for any device, the reference the fast ones are tested against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from oktopk.kernels.base import MAGNITUDE_BITS, Seen, Velocity
from oktopk.sparse_vector import SparseVector

HASH_SPREAD = -7046029254386353131
_HASH_BLOCK = 1 << 22


def hash_words(words: Tensor) -> Tensor:
    """The sum, mod 2^64, of integer words times odd weights that depend on the position, as an int64 scalar tensor.

    Any single flipped bit changes it, and so does what was moved. Looked at in blocks, to bound the temporaries.
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _HASH_BLOCK):
        block = words[start : start + _HASH_BLOCK].to(torch.int64)
        position = torch.arange(start, start + block.numel(), device=words.device)
        total += (block * ((position * HASH_SPREAD) | 1)).sum()
    return total


def plain_sum(residual: Tensor | None, gradient: Tensor, out: Tensor) -> None:
    """out = residual + gradient, of any float dtype."""
    if residual is None:
        out.copy_(gradient)
    else:
        torch.add(residual, gradient.to(torch.float32), out=out)


def plain_velocity(velocity: Velocity, gradient: Tensor) -> Tensor:
    """Write the new velocity, and return the change that its rule makes of it: the velocity itself, or a new tensor."""
    rule, new = velocity.rule, velocity.new
    new.copy_(gradient)
    if rule.gain != 1.0:
        new.mul_(rule.gain)
    push = new.clone() if rule.nesterov else new
    if velocity.old is not None:
        new.add_(velocity.old, alpha=rule.momentum)
    change = push.add_(new, alpha=rule.momentum) if rule.nesterov else new
    if rule.scale != 1.0:
        change = change * rule.scale
    if rule.factor is not None:
        change = change * rule.factor
    return change if rule.cap == math.inf else _cut(change, rule.cap)


def _cut(change: Tensor, cap: float) -> Tensor:
    magnitude = change.abs()
    too_large = (magnitude > cap) & (magnitude < math.inf)
    return torch.where(too_large, torch.full_like(change, cap).copysign_(change), change)


class TorchKernels:
    """No state."""

    def accumulate(
        self,
        residual: Tensor | None,
        gradient: Tensor,
        out: Tensor,
        floor: float,
        room: int,
        home: torch.device,
        velocity: Velocity | None = None,
    ) -> Callable[[], Seen]:
        gradient = gradient if velocity is None else plain_velocity(velocity, gradient)
        plain_sum(residual, gradient, out)
        largest = out.abs().max() if out.numel() else torch.zeros(())
        found = self.above(out, floor, room) if bool(torch.isfinite(largest)) else None
        reached = found is None or len(found) > 0
        seen = Seen(float(largest.item()) if reached else 0.0, None if found is None else found.to(home))
        return lambda: seen

    def above(self, values: Tensor, floor: float, room: int) -> SparseVector | None:
        indices = ((values.abs() >= floor) & (values != 0)).nonzero().squeeze(1)
        return SparseVector.at(values, indices) if indices.numel() <= room else None

    def kth_magnitude(self, values: Tensor, k: int) -> float:
        return float(torch.topk(values.abs(), k, sorted=False).values.min().item())

    def histogram(self, values: Tensor, first: int, shift: int, num_bins: int) -> Tensor:
        bins = ((values.view(torch.int32) & MAGNITUDE_BITS) >> shift) - first
        return torch.bincount(bins[bins >= 0].clamp(max=num_bins - 1), minlength=num_bins)

    def sum(self, vectors: Sequence[SparseVector]) -> SparseVector:
        return SparseVector.sum(vectors)

    def restrict(self, vector: SparseVector, indices: Tensor) -> SparseVector:
        return vector.restrict_to(indices)

    def write(self, target: Tensor, vector: SparseVector) -> None:
        target.zero_()
        target[vector.indices] = vector.values.to(target.dtype)

    def subtract(self, target: Tensor, vector: SparseVector) -> None:
        target[vector.indices] -= vector.values

    def encode_gaps(self, indices: Tensor, width: int) -> Tensor:
        dtype, most = digits(width)
        gaps = torch.diff(indices, prepend=indices.new_tensor([-1])) - 1
        ends = torch.cumsum(gaps // most + 1, 0)
        size = int(ends[-1].item()) if len(ends) else 0
        encoded = torch.full((size,), most, device=indices.device).to(dtype)
        encoded[ends - 1] = (gaps % most).to(dtype)
        return encoded.view(torch.uint8)

    def decode_gaps(self, encoded: Tensor, width: int, count: int) -> Tensor | None:
        dtype, most = digits(width)
        steps = encoded.view(dtype).to(torch.int64) & most
        is_last = steps != most
        after = torch.cumsum(steps + is_last, 0)
        indices = after[is_last] - 1
        ends_whole = steps.numel() == 0 or bool(is_last[-1].item())
        return indices if indices.numel() == count and ends_whole else None

    def hash_words(self, words: Tensor) -> int:
        return int(hash_words(words).item())


def digits(width: int) -> tuple[torch.dtype, int]:
    """How a gap's digits are stored, and the digit that says "so many, and more follows"."""
    return (torch.uint8, 0xFF) if width == 1 else (torch.int16, 0xFFFF)  # torch does little with uint16
