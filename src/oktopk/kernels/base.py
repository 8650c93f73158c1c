"""The contract of the kernels. `oktopk.kernels.torch_ops` is its reference: all others give the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from oktopk.sparse_vector import SparseVector

MAGNITUDE_BITS = 0x7FFFFFFF
_SMALLEST_BITS = 1


def bits_of(number: float) -> int:
    """Of a magnitude in fp32: these are ordered like the numbers."""
    with np.errstate(over="ignore", under="ignore"):
        return int(np.float32(number).view(np.int32))


def number_of(bits: int) -> float:
    return float(np.int32(bits).view(np.float32))


def floor_bits(floor: float) -> int:
    """At least those of the smallest number, so that zero never reaches a floor."""
    return max(bits_of(floor), _SMALLEST_BITS)


@dataclass(frozen=True)
class Seen:
    """What the pass that made `acc` saw of the elements at or above its floor."""

    largest: float
    """The largest magnitude (NaN or Inf where there is one); 0.0 where none reached the floor."""
    candidates: SparseVector | None
    """All of them, sorted; None where there were more than there was room for. Of no use where one is NaN or Inf."""


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """How a gradient becomes a change of the parameters. The default, with no momentum, leaves it as it is.

    `velocity = momentum * velocity + gain * gradient`, where only the sum is rounded after the product with `momentum`;
    `change = velocity * scale * factor`, rounded after each product and cut to a magnitude of at most `cap`.
    """

    momentum: float
    gain: float = 1.0
    scale: float = 1.0
    nesterov: bool = False
    """Look ahead: `change` is made from `momentum * velocity + gain * gradient` instead of the velocity."""
    factor: Tensor | None = None
    """A factor for each element, the same on all ranks."""
    cap: float = math.inf
    """NaN and Inf pass, so that they are noticed."""


@dataclass(frozen=True)
class Velocity:
    """Momentum on the way in: `new` is made from `old` and the gradient, and what the rule asks for is added up.

    `old` is None where nothing has moved yet. All are flat, fp32 and of the gradient's length.
    """

    old: Tensor | None
    new: Tensor
    rule: UpdateRule


class Kernels(Protocol):
    """Loops over flat, contiguous fp32 tensors. Thresholds compare as fp32; zero never reaches one.

    Results own their memory and are on the device of what was passed in, unless it says otherwise.
    """

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
        """`out = residual + gradient` (any float dtype), and in the same pass what reached `floor`, put on `home`.

        With `velocity`, its `new` is written, and the change that its rule makes takes the gradient's place. `out` is
        none of the others. NaN reaches any floor. A GPU works on while others are asked: what was seen is known when
        the function that is returned is called, on the same stream.
        """
        ...

    def above(self, values: Tensor, floor: float, room: int) -> SparseVector | None:
        """Every non-zero element with |x| >= floor; None where there are more than `room`."""
        ...

    def kth_magnitude(self, values: Tensor, k: int) -> float:
        """The k-th largest magnitude, exactly, for 1 <= k <= len(values)."""
        ...

    def histogram(self, values: Tensor, first: int, shift: int, num_bins: int) -> Tensor:
        """How many magnitudes lie in each bin (int64): those whose bits, shifted right by `shift`, are first + bin.

        The last bin holds all that lie beyond it; what lies before the first is left out. Magnitudes of fp32 are
        ordered like their bits.
        """
        ...

    def sum(self, vectors: Sequence[SparseVector]) -> SparseVector:
        """The union of the indices, values added in the order given."""
        ...

    def restrict(self, vector: SparseVector, indices: Tensor) -> SparseVector:
        """The elements of `vector` whose index is also in the sorted `indices`."""
        ...

    def write(self, target: Tensor, vector: SparseVector) -> None:
        """`target` becomes the vector, in its own dtype: zero everywhere else."""
        ...

    def subtract(self, target: Tensor, vector: SparseVector) -> None:
        """`target[index] -= value`; `target` is fp32."""
        ...

    def encode_gaps(self, indices: Tensor, width: int) -> Tensor:
        """Sorted int64 indices as the gaps between them, in `width` (1 or 2) bytes each: see `oktopk.wire`."""
        ...

    def decode_gaps(self, encoded: Tensor, width: int, count: int) -> Tensor | None:
        """The `count` indices that `encode_gaps` encoded; None where `encoded` holds another number of them."""
        ...

    def hash_words(self, words: Tensor) -> int:
        """As `oktopk.kernels.torch_ops.hash_words`."""
        ...
