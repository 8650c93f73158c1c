"""AdamW with exchanged updates, written down again: every rank in one process, plain fp64 tensors, one bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def is_measured(sparse_step: int) -> bool:
    """Sparse steps are counted from 1. Every 32nd up to 1024, then 32 times in each time that is e times as long."""
    if sparse_step <= 1024:
        return sparse_step % 32 == 0
    due = (math.ceil(1024 * math.exp(number / 32)) for number in range(1, 500))
    return next(each for each in due if each >= sparse_step) == sparse_step


def furthest_of_adam(beta1: float, beta2: float) -> float:
    """The most that |m| / sqrt(v) can be, in units of the learning rate, whatever the gradients: Cauchy and Schwarz.

    Reached by gradients that grow as (beta2 / beta1)^step, where that is so fast that the sums converge.
    """
    ages = torch.arange(3000, dtype=torch.float64)
    gradients = (beta1 / beta2) ** ages
    m = ((1 - beta1) * beta1**ages * gradients).sum()
    v = ((1 - beta2) * beta2**ages * gradients**2).sum()
    return max(1.0, float(m / v.sqrt()))


class Updates:
    """What every rank of `num_ranks` would change on its own, step by step.

    Attributes:
        momentum: Each rank's.
        second: The second moment that all share.
        refreshed: Whether it was measured beside the last step, a sparse one.
        num_cut: How many changes were cut so far to what a rank is allowed: P times as far as Adam ever moves.
    """

    def __init__(
        self,
        numels: Sequence[int],
        num_ranks: int,
        betas: tuple[float, float],
        sparse_beta1: float,
        eps: float = 1e-8,
    ) -> None:
        """`numels`: of the parameters, in the order in which they lie."""
        n = sum(numels)
        self.momentum = [torch.zeros(n, dtype=torch.float64) for _ in range(num_ranks)]
        self.second = torch.zeros(n, dtype=torch.float64)
        self.refreshed = False
        self.num_cut = 0
        self._numels = list(numels)
        self._betas, self._sparse_beta1, self._eps = betas, sparse_beta1, eps
        self._empty = torch.ones(n, dtype=torch.float64)
        """The part of the momentum that no gradient has filled, and likewise of the second moment."""
        self._unknown = torch.ones(n, dtype=torch.float64)
        self._furthest = num_ranks * furthest_of_adam(*betas)
        self._sparse_steps = self._steps_since_measured = 0

    def of(self, gradients: list[Tensor], lr: float, dense: bool, held: Tensor | None = None) -> list[Tensor]:
        """Each rank's change; in a dense step all ranks make the same of the mean gradient.

        Args:
            gradients: Each rank's.
            lr: The learning rate.
            dense: The phase.
            held: Elements that take no part.
        """
        part = torch.ones_like(self.second, dtype=torch.bool) if held is None else ~held
        mean = torch.stack([g.double() for g in gradients]).mean(0)
        self._sparse_steps = 0 if dense else self._sparse_steps + 1
        self.refreshed = not dense and is_measured(self._sparse_steps)
        if dense:
            shared = torch.stack(self.momentum).mean(0)
            gradients, self.momentum = [mean] * len(gradients), [shared] * len(gradients)
        beta = self._betas[0] if dense else self._sparse_beta1
        self.momentum = [
            torch.where(part, beta * m + (1 - beta) * g.double(), m)
            for m, g in zip(self.momentum, gradients, strict=True)
        ]
        self._empty = torch.where(part, self._empty * beta, self._empty)
        self._measure(mean, part, dense)
        root = (self.second / (1 - self._unknown)).sqrt()
        if not dense:  # none is below a tenth of the root mean square of its parameter
            pieces = root.split(self._numels)
            root = torch.cat([torch.maximum(p, 0.1 * p.square().mean().sqrt()) for p in pieces])
        factor = torch.where(part & (self._unknown < 1), 1 / (root + self._eps), torch.zeros_like(root))
        furthest = lr * self._furthest
        changes = [lr * m / (1 - self._empty) * factor for m in self.momentum]
        self.num_cut += sum(int((change.abs() > furthest).sum()) for change in changes)
        return [change.clamp(-furthest, furthest) for change in changes]

    def _measure(self, mean: Tensor, part: Tensor, dense: bool) -> None:
        self._steps_since_measured += 1
        if not (dense or self.refreshed):
            return
        beta2 = self._betas[1]
        kept = max(beta2**self._steps_since_measured, 1 - max(1 - beta2, 1 / 20))
        self.second = torch.where(part, kept * self.second + (1 - kept) * mean**2, self.second)
        self._unknown = torch.where(part, kept * self._unknown, self._unknown)
        self._steps_since_measured = 0

    def clear(self, applied: Tensor) -> None:
        self.momentum = [torch.where(applied, torch.zeros_like(m), m) for m in self.momentum]


class Oracle:
    """The whole algorithm, with the reducer that applies the k largest sums of every rank's k largest.

    Attributes:
        parameters: Those of every rank: there is one copy.
        owed: Each rank's.
        updates: See `Updates`.
    """

    def __init__(self, parameters: Tensor, k: int, weight_decay: float, updates: Updates) -> None:
        self.parameters = parameters.double().clone()
        self.owed = [torch.zeros_like(self.parameters) for _ in updates.momentum]
        self.updates = updates
        self._k, self._weight_decay = k, weight_decay

    def step(self, gradients: list[Tensor], lr: float, dense: bool) -> None:
        changes = self.updates.of(gradients, lr, dense)
        decayed = self.parameters * (1.0 - lr * self._weight_decay)
        if dense:
            self.parameters = decayed - changes[0]
            return
        taken = [owed + u for owed, u in zip(self.owed, changes, strict=True)]
        sent = [_largest(each, self._k) for each in taken]
        sums = torch.stack(sent).sum(0)
        applied = _largest(sums, self._k) != 0
        self.owed = [acc - torch.where(applied, s, 0.0) for acc, s in zip(taken, sent, strict=True)]
        self.updates.clear(applied)
        self.parameters = decayed - torch.where(applied, sums, 0.0) / len(sent)


def _largest(values: Tensor, k: int) -> Tensor:
    """The k of the largest magnitude, zero elsewhere."""
    kept = torch.zeros_like(values)
    indices = values.abs().topk(k).indices
    kept[indices] = values[indices]
    return kept
