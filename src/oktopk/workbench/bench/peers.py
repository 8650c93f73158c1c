"""What a sparse allreduce is measured against: plain all-reduces and DDP's own communication hooks, over Gloo."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from oktopk.comm.sizes import ring_bytes

POWERSGD_RANK = 4
POWERSGD_DENSE_STEPS = 2
"""Steps that PowerSGD leaves to a plain all-reduce: the fewest that DDP allows."""

Exchange = Callable[[], None]


def join(store_path: str, rank: int, size: int, timeout_s: float) -> None:
    """Meet the others over Gloo; they find each other through a file, so that no port has to be free."""
    store = FileStore(store_path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))


def barrier() -> None:
    dist.barrier()


class DdpBucket:
    """DDP's own bucket of n elements, as its hooks get it: a matrix as square as can be and the rest as a vector.

    It is taken from a real backward and outlives the DDP model, so hooks can be called with it without a model's
    forward and backward around them. `gradient` is its flat buffer, which hooks overwrite with the mean.
    """

    def __init__(self, n: int) -> None:
        model = _OneMatrix(n)
        self._rows, self._columns = model.matrix.shape
        ddp = DistributedDataParallel(model, bucket_cap_mb=math.ceil(4 * n / 2**20) + 1, gradient_as_bucket_view=True)
        taken: list[GradBucket] = []

        def keep(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            del state
            taken.append(bucket)
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        _annotate(keep)
        ddp.register_comm_hook(None, keep)
        for _ in range(2):  # DDP builds its buckets anew after the first
            ddp().backward()
        self._bucket = taken[-1]
        self.gradient = self._bucket.buffer()
        assert len(taken) == 2, "one bucket for each backward"
        assert self.gradient.numel() == n

    def fp16(self) -> tuple[Exchange, int]:
        """DDP's fp16_compress_hook, and the bytes a rank sends in a step by the ring formula."""
        group = cast("dist.ProcessGroup", dist.group.WORLD)
        num_bytes = ring_bytes(2 * self.gradient.numel(), dist.get_world_size())
        return lambda: _wait(fp16_compress_hook(group, self._bucket)), num_bytes

    def powersgd(self) -> tuple[Exchange, int]:
        """DDP's powerSGD_hook with warm start and error feedback, and the bytes a rank sends in a compressed step."""
        state = powersgd_state()
        rank = min(POWERSGD_RANK, self._rows, self._columns)
        factors, whole = (self._rows + self._columns) * rank, self._rows * self._columns
        matrix = factors if factors * int(state.min_compression_rate) < whole else whole
        rest = self.gradient.numel() - whole
        return lambda: _wait(powerSGD_hook(state, self._bucket)), ring_bytes(4 * (matrix + rest), dist.get_world_size())


class _OneMatrix(nn.Module):
    """n parameters; its loss is their sum."""

    def __init__(self, n: int) -> None:
        super().__init__()
        rows = math.isqrt(n)
        columns = n // rows
        self.matrix = nn.Parameter(torch.zeros(rows, columns))
        rest = n - rows * columns
        if rest:
            self.rest = nn.Parameter(torch.zeros(rest))

    def forward(self) -> Tensor:
        return torch.stack([parameter.sum() for parameter in self.parameters()]).sum()


def dense_fp32(gradient: Tensor) -> tuple[Exchange, int]:
    """All-reduce and divide, in place; and the bytes a rank sends by the ring formula."""
    size = dist.get_world_size()

    def exchange() -> None:
        dist.all_reduce(gradient)
        gradient.div_(size)

    return exchange, ring_bytes(4 * gradient.numel(), size)


def dense_bf16(gradient: Tensor) -> tuple[Exchange, int]:
    """Cast, all-reduce, cast back, divide."""
    size = dist.get_world_size()

    def exchange() -> None:
        half = gradient.to(torch.bfloat16)
        dist.all_reduce(half)
        gradient.copy_(half)
        gradient.div_(size)

    return exchange, ring_bytes(2 * gradient.numel(), size)


def powersgd_state() -> PowerSGDState:
    return PowerSGDState(
        process_group=None,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=POWERSGD_DENSE_STEPS,
        warm_start=True,
        use_error_feedback=True,
    )


def register_fp16(ddp_model: DistributedDataParallel) -> None:
    ddp_model.register_comm_hook(None, fp16_compress_hook)


def register_powersgd(ddp_model: DistributedDataParallel) -> Callable[[], None]:
    """DDP's powerSGD_hook, one bucket after the other on a thread of its own, beside backward; returns what ends it.

    The hook goes on to its second and third all-reduce from callbacks. With Gloo these come in another order on each
    rank as soon as two buckets are under way, and the ranks then sum what does not belong together, or crash.
    """
    state = powersgd_state()
    thread = ThreadPoolExecutor(1)

    def in_turn(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        device = bucket.buffer().device
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])

        def reduce() -> None:
            try:
                done.set_result(powerSGD_hook(state, bucket).wait())
            except Exception as error:
                cast("Any", done).set_exception(error)  # torch declares another type

        thread.submit(reduce)
        return done

    _annotate(in_turn)
    ddp_model.register_comm_hook(state, in_turn)
    return thread.shutdown


def _annotate(hook: Callable[..., torch.futures.Future[Tensor]]) -> None:
    """DDP reads a hook's annotations at run time, and in this file they are postponed."""
    hook.__annotations__ |= {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}


def _wait(future: Any) -> None:
    future.wait()
