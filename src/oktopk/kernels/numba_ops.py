"""The kernels for a CPU, compiled by Numba."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels import numba_loops as loops
from oktopk.kernels.base import Seen, UpdateRule, Velocity, floor_bits, number_of
from oktopk.kernels.torch_ops import TorchKernels, digits, plain_velocity
from oktopk.sparse_vector import SparseVector

Array = np.ndarray[Any, Any]
_CACHE_LINE = 64
_NO_FACTOR = np.empty(0, dtype=np.float32)


class NumbaKernels:
    """No state. Means in a dtype that numpy does not know are written by plain torch."""

    def __init__(self) -> None:
        self._plain = TorchKernels()

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
        indices, values = _space(min(room, out.numel()))
        looking = np.int32(floor_bits(floor)), _array(indices), _array(values)
        if velocity is not None and (velocity.old is None or residual is None or not _is_fused(velocity.rule)):
            gradient, velocity = plain_velocity(velocity, gradient), None
        if residual is None:
            out.copy_(gradient)
            count, largest = loops.above(_array(out), *looking)
        elif velocity is None:
            arrays = _array(residual), _array(gradient.to(torch.float32)), _array(out)
            count, largest = loops.accumulate(*arrays, _on_a_line(out), *looking)
        else:
            assert velocity.old is not None
            rule = velocity.rule
            factor = _NO_FACTOR if rule.factor is None else _array(rule.factor)
            moving = _array(velocity.old), _array(velocity.new), factor
            numbers = [np.float32(each) for each in (rule.momentum, rule.gain, rule.scale, rule.cap)]
            arrays = _array(residual), _array(gradient.to(torch.float32)), _array(out)
            past_caches = _on_a_line(out) and _on_a_line(velocity.new)
            count, largest = loops.accumulate_velocity(*arrays, *moving, *numbers, past_caches, *looking)
        candidates = _vector(indices, values, count, out.numel()) if count <= room else None
        seen = Seen(number_of(largest), None if candidates is None else candidates.to(home))
        return lambda: seen

    def above(self, values: Tensor, floor: float, room: int) -> SparseVector | None:
        indices, found = _space(min(room, values.numel()))
        count, _ = loops.above(_array(values), np.int32(floor_bits(floor)), _array(indices), _array(found))
        return _vector(indices, found, count, values.numel()) if count <= room else None

    def kth_magnitude(self, values: Tensor, k: int) -> float:
        return number_of(loops.kth_magnitude(_array(values), k))

    def histogram(self, values: Tensor, first: int, shift: int, num_bins: int) -> Tensor:
        counts = torch.zeros(num_bins, dtype=torch.int64)
        loops.histogram(_array(values), first, shift, _array(counts))
        return counts

    def sum(self, vectors: Sequence[SparseVector]) -> SparseVector:
        if len(vectors) == 1:  # the result must not be the vector itself
            vectors = [SparseVector.empty(vectors[0].length, torch.device("cpu")), *vectors]
        total = vectors[0]
        for vector in vectors[1:]:
            indices, values = _space(len(total) + len(vector))
            count = loops.merge(*_arrays(total), *_arrays(vector), _array(indices), _array(values))
            total = _vector(indices, values, count, total.length)
        return total

    def restrict(self, vector: SparseVector, indices: Tensor) -> SparseVector:
        kept, values = _space(len(vector) + 1)  # one more: the loop writes before it knows
        count = loops.common(*_arrays(vector), _array(indices), _array(kept), _array(values))
        return _vector(kept, values, count, vector.length)

    def write(self, target: Tensor, vector: SparseVector) -> None:
        if target.dtype == torch.float32 and target.is_contiguous():
            ctypes.memset(target.data_ptr(), 0, 4 * target.numel())  # twice as fast as storing zeros one by one
            loops.scatter(_array(target), *_arrays(vector))
        else:
            self._plain.write(target, vector)

    def subtract(self, target: Tensor, vector: SparseVector) -> None:
        loops.subtract(_array(target), *_arrays(vector))

    def encode_gaps(self, indices: Tensor, width: int) -> Tensor:
        dtype, most = digits(width)
        span = int(indices[-1].item()) if len(indices) else 0
        encoded = torch.empty(len(indices) + span // most, dtype=dtype)
        count = loops.encode_gaps(_array(indices), most, _unsigned(encoded))
        return encoded[:count].view(torch.uint8)

    def decode_gaps(self, encoded: Tensor, width: int, count: int) -> Tensor | None:
        dtype, most = digits(width)
        indices = torch.empty(count, dtype=torch.int64)
        found = loops.decode_gaps(_unsigned(encoded.view(dtype)), most, _array(indices))
        return indices if found == count else None

    def hash_words(self, words: Tensor) -> int:
        return int(np.uint64(loops.hash_words(_array(words))).astype(np.int64))


def _is_fused(rule: UpdateRule) -> bool:
    return not rule.nesterov and (rule.factor is not None or rule.cap == math.inf)


def _on_a_line(tensor: Tensor) -> bool:
    return tensor.data_ptr() % _CACHE_LINE == 0


def _array(tensor: Tensor) -> Array:
    return cast("Array", tensor.detach().contiguous().numpy())


def _arrays(vector: SparseVector) -> tuple[Array, Array]:
    return _array(vector.indices), _array(vector.values)


def _unsigned(tensor: Tensor) -> Array:
    array = _array(tensor)
    return array.view(f"u{array.itemsize}")


def _space(room: int) -> tuple[Tensor, Tensor]:
    return torch.empty(room, dtype=torch.int64), torch.empty(room, dtype=torch.float32)


def _vector(indices: Tensor, values: Tensor, count: int, length: int) -> SparseVector:
    return SparseVector(indices[:count], values[:count], length)
