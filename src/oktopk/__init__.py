"""Sparse-allreduce gradient compression for PyTorch."""

from oktopk import comm, optim
from oktopk.adapters.ddp import HookState, attach, detach, hook
from oktopk.adapters.local_steps import LocalSteps
from oktopk.adapters.optimizer import DistributedOptimizer
from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket, Layout
from oktopk.checks.conservation import GuardViolation
from oktopk.checks.finite import NonFiniteGradientError
from oktopk.comm import CommunicationError
from oktopk.metrics.step_stats import StepStats
from oktopk.schedule import Outline
from oktopk.settings import Settings
from oktopk.sparse_vector import SparseVector
from oktopk.wire import WireError

__all__ = [
    "AllReducer",
    "Bucket",
    "CommunicationError",
    "DistributedOptimizer",
    "GuardViolation",
    "HookState",
    "Layout",
    "LocalSteps",
    "NonFiniteGradientError",
    "Outline",
    "Settings",
    "SparseVector",
    "StepStats",
    "WireError",
    "attach",
    "comm",
    "detach",
    "hook",
    "optim",
]
