"""Putting the mean into a bucket, whatever its dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk.feedback.residual import Update
from oktopk.kernels.base import Kernels
from oktopk.sparse_vector import SparseVector, to_narrow


def write_mean(mean: Update, target: Tensor, kernels: Kernels) -> Update | None:
    """Put `mean` into `target`; returns what the target's dtype rounded away (None: nothing)."""
    values = mean.values if isinstance(mean, SparseVector) else mean
    exact = target.dtype in (torch.float32, torch.float64)
    stored = values if exact else to_narrow(values, target.dtype)
    if not isinstance(mean, SparseVector):
        target.copy_(stored)
        return None if exact else values - stored.float()
    kernels.write(target, SparseVector(mean.indices, stored, mean.length).to(target.device))
    return None if exact else SparseVector(mean.indices, values - stored.float(), mean.length)
