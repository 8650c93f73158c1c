"""One file for each allreduce: straight-line, blocking, knowing protocols only."""

from oktopk.reduce.base import Reducer, ReducerSettings

__all__ = ["Reducer", "ReducerSettings"]
