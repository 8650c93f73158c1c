"""What the machines at hand can do: the link between the ranks, and the parts of a reduction on each of them.

Everything is measured on all ranks at once, through the communicator that training uses, and all ranks come to the same
figures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk import wire
from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket, Layout
from oktopk.comm.base import Communicator
from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.comm.sizes import ring_bytes
from oktopk.kernels.base import Kernels
from oktopk.registry import make_kernels
from oktopk.settings import KernelsName
from oktopk.sparse_vector import SparseVector
from oktopk.workbench.plan.model import Cost, Link, Machine, dense_hops, predict
from oktopk.workbench.simulate.gradients import Synthetic

_ROUNDS = 20
"""Small exchanges in a row, as in a reduction: after a barrier ranks start at different moments."""
_REPEATS = 5
_LONG_S = 0.25
"""An exchange that takes longer than this is not repeated with more bytes."""
_SIZES = (1 << 14, 1 << 18, 1 << 21, 1 << 23)
_PAIRS = (1000, 30_000)
_STEPS = 10
_LARGEST = 8_000_000
_PROBE_DENSITY = 0.02
_MOST_CORRECTED = 3.0
_IN_A_ROW = 2
"""Calls of a kernel: in a reduction nothing is as warm as in a loop."""
_LEAST_BYTE_S = 1e-13


@dataclass(frozen=True)
class Calibration:
    """Fitted to one world; `num_ranks` says how many were at work."""

    num_ranks: int
    link: Link
    machine: Machine


def calibrate(comm: Communicator, device: torch.device, n: int, kernels: KernelsName = "auto") -> Calibration:
    """Some seconds of measuring; to be called by all ranks alike. `n`: elements of the buckets that matter.

    At the end one whole reduction is measured, and everything but bytes is scaled by how it differs from the sum of its
    parts: ranks that wait for each other while each does something else take longer than any part shows.
    """
    link, machine = measure_link(comm, device, n), measure_machine(comm, device, n, kernels)
    if comm.size == 1:
        return Calibration(1, link, machine)
    size = max(4000, min(n, _LARGEST) // 2)
    predicted = predict("oktopk", size, _PROBE_DENSITY, comm.size, link, machine, common=0.5).total_s
    measured = _reduction(comm, comm, device, size, _PROBE_DENSITY, kernels)
    factor = min(max(measured / predicted, 1.0 / _MOST_CORRECTED), _MOST_CORRECTED)
    return Calibration(comm.size, link.slower(factor), machine.slower(factor))


def measure_link(comm: Communicator, device: torch.device, n: int) -> Link:
    if comm.size == 1:
        return Link(0.0, 0.0, 0.0, 0.0)
    home = comm.home(device)
    latency = _round_seconds(comm, home)
    message = _message_seconds(comm, home)
    byte_s = 0.0
    before = 0, latency
    for size in _SIZES:
        buffers = [torch.zeros(size // (comm.size - 1), dtype=torch.uint8, device=home)] * comm.size
        seconds = _median(comm, lambda buffers=buffers: comm.all_to_all_v(buffers), _REPEATS)
        byte_s = (seconds - before[1]) / (size - before[0])
        before = size, seconds
        if seconds > _LONG_S:
            break
    latency = max(message, latency - (comm.size - 2) * message)
    byte_s = max(byte_s, _LEAST_BYTE_S)
    return Link(latency, message, byte_s, _dense_byte_seconds(comm, device, n, latency, byte_s))


def measure_machine(comm: Communicator, device: torch.device, n: int, kernels: KernelsName = "auto") -> Machine:
    home = comm.home(device)
    on_home = make_kernels(kernels).on(home)
    step, chosen = _step_cost(comm, device, min(n, _LARGEST), kernels)
    encoded = [_encoded(on_home, count, home) for count in _PAIRS]
    encode = _cost(comm, [lambda v=v: wire.encode(v, kernels=on_home) for v, _ in encoded])
    decode = _cost(comm, [lambda v=v, b=b: wire.decode(b, v.length, on_home) for v, b in encoded])
    twice = _cost(comm, [lambda v=v: on_home.sum([v, v]) for v, _ in encoded])
    total = Cost(twice.call_s / 2, twice.item_s / 2)  # of each of the two
    return Machine(step, chosen, encode, decode, total)


def _step_cost(comm: Communicator, device: torch.device, n: int, kernels: KernelsName) -> tuple[Cost, float]:
    """From reductions of a rank that is alone, at two sizes and two densities."""
    low, high = max(1000, n // 4), max(4000, n)
    alone = SimulatedCommunicator(World(1), 0)
    small = _reduction(comm, alone, device, low, 0.01, kernels)
    large = _reduction(comm, alone, device, high, 0.01, kernels)
    many = _reduction(comm, alone, device, high, 0.03, kernels)
    chosen_s = max(0.0, (many - large) / (0.02 * high))
    element_s = max(0.0, (large - small) / (high - low) - 0.01 * chosen_s)
    return Cost(max(0.0, small - low * (element_s + 0.01 * chosen_s)), element_s), chosen_s


def _reduction(
    comm: Communicator, among: Communicator, device: torch.device, n: int, density: float, kernels: KernelsName
) -> float:
    """Seconds of a reduction by oktopk among some ranks, while all ranks of `comm` do the same."""
    allreducer = AllReducer("oktopk", comm=among, density=density, warmup_steps=0, min_sparse_numel=0, kernels=kernels)
    source = Synthetic(n, comm.rank)
    gradients = [source.at(step).to(device) for step in range(2)]
    bucket = Bucket(torch.empty(n, device=device), Layout.of([("all", n)]))
    times: list[float] = []
    for step in range(2 + _STEPS):
        bucket.flat.copy_(gradients[step % 2])
        wait_for(device)
        comm.barrier()
        start = time.perf_counter()
        allreducer.reduce(bucket)
        allreducer.end_step()
        wait_for(device)
        times.append(time.perf_counter() - start)
    return _average(comm, statistics.median(times[2:]))


def _dense_byte_seconds(comm: Communicator, device: torch.device, n: int, latency_s: float, byte_s: float) -> float:
    """Of the library's own all_reduce and the division after it, hops not counted; as large as time allows."""
    size = min(n, _LARGEST, max(1000, int(_LONG_S / byte_s / 8)))
    tensor = torch.zeros(size, device=device)

    def exchange() -> None:
        comm.all_reduce(tensor)
        tensor.div_(comm.size)
        wait_for(device)

    seconds = _median(comm, exchange, _REPEATS) - dense_hops(comm.size) * latency_s
    return max(_LEAST_BYTE_S, seconds / ring_bytes(4 * size, comm.size))


