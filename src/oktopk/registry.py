"""Names in settings -> reducers, kernels, communicators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from oktopk.comm.base import Communicator
from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.kernels.by_device import KERNELS, DeviceKernels
from oktopk.reduce.dense import DENSE
from oktopk.reduce.description import ReducerDescription
from oktopk.reduce.gtopk import GTOPK
from oktopk.reduce.oktopk import OKTOPK
from oktopk.reduce.topk_allgather import GAUSSIANK, GAUSSIANK_CONCAT, TOPK_A, TOPK_A2, TOPK_A_OPT
from oktopk.reduce.topk_dsa import GAUSSIANK_SA, TOPK_DSA

T = TypeVar("T")


def by_name(descriptions: Iterable[ReducerDescription]) -> Mapping[str, ReducerDescription]:
    """The descriptions by name; ValueError where a name or an alias is given twice."""
    found: dict[str, ReducerDescription] = {}
    taken: set[str] = set()
    for description in descriptions:
        for name in description.names:
            if name in taken:
                raise ValueError(f"reducer {name!r} is described twice: names and aliases must differ")
            taken.add(name)
        found[description.name] = description
    return found


REDUCERS = by_name(
    (
        DENSE,
        TOPK_A,
        TOPK_A2,
        TOPK_A_OPT,
        TOPK_DSA,
        GTOPK,
        GAUSSIANK,
        GAUSSIANK_CONCAT,
        GAUSSIANK_SA,
        OKTOPK,
    )
)
"""Every reducer, by its name; `describe` knows the aliases too."""


def find(name: str) -> ReducerDescription | None:
    """The reducer with this name or alias; None where there is none."""
    return next((each for each in REDUCERS.values() if name in each.names), None)


def describe(name: str) -> ReducerDescription:
    """The reducer with this name or alias; ValueError for an unknown one."""
    found = find(name)
    if found is None:
        raise ValueError(_unknown("reducer", name, reducer_names()))
    return found


def reducer_names() -> list[str]:
    """All that `describe` knows: the names, then the aliases."""
    return [*REDUCERS, *(alias for each in REDUCERS.values() for alias in each.aliases)]


def make_kernels(name: str) -> DeviceKernels:
    """By the setting `kernels`. A name that is not `auto` is for one kind of device; others get plain torch."""
    return DeviceKernels(_look_up("kernels", name, KERNELS))


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
