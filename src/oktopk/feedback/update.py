"""What makes a gradient a change of the parameters before it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from oktopk.bucket import Slot
from oktopk.kernels.base import UpdateRule
from oktopk.reduce.base import Phase


class Update(Protocol):
    """One bucket's way from gradient to change in one step. Every rank has the same.

    In a sparse step the rule is applied to this rank's gradient, and the change is what is owed and sent. In a dense
    step the mean gradient is sent and the rule is applied to it: the rule is linear, so both mean the same.
    """

    @property
    def wants_mean(self) -> bool:
        """Whether the mean gradient is to be exchanged in this step even if it is sparse."""
        ...

    def learn(self, mean: Tensor, unused: Sequence[Slot]) -> None:
        """Take up the mean gradient, which has the same bits on all ranks, except for parameters that nobody used.

        Called before `rule`, in every dense step and where `wants_mean`.
        """
        ...

    def rule(self, phase: Phase) -> UpdateRule:
        """The rule of this step, for a mean gradient (dense) or for this rank's own (sparse)."""
        ...
