"""The one-line change for DistributedDataParallel: a communication hook that hands every bucket to an AllReducer."""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.reduction_thread import ReductionWorker
from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket
from oktopk.comm.torchdist import TorchDistCommunicator
from oktopk.metrics.trainer_lists import MetricLists
from oktopk.registry import ReducerFactory
from oktopk.settings import Settings

TensorFuture = torch.futures.Future[Tensor]
Outcome = Tensor | BaseException


def attach(
    ddp_model: DistributedDataParallel,
    compressor: str | ReducerFactory = "oktopk",
    *,
    trainer: MetricLists | None = None,
    **settings: Any,
) -> AllReducer:
    """Let `ddp_model` exchange its gradients through an AllReducer, and return it.

    Call once on every rank, after DDP was built and before the first backward. Settings are those of
    `oktopk.settings.Settings`. Ranks are those of the model's own process group. An error during a reduction comes out
    of `backward()`, as a RuntimeError that quotes it. With nonfinite="skip" a skipped step leaves gradients of zero:
    leave out `optimizer.step()` where `allreducer.last_step_skipped`, or momentum and decay still move the parameters.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise ValueError(
            f"attach() needs a DistributedDataParallel model, got {type(ddp_model).__name__}; "
            "without DDP use oktopk.DistributedOptimizer"
        )
    timeout_s = Settings.of(settings).timeout_s
    parent = cast("ProcessGroup", ddp_model.process_group)
    allreducer = AllReducer(compressor, comm=TorchDistCommunicator(timeout_s, parent), trainer=trainer, **settings)
    ddp_model.register_comm_hook(_Bridge(ddp_model, allreducer), _hook)
    return allreducer


class _Bridge:
    """From DDP's buckets and futures to ours. Results are held back to the end of the step only under `skip`:
    until its last bucket is seen, nobody knows whether the step counts."""

    def __init__(self, ddp_model: DistributedDataParallel, allreducer: AllReducer) -> None:
        self._allreducer = allreducer
        self._worker = ReductionWorker()
        module = cast("torch.nn.Module", ddp_model.module)
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._may_be_unused = bool(ddp_model.find_unused_parameters)
        self._touched: set[str] = set()
        if self._may_be_unused:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    parameter.register_hook(partial(self._touch, name))
        allreducer.on_close(self._worker.stop)
        self._hold_back = allreducer.settings.nonfinite == "skip"
        self._held: list[tuple[torch.futures.Future[Outcome], Tensor]] = []

    def submit(self, grad_bucket: GradBucket) -> TensorFuture:
        bucket = self._describe(grad_bucket)
        is_last = grad_bucket.is_last()
        device = bucket.gradient.device
        future: torch.futures.Future[Outcome] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])

        def job() -> None:
            self._held.append((future, bucket.gradient))
            self._allreducer.reduce(bucket)
            if is_last:
                self._allreducer.end_step()
            if is_last or not self._hold_back:
                self._release()

        def give_up(error: BaseException) -> None:
            self._held.append((future, bucket.gradient))
            for waiting, _ in self._held:
                if not waiting.done():
                    waiting.set_result(error)
            self._held.clear()

        self._worker.submit(job, give_up, prepare=lambda: self._allreducer.prepare(bucket))
        return future.then(_tensor_or_raise)  # an exception set on the future itself would reach DDP garbled

    def _release(self) -> None:
        skipped = self._hold_back and self._allreducer.last_step_skipped
        for future, result in self._held:
            future.set_result(result.zero_() if skipped else result)
        self._held.clear()

    def _describe(self, grad_bucket: GradBucket) -> Bucket:
        names = [self._names[id(parameter)] for parameter in grad_bucket.parameters()]
        gradients = grad_bucket.gradients()
        slots = Bucket.layout([(name, gradient.numel()) for name, gradient in zip(names, gradients, strict=True)])
        missing: frozenset[str] = frozenset()
        if self._may_be_unused:  # DDP does not apply what nobody took part in
            missing = frozenset(names) - self._touched
            self._touched -= set(names)
        return Bucket(grad_bucket.buffer(), slots, missing)

    def _touch(self, name: str, gradient: Tensor) -> None:
        """Called by autograd for every parameter that takes part in a backward."""
        del gradient
        self._touched.add(name)


def _tensor_or_raise(done: torch.futures.Future[Outcome]) -> Tensor:
    outcome = done.value()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


# DDP reads these annotations at run time, which is why they are not postponed in this file.
def _hook(state: _Bridge, bucket: GradBucket) -> TensorFuture:
    return state.submit(bucket)
