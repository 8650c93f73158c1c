"""The stages of a training step and of a reduction: every file that names them asks here."""

from __future__ import annotations

from oktopk.metrics.meter import STAGES as REDUCTION_STAGES

LOOP_STAGES = ("io", "forward", "backward", "wait")
"""Of the training loop, one after the other; `wait` is for reductions that backward has not hidden."""

__all__ = ["LOOP_STAGES", "REDUCTION_STAGES"]
