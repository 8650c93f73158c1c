"""What a worker knows when it measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Job = dict[str, Any]
"""What to measure; `what` says who measures it, the rest is theirs."""
Tell = Callable[[str], None]
"""Says how far the work is; only what the first worker says is passed on."""


@dataclass(frozen=True)
class Place:
    """A worker among the others."""

    rank: int
    size: int
    addresses: tuple[str, ...]
