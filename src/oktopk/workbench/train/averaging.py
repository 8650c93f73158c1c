"""What every worker has its own of, averaged for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor

from oktopk.workbench.worlds.membership import Member


@contextlib.contextmanager
def averaged_buffers(model: torch.nn.Module, member: Member) -> Generator[None]:
    """Validate with the mean of all workers' batch-norm statistics; each has its own back afterwards."""
    floating = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    own: list[Tensor] = [buffer.clone() for buffer in floating]
    for buffer in floating:
        member.comm.all_reduce(buffer)
        buffer /= member.place.size
    yield
    for buffer, before in zip(floating, own, strict=True):
        buffer.copy_(before)
