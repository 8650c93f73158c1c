"""Which elements are worth sending."""

from oktopk.select.base import Accumulated, Selector

__all__ = ["Accumulated", "Selector"]
