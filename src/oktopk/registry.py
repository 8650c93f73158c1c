"""Names on the command line -> reducers, selectors, communicators."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from oktopk.comm.base import Communicator
from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.kernels.base import Kernels
from oktopk.kernels.by_device import ByDevice, best_kernels, numba_kernels, triton_kernels
from oktopk.kernels.torch_ops import TorchKernels
from oktopk.reduce.base import Reducer, ReducerSettings
from oktopk.reduce.dense import Dense
from oktopk.reduce.gtopk import GTopk
from oktopk.reduce.oktopk import oktopk
from oktopk.reduce.topk_allgather import TopkA2, gaussiank, gaussiank_concat, topk_a, topk_a_opt
from oktopk.reduce.topk_dsa import gaussiank_sa, topk_dsa
from oktopk.select.base import Selector
from oktopk.select.kernel_selector import KernelSelector
from oktopk.select.torch_ops import TorchSelector

T = TypeVar("T")
ReducerFactory = Callable[[ReducerSettings], Reducer]

REDUCERS: Mapping[str, ReducerFactory] = {
    "dense": lambda _: Dense(),
    "topkA": topk_a,
    "topkA2": TopkA2,
    "topkAopt": topk_a_opt,
    "topkDSA": topk_dsa,
    "gtopk": GTopk,
    "gaussiank": gaussiank,
    "gaussiankconcat": gaussiank_concat,
    "gaussiankSA": gaussiank_sa,
    "oktopk": oktopk,
}
ALIASES: Mapping[str, str] = {"none": "dense", "topkSA": "topkDSA"}
KERNELS: Mapping[str, Callable[[], Kernels]] = {
    "auto": best_kernels,
    "torch": TorchKernels,
    "numba": lambda: ByDevice({"cpu": numba_kernels}),
    "triton": lambda: ByDevice({"cuda": triton_kernels}),
}


def canonical_name(compressor: str) -> str:
    """The one name of a reducer that may go by several; ValueError for an unknown one."""
    name = ALIASES.get(compressor, compressor)
    if name not in REDUCERS:
        raise ValueError(_unknown("compressor", compressor, [*REDUCERS, *ALIASES]))
    return name


def reducer_factory(compressor: str) -> ReducerFactory:
    return REDUCERS[canonical_name(compressor)]


def make_kernels(name: str) -> Kernels:
    """By the name of the setting `selector`. A name that is not `auto` is for one device; others get plain torch."""
    return _look_up("selector", name, KERNELS)()


def make_selector(kernels: Kernels) -> Selector:
    return TorchSelector() if isinstance(kernels, TorchKernels) else KernelSelector(kernels)


def make_communicator(name: str, timeout_s: float) -> Communicator:
    """`auto`: torch.distributed where it is initialized, else MPI where mpirun or srun started us, else one rank."""
    return _look_up("comm", name, _COMMUNICATORS)(timeout_s)


def _auto(timeout_s: float) -> Communicator:
    from oktopk.comm.torchdist import is_initialized

    if is_initialized():
        return _torch(timeout_s)
    for key in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        if os.environ.get(key, "1") != "1":
            return _mpi_of(os.environ[key], key, timeout_s)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but torch.distributed is not initialized: "
            "call torch.distributed.init_process_group() first"
        )
    return SimulatedCommunicator(World(1), 0)


def _torch(timeout_s: float) -> Communicator:
    from oktopk.comm.torchdist import TorchDistCommunicator

    return TorchDistCommunicator(timeout_s)


def _mpi(timeout_s: float) -> Communicator:
    try:
        from oktopk.comm.mpi import MpiCommunicator
    except ImportError as error:
        raise ValueError(f"comm='mpi' needs mpi4py and an MPI library: pip install 'oktopk[mpi]' ({error})") from error
    return MpiCommunicator(timeout_s)


def _mpi_of(size: str, key: str, timeout_s: float) -> Communicator:
    """MPI, and everybody in it: a library that does not understand the launcher would see one rank and train alone."""
    comm = _mpi(timeout_s)
    if str(comm.size) != size:
        raise ValueError(
            f"{key}={size}, but MPI sees {comm.size} rank(s): start with a launcher that this MPI understands "
            "(such as srun --mpi=pmix), or initialize torch.distributed first"
        )
    return comm


_COMMUNICATORS: Mapping[str, Callable[[float], Communicator]] = {"auto": _auto, "torch": _torch, "mpi": _mpi}


def _look_up(kind: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ValueError(_unknown(kind, name, list(known)))
    return known[name]


def _unknown(kind: str, name: str, known: list[str]) -> str:
    return f"unknown {kind} {name!r}; known: {', '.join(known)}"
