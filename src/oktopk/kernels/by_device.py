"""The best kernels there are for whatever device a tensor is on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels, Seen
from oktopk.kernels.torch_ops import TorchKernels
from oktopk.sparse_vector import SparseVector

logger = logging.getLogger("oktopk")


class ByDevice:
    """Passes every call on to the kernels of the tensors' device; those are made when first needed."""

    def __init__(self, makers: Mapping[str, Callable[[], Kernels]]) -> None:
        self._makers = makers
        self._made: dict[str, Kernels] = {}

    def _on(self, tensor: Tensor) -> Kernels:
        kind = tensor.device.type
        if kind not in self._made:
            self._made[kind] = self._makers.get(kind, TorchKernels)()
        return self._made[kind]

    def accumulate(
        self, residual: Tensor | None, gradient: Tensor, out: Tensor, floor: float, room: int, home: torch.device
    ) -> Callable[[], Seen]:
        return self._on(out).accumulate(residual, gradient, out, floor, room, home)

    def above(self, values: Tensor, floor: float, room: int) -> SparseVector | None:
        return self._on(values).above(values, floor, room)

    def kth_magnitude(self, values: Tensor, k: int) -> float:
        return self._on(values).kth_magnitude(values, k)

    def histogram(self, values: Tensor, first: int, shift: int, num_bins: int) -> Tensor:
        return self._on(values).histogram(values, first, shift, num_bins)

    def sum(self, vectors: Sequence[SparseVector]) -> SparseVector:
        return self._on(vectors[0].values).sum(vectors)

    def restrict(self, vector: SparseVector, indices: Tensor) -> SparseVector:
        return self._on(indices).restrict(vector, indices)

    def write(self, target: Tensor, vector: SparseVector) -> None:
        self._on(target).write(target, vector)

    def subtract(self, target: Tensor, vector: SparseVector) -> None:
        self._on(target).subtract(target, vector)

    def pack(self, indices: Tensor, width: int) -> Tensor:
        return self._on(indices).pack(indices, width)

    def unpack(self, packed: Tensor, width: int, count: int) -> Tensor | None:
        return self._on(packed).unpack(packed, width, count)

    def hash_words(self, words: Tensor) -> int:
        return self._on(words).hash_words(words)


def numba_kernels() -> Kernels:
    """ImportError where there is no numba."""
    from oktopk.kernels.numba_ops import NumbaKernels

    return NumbaKernels()


def triton_kernels() -> Kernels:
    """ImportError where there is no triton."""
    from oktopk.kernels.triton_ops import TritonKernels

    return TritonKernels()


def _or_plain(make: Callable[[], Kernels]) -> Kernels:
    try:
        return make()
    except ImportError as error:
        logger.warning("fast kernels are not there (%s): plain torch does their work, more slowly", error)
        return TorchKernels()


def best_kernels() -> ByDevice:
    return ByDevice({"cpu": lambda: _or_plain(numba_kernels), "cuda": lambda: _or_plain(triton_kernels)})
