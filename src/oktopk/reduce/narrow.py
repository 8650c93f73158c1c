"""All values of a vector in fewer bytes than fp32 takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from oktopk.sparse_vector import to_narrow

_BLOCK = 1024
_LEVELS = 127
_LARGEST_SCALE = torch.finfo(torch.float32).max / (_LEVELS + 1)
"""A little below the largest number's, so that rounding never makes Inf of the highest level."""


class Packing(Protocol):
    """fp32 values <-> bytes. What is unpacked has the same bits wherever that is done."""

    def pack(self, values: Tensor) -> Tensor:
        """Flat, finite values as a new flat uint8 tensor on the same device."""
        ...

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        """The `count` values as they arrive, a new fp32 tensor."""
        ...


class Bf16Packing:
    """2 bytes a value; what does not fit becomes the largest that does."""

    def pack(self, values: Tensor) -> Tensor:
        return to_narrow(values, torch.bfloat16).view(torch.uint8)

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        return packed.view(torch.bfloat16)[:count].float()


class Int8Packing:
    """1 byte a value and 4 for each 1024: the largest magnitude among them has the level 127."""

    def pack(self, values: Tensor) -> Tensor:
        blocks = pad(values, (0, -values.numel() % _BLOCK)).view(-1, _BLOCK)
        scales = (blocks.abs().amax(1, keepdim=True) / _LEVELS).clamp_(max=_LARGEST_SCALE)
        levels = torch.where(scales > 0, blocks / scales, 0.0).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
        return torch.cat([scales.view(-1).view(torch.uint8), levels.view(-1)[: values.numel()].view(torch.uint8)])

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        num_blocks = -(-count // _BLOCK)
        scales = packed[: 4 * num_blocks].view(torch.float32)
        levels = pad(packed[4 * num_blocks :].view(torch.int8), (0, -count % _BLOCK)).view(-1, _BLOCK)
        return (levels.float() * scales[:, None]).view(-1)[:count]


PACKINGS: Mapping[str, Packing | None] = {"fp32": None, "bf16": Bf16Packing(), "int8": Int8Packing()}
"""By the setting `dense_dtype`; None: values travel as they are."""
