"""The optimizers that training knows by name, and what makes them distributed."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from oktopk import optim
from oktopk.adapters.local_steps import LocalSteps
from oktopk.adapters.optimizer import DistributedOptimizer
from oktopk.comm.base import Communicator
from oktopk.metrics.trainer_lists import MetricLists
from oktopk.settings import DensitySchedule
from oktopk.workbench.train.config import TrainConfig

TrainOptimizer = DistributedOptimizer | LocalSteps | optim.AdamW | optim.SGD


def make_optimizer(
    config: TrainConfig,
    model: torch.nn.Module,
    *,
    reducer: str,
    density: float | DensitySchedule,
    comm: Communicator,
    trainer: MetricLists,
) -> TrainOptimizer:
    """What exchanges gradients, updates or the changes of local steps: a collective call."""
    how: dict[str, Any] = {
        "comm": comm,
        "trainer": trainer,
        "norm_clip": config.norm_clip or None,
        "bucket_cap_mb": config.bucket_cap_mb,
        "dense_vectors": config.dense_vectors,
        "settings": config.allreducer_settings(),
        "density": density,
    }
    if config.compress == "update":
        params, options = _params(config, model, names=True), _options(config)
        if config.optimizer == "adamw":
            return optim.AdamW(params, reducer=reducer, **options, **how)
        return optim.SGD(params, reducer=reducer, **options, **how)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.SGD
    inner: torch.optim.Optimizer = kind(_params(config, model), **_options(config))
    if not config.local_steps:
        return DistributedOptimizer(inner, model.named_parameters(), reducer, **how)
    return LocalSteps(
        inner,
        model.named_parameters(),
        config.local_steps,
        reducer,
        outer_lr=config.outer_lr,
        outer_momentum=config.outer_momentum,
        stream=config.local_stream,
        delay=config.local_delay,
        **how,
    )


def agreed_parameters(optimizer: TrainOptimizer) -> contextlib.AbstractContextManager[None]:
    """Meanwhile the model has the parameters that all workers agreed on last."""
    return optimizer.agreed() if isinstance(optimizer, LocalSteps) else contextlib.nullcontext()


def _options(config: TrainConfig) -> dict[str, Any]:
    if config.optimizer == "adamw":
        betas = (config.momentum, config.adam_beta2)
        return {"lr": config.lr, "betas": betas, "weight_decay": config.weight_decay}
    return {"lr": config.lr, "momentum": config.momentum, "weight_decay": config.weight_decay}


def _params(config: TrainConfig, model: torch.nn.Module, names: bool = False) -> list[dict[str, Any]]:
    """AdamW decays matrices only; biases and norm layers have no direction that decay could keep small."""
    named = list(model.named_parameters())
    vectors = [(name, p) for name, p in named if config.optimizer == "adamw" and p.dim() <= 1]
    others = [(name, p) for name, p in named if not (config.optimizer == "adamw" and p.dim() <= 1)]
    groups: list[tuple[list[tuple[str, torch.nn.Parameter]], dict[str, Any]]] = [(others, {})]
    if vectors:
        groups.append((vectors, {"weight_decay": 0.0}))
    return [{"params": each if names else [p for _, p in each], **own} for each, own in groups]
