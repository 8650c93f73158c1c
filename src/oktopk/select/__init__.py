"""Which elements are worth sending: one contract, several implementations."""

from oktopk.select.base import Selector

__all__ = ["Selector"]
