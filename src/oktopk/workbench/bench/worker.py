"""One worker of a benchmark, `python -m oktopk.workbench.bench.worker PLACE`: a JSON line for each job and event."""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

import torch

from oktopk.workbench.bench import allreduce, model, raw_link, soak, train_run, training
from oktopk.workbench.bench import peers as bench_peers
from oktopk.workbench.bench.options import Options
from oktopk.workbench.worlds.jobs import Job, Station, Tell

_MEASURES: Mapping[str, Callable[[Station, Options, Job, Tell], Any]] = {
    "allreduce": allreduce.measure,
    "model": model.measure,
    "raw_link": raw_link.measure,
    "soak": soak.measure,
    "train_run": train_run.measure,
    "training": training.measure,
}


def main(given: dict[str, Any]) -> None:
    events = _own_stdout()
    station = Station(given["rank"], given["size"], tuple(given["addresses"]))
    torch.set_num_threads(1)
    jobs = _jobs()
    bench_peers.join(given["store"], station.rank, station.size, given["timeout_s"])

    def say(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    def tell(text: str) -> None:
        if station.rank == 0:
            say({"progress": text})

    while True:
        job = jobs.get()
        try:
            say({"result": _MEASURES[job["what"]](station, Options.of(job["options"]), job, tell)})
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        gc.collect()  # what one job held must not be there while the next is measured


def _own_stdout() -> IO[str]:
    """Events get it alone; what libraries print goes to standard error."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return events


def _jobs() -> queue.Queue[Job]:
    """From standard input. When it closes, whoever started us is gone, and so are we, whatever we wait for."""
    jobs: queue.Queue[Job] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            jobs.put(json.loads(line))
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return jobs


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
