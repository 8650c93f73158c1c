"""The kernels alone: selection against a copy of the bucket, torch.topk and plain torch; bytes a pair takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from oktopk import wire
from oktopk.kernels.base import Kernels
from oktopk.kernels.torch_ops import TorchKernels
from oktopk.registry import make_kernels
from oktopk.select import exact
from oktopk.sparse_vector import SparseVector
from oktopk.workbench.bench.options import Options
from oktopk.workbench.console.progress import Progress
from oktopk.workbench.console.tables import Column, Row, elements, figure, milliseconds
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.simulate.gradients import Synthetic

_COPY_BYTES, _SELECT_BYTES = 8, 12
_IN_A_ROW = 10  # calls between two looks at a GPU's clock: a kernel is shorter than starting it
_MARGIN = 0.97


def run(options: Options) -> list[Row]:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device='cuda': no CUDA device here; use --device cpu")
    torch.set_num_threads(1)
    progress = Progress()
    kernels = make_kernels(options.kernels or "auto").on(torch.device(options.device))
    rows: list[Row] = []
    for n in options.sizes:
        progress.part(f"n = {elements(n)}: gradients")
        source = Synthetic(n, 0, options.seed)
        gradient, residual = (source.at(step).to(options.device) for step in (0, 1))
        for density in options.densities:
            k = max(1, round(density * n))
            progress.part(f"n = {elements(n)}, density {density:g}")
            where = {"bench": "kernels", "device": options.device, "n": n, "density": density, "k": k}
            rows += [where | row for row in _times(residual, gradient, k, kernels, options.iterations)]
            rows += [where | row for row in _wire_sizes(gradient, k, kernels)]
    progress.end()
    return rows


def _times(residual: Tensor, gradient: Tensor, k: int, kernels: Kernels, iterations: int) -> list[Row]:
    acc, device = residual + gradient, gradient.device
    out = torch.empty_like(acc)
    plain = TorchKernels()
    chosen = exact.top_k(kernels, acc, k)
    floor = _MARGIN * float(chosen.values.abs().min())
    other = exact.top_k(kernels, gradient, k)
    encoded = wire.encode(chosen, kernels=kernels)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(gradient),
        "add": lambda: torch.add(residual, gradient, out=out),
        "select": lambda: kernels.accumulate(residual, gradient, out, floor, 4 * k, device),
        "recompute": lambda: exact.top_k(kernels, acc, k),
        "select, plain torch": lambda: plain.accumulate(residual, gradient, out, floor, 4 * k, device),
        "torch.topk": lambda: torch.topk(acc.abs(), k),
        "encode": lambda: wire.encode(chosen, kernels=kernels),
        "decode": lambda: wire.decode(encoded, acc.numel(), kernels),
        "sum of two": lambda: kernels.sum([chosen, other]),
        "write the mean": lambda: kernels.write(out, chosen),
        "clean the residual": lambda: kernels.subtract(out, chosen),
    }
    medians = {name: statistics.median(_milliseconds(call, device, iterations)) for name, call in calls.items()}
    copy = medians["copy"]
    rows: list[Row] = []
    for name, median_ms in medians.items():
        row: Row = {"operation": name, "median_ms": median_ms, "against_copy": median_ms / copy}
        if name == "select":
            row["of_copy_bandwidth"] = copy * _SELECT_BYTES / _COPY_BYTES / median_ms
        if name == "recompute":
            row["against_select"] = median_ms / medians["select"]
        rows.append(row)
    return rows


def _milliseconds(call: Callable[[], object], device: torch.device, iterations: int) -> list[float]:
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(iterations):
        if device.type == "cuda":
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            for _ in range(_IN_A_ROW):
                call()
            after.record()
            torch.cuda.synchronize()
            times.append(before.elapsed_time(after) / _IN_A_ROW)
        else:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
    return times


def _wire_sizes(gradient: Tensor, k: int, kernels: Kernels) -> list[Row]:
    chosen = exact.top_k(kernels, gradient, k)
    rows: list[Row] = []
    for encoding in wire.ValueEncoding:
        size = wire.encode(wire.rounded(chosen, encoding), encoding, kernels).numel()
        rows.append(_wire_row(encoding.name.lower(), size, chosen))
    return rows


def _wire_row(name: str, size: int, chosen: SparseVector) -> Row:
    return {"operation": f"wire, {name}", "wire": name, "bytes_per_pair": size / len(chosen)}


COLUMNS: tuple[Column, ...] = (
    ("device", lambda row: row["device"]),
    ("n", lambda row: elements(row["n"])),
    ("density", lambda row: figure(row["density"], "g")),
    ("operation", lambda row: row["operation"]),
    ("median ms", lambda row: milliseconds(row.get("median_ms"))),
    ("x copy", lambda row: figure(row.get("against_copy"), ".2f")),
    ("of copy bandwidth", lambda row: figure(row.get("of_copy_bandwidth"), ".0%")),
    ("x select", lambda row: figure(row.get("against_select"), ".2f")),
    ("bytes a pair", lambda row: figure(row.get("bytes_per_pair"), ".2f")),
)
FOOTNOTE = (
    "select: add the residual, compare and collect, in one pass; recompute: exactly the k largest, from nothing; "
    f"copy bandwidth: {_SELECT_BYTES} bytes an element at the speed of the copy; on a GPU {_IN_A_ROW} calls in a row"
)
