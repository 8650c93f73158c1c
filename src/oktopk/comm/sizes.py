"""How many bytes an exchange sends: the rules that transports follow, counters count by and models predict by."""

from __future__ import annotations

LENGTH_BYTES = 8
"""Sent to a peer before each buffer whose length it does not know."""
_DIRECT_BYTES = 16384


def is_direct(num_bytes: int, num_ranks: int) -> bool:
    """Whether an all_reduce of so much goes straight to every peer."""
    return num_bytes * (num_ranks - 1) <= _DIRECT_BYTES


def ring_bytes(num_bytes: int, num_ranks: int) -> int:
    """What a rank sends in a ring all-reduce of `num_bytes`."""
    return -(-2 * num_bytes * (num_ranks - 1) // num_ranks)
