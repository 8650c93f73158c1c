"""The one error of this package."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be used; the message says which file or folder, why, and what to do."""
