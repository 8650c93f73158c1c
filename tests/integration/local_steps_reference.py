"""LocalSteps written down again: every rank in one process, each with a torch optimizer, the rest in plain fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.integration.training import Net, flat_parameters, loss_of

Make = Callable[[nn.Module], Optimizer]
Parts = Sequence[Tensor]
"""The places of each group of parameters in the flat tensor of all."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What LocalSteps is told; `density` None is dense. `settings` makes it of this."""

    every: int
    density: float | None = None
    warmup_steps: int = 0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    stream: bool = False
    delay: int = 0
    norm_clip: float | None = None
    accumulated: int = 1
    """Batches for a step."""


@dataclass
class _UnderWay:
    started: int
    part: Tensor
    mean: Tensor
    own: list[Tensor]
    plain: bool


class Reference:
    """All ranks, step by step.

    Attributes:
        parameters: Each rank's, flat.
        anchor: What all ranks agreed on last.
        owed: Each rank's.
    """

    def __init__(self, num_ranks: int, plan: Plan, make: Make, parts: Parts | None = None, merge: str = "all") -> None:
        """`merge`: "all" sums that were sent are applied, or the k "largest" of them."""
        self._plan, self._merge = plan, merge
        self._nets = [Net() for _ in range(num_ranks)]
        self._optimizers = [make(net) for net in self._nets]
        self.anchor = flat_parameters(self._nets[0]).double()
        n = self.anchor.numel()
        self._parts = [torch.arange(n)] if parts is None else list(parts)
        self.owed = [torch.zeros(n, dtype=torch.float64) for _ in self._nets]
        self._velocity = torch.zeros(n, dtype=torch.float64)
        self._under_way: list[_UnderWay] = []
        self._num_steps = 0

    @property
    def parameters(self) -> list[Tensor]:
        return [flat_parameters(net).double() for net in self._nets]

    def step(self) -> None:
        plan, size = self._plan, len(self._nets)
        for rank in range(size):
            local_step(self._nets[rank], self._optimizers[rank], rank, self._num_steps, plan)
        self._num_steps += 1
        self._land(plan.delay)
        is_warm = self._num_steps <= plan.warmup_steps
        for place, part in enumerate(self._parts):
            turn = place * plan.every // len(self._parts) if plan.stream else 0
            if is_warm or self._num_steps % plan.every == turn:
                own = [values[part] for values in self.parameters]
                mean = self._mean(part, [self.anchor[part] - values for values in own], is_warm)
                self._under_way.append(_UnderWay(self._num_steps, part, mean, own, is_warm))
        if is_warm or not plan.delay:
            self._land(0)

    def _mean(self, part: Tensor, changes: list[Tensor], is_warm: bool) -> Tensor:
        if is_warm or self._plan.density is None:
            return torch.stack(changes).mean(0)
        k = max(1, round(self._plan.density * part.numel()))
        acc = [owed[part] + change for owed, change in zip(self.owed, changes, strict=True)]
        sent = [_largest(each, k) for each in acc]
        sums = torch.stack(sent).sum(0)
        applied = sums if self._merge == "all" else _largest(sums, k)
        for owed, whole, mine in zip(self.owed, acc, sent, strict=True):
            owed[part] = whole - torch.where(applied != 0, mine, 0.0)
        return applied / len(sent)

    def _land(self, patience: int) -> None:
        while self._under_way and self._num_steps - self._under_way[0].started >= patience:
            each = self._under_way.pop(0)
            change = each.mean
            if self._plan.outer_momentum and not each.plain:
                mu = self._plan.outer_momentum
                self._velocity[each.part] = mu * self._velocity[each.part] + change
                change = change + mu * self._velocity[each.part]
            self.anchor[each.part] -= change * (1.0 if each.plain else self._plan.outer_lr)
            for net, own, values in zip(self._nets, each.own, self.parameters, strict=True):
                values[each.part] += self.anchor[each.part] - own
                _set(net, values)


def local_step(net: nn.Module, optimizer: Optimizer, rank: int, step: int, plan: Plan) -> None:
    """What a user does in plain torch."""
    optimizer.zero_grad()
    backward(net, rank, step, plan.accumulated)
    if plan.norm_clip is not None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), plan.norm_clip)
    optimizer.step()


def backward(net: nn.Module, rank: int, step: int, accumulated: int = 1) -> None:
    for part in range(accumulated):
        (loss_of(net, rank, step + 500 * part) / accumulated).backward()


def _largest(values: Tensor, k: int) -> Tensor:
    kept = torch.zeros_like(values)
    places = values.abs().topk(k).indices
    kept[places] = values[places]
    return kept


def _set(net: nn.Module, values: Tensor) -> None:
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(values.float(), net.parameters())