def _round_seconds(comm: Communicator, home: torch.device) -> float:
    """With a little work between two rounds, as in a reduction: ranks never arrive at the same moment."""
    small = torch.zeros(1, dtype=torch.int64, device=home)
    work, _ = _encoded(make_kernels("auto").on(home), _PAIRS[0], home)

    def working(exchange: Callable[[], None]) -> None:
        for _ in range(_ROUNDS):
            wire.encode(work)
            exchange()

    both = _median(comm, lambda: working(lambda: comm.all_reduce(small)), _REPEATS)
    alone = _median(comm, lambda: working(lambda: None), _REPEATS)
    return max(0.0, both - alone) / _ROUNDS


def _message_seconds(comm: Communicator, home: torch.device) -> float:
    """What one more message costs where several go out at once: half of ranks send many to their neighbours."""
    partner = comm.rank ^ 1
    tiny = torch.zeros(1, dtype=torch.uint8, device=home)

    def burst() -> None:
        if partner >= comm.size:
            return
        for _ in range(_ROUNDS):
            if comm.rank % 2 == 0:
                comm.send(tiny, partner)
            else:
                comm.recv(partner, home)

    return _median(comm, burst, _REPEATS) / (2 * _ROUNDS)  # a length and a byte each


def _cost(comm: Communicator, calls: Sequence[Callable[[], object]]) -> Cost:
    few, many = (
        _median(comm, lambda call=call: [call() for _ in range(_IN_A_ROW)], _REPEATS) / _IN_A_ROW for call in calls
    )
    item_s = max(0.0, (many - few) / (_PAIRS[1] - _PAIRS[0]))
    return Cost(max(0.0, few - _PAIRS[0] * item_s), item_s)


def _encoded(kernels: Kernels, count: int, home: torch.device) -> tuple[SparseVector, Tensor]:
    generator = torch.Generator().manual_seed(count)
    length = 100 * count
    indices = torch.randperm(length, generator=generator)[:count].sort().values.to(home)
    vector = SparseVector(indices, torch.randn(count, generator=generator).to(home), length)
    return vector, wire.encode(vector, kernels=kernels)


def _median(comm: Communicator, call: Callable[[], object], repeats: int) -> float:
    """The ranks' average; after one call that does not count."""
    times: list[float] = []
    for _ in range(1 + repeats):
        comm.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return _average(comm, statistics.median(times[1:]))


def _average(comm: Communicator, seconds: float) -> float:
    return averages(comm, [seconds])[0]


def averages(comm: Communicator, values: Sequence[float]) -> list[float]:
    """Of all ranks, the same on each."""
    total = torch.tensor(values, dtype=torch.float64).to(_reachable(comm))
    comm.all_reduce(total)
    return [float(value) / comm.size for value in total.cpu()]


def slowest(comm: Communicator, seconds: float) -> float:
    """Of all ranks, the same on each."""
    everyones = torch.zeros(comm.size, dtype=torch.float64)
    everyones[comm.rank] = seconds
    everyones = everyones.to(_reachable(comm))
    comm.all_reduce(everyones)
    return float(everyones.max())


def _reachable(comm: Communicator) -> torch.device:
    """Where it can reduce: NCCL knows GPUs only."""
    return comm.home(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
