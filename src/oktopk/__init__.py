"""Distributed training that sends only the gradients that matter."""

from oktopk import comm
from oktopk.adapters.ddp import attach
from oktopk.adapters.optimizer import DistributedOptimizer
from oktopk.allreducer import AllReducer, Plan
from oktopk.bucket import Bucket
from oktopk.checks.conservation import GuardViolation
from oktopk.checks.finite import NonFiniteGradientError
from oktopk.comm import CommunicationError
from oktopk.metrics.step_stats import StepStats
from oktopk.reduce.base import Reduction
from oktopk.settings import Settings
from oktopk.sparse_vector import SparseVector
from oktopk.wire import WireError

__all__ = [
    "AllReducer",
    "Bucket",
    "CommunicationError",
    "DistributedOptimizer",
    "GuardViolation",
    "NonFiniteGradientError",
    "Plan",
    "Reduction",
    "Settings",
    "SparseVector",
    "StepStats",
    "WireError",
    "attach",
    "comm",
]
