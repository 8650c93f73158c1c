"""Distributed training that sends only the gradients that matter."""

from oktopk import comm
from oktopk.allreducer import AllReducer, Plan
from oktopk.comm import CommunicationError
from oktopk.ddp import attach
from oktopk.distributed_optimizer import DistributedOptimizer
from oktopk.guard import GuardViolation
from oktopk.precheck import NonFiniteGradientError
from oktopk.settings import Settings
from oktopk.types import Bucket, Reduction, SparseVector, StepStats
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
