"""The kernels for a GPU. What is only done to a few elements is left to plain torch, on the GPU too."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportIndexIssue=false

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oktopk.kernels import triton_loops as loops
from oktopk.kernels.base import Seen, Velocity, floor_bits, number_of
from oktopk.kernels.torch_ops import TorchKernels
from oktopk.sparse_vector import SparseVector, ints

_BLOCK, _LOOK_WARPS = 2048, 4
_GROUP, _COLLECT_WARPS = 4, 1
_RADIX = ((23, 8), (15, 8), (7, 8), (0, 7))
_HISTOGRAM_BLOCK, _HISTOGRAM_PROGRAMS = 4096, 1024
_SCATTER_BLOCK = 1024
_FEW = 1 << 21


class TritonKernels(TorchKernels):
    """No state. One pass over a bucket, then one copy and one wait for what it found."""

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
        return _look(residual, gradient, out, floor, min(room, out.numel()), velocity).fetch(home)

    def above(self, values: Tensor, floor: float, room: int) -> SparseVector | None:
        found = _look(None, values.contiguous(), None, floor, min(room, values.numel()))
        return found.fetch(values.device)().candidates

    def kth_magnitude(self, values: Tensor, k: int) -> float:
        if values.numel() <= _FEW:  # sorted sooner than the kernels for all its digits are started
            return float(values.abs().sort().values[-k].item())
        state = torch.tensor([0, k], dtype=torch.int32).to(values.device, non_blocking=True)
        for shift, num_bits in _RADIX:
            counts = _count_digits(values.contiguous(), state, shift, num_bits)
            loops.pick_digit[(1,)](counts, state, BITS=num_bits)
        return number_of(int(state[0].item()))

    def write(self, target: Tensor, vector: SparseVector) -> None:
        target.zero_()
        _scatter(target, vector, subtract=False)

    def subtract(self, target: Tensor, vector: SparseVector) -> None:
        _scatter(target, vector, subtract=True)


class _Found:
    """What a pass found, still on the GPU: how many, the largest one's bits, and room for them."""

    def __init__(self, room: int, length: int, device: torch.device) -> None:
        self._room = room
        self._length = length
        self.indices = torch.empty(room, dtype=torch.int64, device=device)
        self.values = torch.empty(room, dtype=torch.float32, device=device)
        self.facts = torch.empty(2, dtype=torch.int64, device=device)

    def fetch(self, home: torch.device) -> Callable[[], Seen]:
        """What was seen, once it is asked for: the candidates on `home`, unless there was no room.

        For the host, half of the room travels with the facts, before anybody knows how much is needed: a wait costs
        more than a copy.
        """
        start = self._room // 2 if home.type == "cpu" else 0
        arriving = _to_host(self.facts, *((self.indices[:start], self.values[:start]) if start else ()))

        def seen() -> Seen:
            facts, *rest = arriving()
            indices, values = rest or (self.indices, self.values)
            count, largest_bits = ints(facts)
            largest = number_of(largest_bits)
            if count > self._room:
                return Seen(largest, None)
            if home.type == "cpu" and count > start:
                indices, values = _to_host(self.indices[:count], self.values[:count])()
            return Seen(largest, SparseVector(indices[:count], values[:count], self._length).to(home))

        return seen


def _to_host(*tensors: Tensor) -> Callable[[], list[Tensor]]:
    """Starts copies to pinned memory. To call the result is to wait for them, leaving the processor to others."""
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
    done = torch.cuda.Event(blocking=True)
    done.record()

    def arrived() -> list[Tensor]:
        done.synchronize()
        return copies

    return arrived


def _look(
    residual: Tensor | None,
    gradient: Tensor,
    out: Tensor | None,
    floor: float,
    room: int,
    velocity: Velocity | None = None,
) -> _Found:
    n, device = gradient.numel(), gradient.device
    found = _Found(room, n, device)
    if n == 0:
        found.facts.zero_()
        return found
    blocks = -(-n // _BLOCK)
    num_words = blocks * (_BLOCK // 32)
    scratch = torch.empty(num_words + blocks, dtype=torch.int32, device=device)
    words, counts = scratch[:num_words], scratch[num_words:]
    sums = gradient if out is None else out
    before = gradient if residual is None else residual
    kinds = {"ADD": residual is not None, "STORE": out is not None, "MOVE": velocity is not None}
    moving, moving_kinds = _moving(velocity, gradient)
    loops.look[(blocks,)](
        before,
        gradient,
        sums,
        *moving,
        words,
        counts,
        found.facts,
        floor_bits(floor),
        n,
        **kinds,
        **moving_kinds,
        BLOCK=_BLOCK,
        num_warps=_LOOK_WARPS,
        enable_fp_fusion=False,
    )
    ends = torch.cumsum(counts, 0)
    loops.collect[(-(-blocks // _GROUP),)](
        sums,
        words,
        ends,
        room,
        found.indices,
        found.values,
        found.facts,
        num_words,
        BLOCK=_BLOCK,
        GROUP=_GROUP,
        num_warps=_COLLECT_WARPS,
    )
    return found


def _moving(velocity: Velocity | None, gradient: Tensor) -> tuple[tuple[object, ...], dict[str, bool]]:
    """What `look` wants for the rule of an update; where something is not read, any tensor stands in its place."""
    if velocity is None:
        unread = (gradient, gradient, gradient, 0.0, 1.0, 1.0, 0.0)
        return unread, {"HAS_OLD": False, "NESTEROV": False, "HAS_FACTOR": False, "CUT": False}
    rule, new = velocity.rule, velocity.new
    old = new if velocity.old is None else velocity.old
    factor = new if rule.factor is None else rule.factor
    kinds = {
        "HAS_OLD": velocity.old is not None, "NESTEROV": rule.nesterov, "HAS_FACTOR": rule.factor is not None,
        "CUT": rule.cap < math.inf,
    }  # fmt: skip
    return (old, new, factor, rule.momentum, rule.gain, rule.scale, rule.cap if kinds["CUT"] else 0.0), kinds


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
