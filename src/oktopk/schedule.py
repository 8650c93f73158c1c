"""Which steps are dense and which sparse."""

from __future__ import annotations

from dataclasses import dataclass

from oktopk.bucket import Bucket
from oktopk.reduce.base import Phase
from oktopk.settings import Settings

NEVER = 1 << 62


@dataclass(frozen=True)
class Outline:
    """Which of `num_steps` steps are dense and which sparse.

    Attributes:
        dense_steps: The first steps.
        sparse_steps: The steps after them.
        warning: Set where no step would be sparse: why, and what to change.
    """

    dense_steps: range
    sparse_steps: range
    warning: str | None

    def __str__(self) -> str:
        lines = [f"{len(self.dense_steps)} dense steps, then {len(self.sparse_steps)} sparse steps"]
        if self.warning:
            lines.append(f"warning: {self.warning}")
        return "\n".join(lines)


class Schedule:
    """Dense for `warmup_steps`, then sparse; until somebody who has measured says otherwise.

    Attributes:
        decided_first_sparse_step: What was said instead of the setting, None: nothing. Part of a saved state.
    """

    def __init__(self, settings: Settings, reducer: str, whole_is_dense: bool = False) -> None:
        """`whole_is_dense`: a step that would send every element is dense."""
        self._settings = settings
        self._whole_is_dense = whole_is_dense
        self._reducer = reducer
        self.decided_first_sparse_step: int | None = None

    @property
    def first_sparse_step(self) -> int:
        decided = self.decided_first_sparse_step
        return self._settings.warmup_steps if decided is None else decided

    def phase(self, step: int, bucket: Bucket) -> Phase:
        if self._reducer == "dense" or bucket.dense or step < self.first_sparse_step:
            return "dense"
        n = bucket.numel
        whole = self._whole_is_dense and self._settings.k_at(step, n) >= n
        return "dense" if whole or n < self._settings.min_sparse_numel else "sparse"

    def outline(self, num_steps: int) -> Outline:
        if num_steps < 1:
            raise ValueError(f"num_steps={num_steps!r}: must be at least 1")
        num_dense = num_steps if self._reducer == "dense" else min(self.first_sparse_step, num_steps)
        return Outline(range(num_dense), range(num_dense, num_steps), self._warning(num_dense, num_steps))

    def _warning(self, num_dense: int, num_steps: int) -> str | None:
        if num_dense < num_steps or self.decided_first_sparse_step is not None:
            return None
        if self._reducer == "dense":
            why = "reducer 'dense' never compresses; choose another, such as 'oktopk'"
        else:
            why = (
                f"warmup_steps={self._settings.warmup_steps} takes up all {num_steps} steps; "
                f"set warmup_steps below {num_steps} or train longer"
            )
        return f"no step will be sparse: {why}"
