"""The kernels for a GPU. What is only done to a few elements is left to plain torch, on the GPU too."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels import triton_loops as loops
from oktopk.kernels.base import Seen
from oktopk.kernels.torch_ops import TorchKernels
from oktopk.types import SparseVector

_BLOCK, _LOOK_WARPS = 1024, 4
_GROUP, _COLLECT_WARPS = 8, 2
_RADIX = ((23, 8), (15, 8), (7, 8), (0, 7))
_HISTOGRAM_BLOCK, _HISTOGRAM_PROGRAMS = 4096, 1024
_SCATTER_BLOCK = 1024
_SMALLEST_BITS = 1


class TritonKernels(TorchKernels):
    """No state. One pass over a bucket, then one copy and one wait for what it found."""

    def accumulate(
        self, residual: Tensor | None, gradient: Tensor, out: Tensor, floor: float, room: int, home: torch.device
    ) -> Seen:
        room = min(room, out.numel())
        found = _look(residual, gradient, out, floor, room)
        count, largest_bits = found.summary()
        candidates = found.vector(count, home) if count <= room else None
        return Seen(float(np.int32(largest_bits).view(np.float32)), candidates)

    def above(self, values: Tensor, floor: float, room: int) -> SparseVector | None:
        room = min(room, values.numel())
        found = _look(None, values.contiguous(), None, floor, room)
        count, _ = found.summary()
        return found.vector(count, values.device) if count <= room else None

    def kth_magnitude(self, values: Tensor, k: int) -> float:
        state = torch.tensor([0, k], dtype=torch.int32).to(values.device, non_blocking=True)
        for shift, num_bits in _RADIX:
            counts = _count_digits(values.contiguous(), state, shift, num_bits)
            loops.pick_digit[(1,)](counts, state, BITS=num_bits)
        return float(np.int32(state[0].item()).view(np.float32))

    def histogram(self, values: Tensor, prefix: int, shift: int, num_bits: int) -> Tensor:
        state = torch.tensor([prefix], dtype=torch.int32).to(values.device, non_blocking=True)
        return _count_digits(values.contiguous(), state, shift, num_bits).to(torch.int64)

    def scatter(self, target: Tensor, vector: SparseVector) -> None:
        _scatter(target, vector, subtract=False)

    def subtract(self, target: Tensor, vector: SparseVector) -> None:
        _scatter(target, vector, subtract=True)


class _Found:
    """What a pass found, still on the GPU: its number and largest beside room for it."""

    def __init__(self, room: int, length: int, device: torch.device) -> None:
        self._length = length
        self.indices = torch.empty(room, dtype=torch.int64, device=device)
        self.values = torch.empty(room, dtype=torch.float32, device=device)
        self.facts = torch.zeros(2, dtype=torch.int64, device=device)

    def summary(self) -> tuple[int, int]:
        """The number found, also beyond the room, and the largest one's bits. Waits for this stream alone."""
        count, largest = _to_host(self.facts).tolist()
        return int(count), int(largest)

    def vector(self, count: int, home: torch.device) -> SparseVector:
        indices, values = self.indices[:count], self.values[:count]
        if home.type == "cpu":
            indices, values = _to_host(indices, values)
        return SparseVector(indices, values, self._length)


def _to_host(*tensors: Tensor) -> Any:
    """Copies in pinned memory, after one wait for the current stream; a single one comes alone."""
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies if len(copies) > 1 else copies[0]


def _look(residual: Tensor | None, gradient: Tensor, out: Tensor | None, floor: float, room: int) -> _Found:
    n, device = gradient.numel(), gradient.device
    found = _Found(room, n, device)
    if n == 0:
        return found
    blocks = -(-n // _BLOCK)
    words = torch.empty(blocks * (_BLOCK // 32), dtype=torch.int32, device=device)
    counts = torch.empty(blocks, dtype=torch.int32, device=device)
    sums = gradient if out is None else out
    before = gradient if residual is None else residual
    kinds = {"ADD": residual is not None, "STORE": out is not None}
    loops.look[(blocks,)](
        before, gradient, sums, words, counts, _bits_of(floor), n, **kinds, BLOCK=_BLOCK, num_warps=_LOOK_WARPS
    )
    ends = torch.cumsum(counts, 0)
    loops.collect[(-(-blocks // _GROUP),)](
        sums,
        words,
        ends,
        room,
        found.indices,
        found.values,
        found.facts[1:],
        words.numel(),
        BLOCK=_BLOCK,
        GROUP=_GROUP,
        num_warps=_COLLECT_WARPS,
    )
    found.facts[0] = ends[-1]
    return found


def _count_digits(values: Tensor, state: Tensor, shift: int, num_bits: int) -> Tensor:
    counts = torch.zeros(1 << num_bits, dtype=torch.int32, device=values.device)
    n = values.numel()
    blocks = -(-n // _HISTOGRAM_BLOCK)
    each = 1 << max(0, -(-blocks // _HISTOGRAM_PROGRAMS) - 1).bit_length()  # a power of two: few variants to compile
    if n:
        loops.count_digits[(-(-blocks // each),)](
            values, counts, state, n, SHIFT=shift, BITS=num_bits, BLOCK=_HISTOGRAM_BLOCK, BLOCKS=each, num_warps=8
        )
    return counts


def _scatter(target: Tensor, vector: SparseVector, subtract: bool) -> None:
    count = len(vector)
    if count:
        grid = (-(-count // _SCATTER_BLOCK),)
        loops.scatter[grid](
            target, vector.indices, vector.values, count, SUBTRACT=subtract, BLOCK=_SCATTER_BLOCK, num_warps=4
        )


def _bits_of(floor: float) -> int:
    """Of the fp32 number; at least those of the smallest one, so that zero never reaches it."""
    with np.errstate(over="ignore", under="ignore"):
        return max(int(np.float32(floor).view(np.int32)), _SMALLEST_BITS)
