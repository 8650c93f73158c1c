"""A small model and data, the same on every machine, and ways to train it; for tests of the adapters."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

_ONE_AT_A_TIME = threading.Lock()
"""Simulated ranks are threads, and torch has one generator for all of them."""


class Net(nn.Module):
    def __init__(self, seed: int = 0, width: int = 32) -> None:
        super().__init__()
        with _ONE_AT_A_TIME:
            torch.manual_seed(seed)
            self.hidden = nn.Linear(10, width)
            self.middle = nn.Linear(width, width)
            self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(torch.tanh(self.hidden(x)))))


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Three classes that a small network can learn; another batch on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 10, generator=generator)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long() + (x[:, 3] > 0.5).long()
    return x.to(dtype), y


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step, next(model.parameters()).dtype)
    return nn.functional.cross_entropy(model(x).float(), y)


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def held_out_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(float(loss_of(model, rank=99, step=step)) for step in range(20)) / 20


@dataclass
class FakeTrainer:
    sparsities: list[float] = field(default_factory=list)
    compression_ratios: list[float] = field(default_factory=list)
    communication_sizes: list[float] = field(default_factory=list)
