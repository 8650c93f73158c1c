"""What a worker that stays for several jobs is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Job = dict[str, Any]
"""What to measure; `what` says who measures it, the rest is theirs."""
Tell = Callable[[str], None]
"""Says how far the work is; only what the first worker says is passed on."""


@dataclass(frozen=True)
class Station:
    """A worker's number among the others, and where each of them is."""

    rank: int
    size: int
    addresses: tuple[str, ...]
