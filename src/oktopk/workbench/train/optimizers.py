"""The optimizers that training knows by name."""

from __future__ import annotations

import torch

from oktopk.workbench.train.config import TrainConfig


def inner_optimizer(config: TrainConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        betas = (config.momentum, config.adam_beta2)
        return torch.optim.AdamW(model.parameters(), lr=config.lr, betas=betas, weight_decay=config.weight_decay)
    return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
