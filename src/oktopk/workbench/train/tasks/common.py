"""What tasks share: they fail together, and what is random in a batch depends on its place alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from oktopk.comm.base import all_gather_int
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.worlds.membership import Member

T = TypeVar("T")


def on_all(member: Member, make: Callable[[], T]) -> T:
    """`make()` on every worker. Where it raises DataError on one, all raise one: nobody waits for those that left.

    All are through with it when it returns, so that they can read what one of them wrote.
    """
    result: T | None = None
    error: DataError | None = None
    try:
        result = make()
    except DataError as raised:
        error = raised
    failed = all_gather_int(member.comm, int(error is not None), member.device)
    if error is not None:
        raise error
    if any(failed):
        raise DataError(f"the data cannot be used by worker {failed.index(1)}, which says why")
    return cast("T", result)


def seed_torch(*numbers: int) -> None:
    """From these numbers alone: dropout needs no place in a checkpoint, on any device."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little"))


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def perplexity(loss: float | None) -> float | None:
    """Of a mean loss in nats; None where that is no number, or one with a perplexity beyond all numbers."""
    return math.exp(loss) if loss is not None and loss < 700.0 else None
