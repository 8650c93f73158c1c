"""The cost model against the clock: calibrate a world, measure its allreduces, say how far the predictions are off."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from oktopk.comm.torchdist import TorchDistCommunicator
from oktopk.workbench.bench import allreduce
from oktopk.workbench.bench.links import over_links
from oktopk.workbench.bench.options import Options
from oktopk.workbench.console.progress import Progress
from oktopk.workbench.console.tables import Column, Row, elements, figure, milliseconds
from oktopk.workbench.console.words import LOOPBACK, bits_per_s
from oktopk.workbench.plan.advise import COMMON
from oktopk.workbench.plan.calibrate import Calibration, calibrate
from oktopk.workbench.plan.model import Link, predict
from oktopk.workbench.plan.stored import calibration_of, plain
from oktopk.workbench.worlds import links as netns
from oktopk.workbench.worlds.jobs import Job, Station, Tell
from oktopk.workbench.worlds.world import BenchWorld

_PAUSE_S = 0.03
_NEARLY = 1.5
"""Fills the token bucket of the slowest link that is worth measuring: so much passes at once in every allreduce."""


def run(options: Options) -> list[Row]:
    """Rows as of `links`, with what was predicted for them."""
    options = replace(options, pause_s=_PAUSE_S)

    def compare(world: BenchWorld, link: str, progress: Progress) -> list[Row]:
        rows: list[Row] = []
        for n in options.sizes:
            progress.part(f"{link}: P = {world.size}, n = {elements(n)}")
            found = world.run({"what": "model", "n": n, "options": asdict(options)}, progress)[0]
            calibration = calibration_of(found)
            where = {"bench": "model", "link": link, "calibration": plain(calibration)}
            measured = allreduce.compare(world, options, n, progress, where)
            rows += [_with_prediction(row, calibration, link) for row in measured]
        return rows

    return over_links("model", options, compare)


def _with_prediction(row: Row, calibration: Calibration, rate: str) -> Row:
    contender: str = row["contender"]
    reducer = {"dense-fp32": "dense", "oktopk-fp32": "oktopk"}.get(contender, contender)
    link = calibration.link
    if rate != LOOPBACK:
        link = _with_burst(link, rate)
    made = predict(reducer, row["n"], row["density"] or 1.0, row["ranks"], link, calibration.machine, COMMON)
    predicted_ms = 1e3 * made.total_s
    return {
        **row,
        "predicted_ms": predicted_ms,
        "predicted_compute_ms": 1e3 * made.compute_s,
        "error": predicted_ms / row["median_ms"] - 1.0,
    }


COLUMNS: tuple[Column, ...] = (
    ("contender", lambda row: row["contender"]),
    ("link", lambda row: row["link"]),
    ("P", lambda row: str(row["ranks"])),
    ("n", lambda row: elements(row["n"])),
    ("density", lambda row: figure(row["density"], "g")),
    ("measured ms", lambda row: milliseconds(row["median_ms"])),
    ("predicted", lambda row: milliseconds(row["predicted_ms"])),
    ("error", lambda row: figure(row["error"], "+.0%")),
)


# --- in the workers


def measure(station: Station, options: Options, job: Job, tell: Tell) -> dict[str, Any]:
    tell(f"P = {station.size}: calibrating")
    comm = TorchDistCommunicator(options.timeout_s)
    found = calibrate(comm, torch.device("cpu"), int(job["n"]))
    comm.close()
    return plain(found)


def _with_burst(link: Link, rate: str) -> Link:
    """What was measured in a row was measured with an empty bucket; after a pause it is full.

    Where the processor is slower than the link, the bucket is never what one waits for.
    """
    is_bound = link.seconds_per_byte < _NEARLY * 8 / bits_per_s(rate)
    return replace(link, burst_bytes=netns.burst_bytes(rate) if is_bound else 0)
