"""The model of what a rank does locally in a steady step, beside the pass over the bucket that every reducer needs."""

from __future__ import annotations

from typing import NamedTuple


class Amount(NamedTuple):
    """So many sparse vectors, with so many pairs in all of them."""

    vectors: float = 0.0
    pairs: float = 0.0

    def plus(self, other: Amount) -> Amount:
        return Amount(self.vectors + other.vectors, self.pairs + other.pairs)


class Work(NamedTuple):
    """What a rank encodes, decodes and adds up in one reduction."""

    encoded: Amount = Amount()
    decoded: Amount = Amount()
    summed: Amount = Amount()
    chosen: float = 0.0
    """Elements that are selected or applied, beside the k that every rank chooses."""
