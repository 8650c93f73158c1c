"""`oktopk trace RUN [--out FILE]`: a profiled run in the Chrome trace event format, which Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oktopk.workbench.console.files import write_text
from oktopk.workbench.console.words import LineParser, UsageError
from oktopk.workbench.recording.profile import NAMES, OPERATIONS
from oktopk.workbench.report.load import load_run
from oktopk.workbench.report.run import Profile

_THREADS = ("training loop", "communication")
Event = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """The exit code; UsageError for what cannot be."""
    parser = LineParser(
        prog="oktopk trace", description="A profiled run as a Chrome trace, for https://ui.perfetto.dev."
    )
    parser.add_argument("run", metavar="RUN", help="a folder that `oktopk train --profile` wrote, such as runs/demo")
    parser.add_argument("--out", metavar="FILE", help="where to write (default: RUN/trace.json)")
    given = parser.parse_args(list(arguments))
    folder = Path(given.run)
    run = load_run(folder)
    if not run.profiles:
        why = f" ({run.problems[-1]})" if run.problems else ""
        raise UsageError(f"{folder}: holds no profile{why}; train with --profile to get one")
    target = Path(given.out) if given.out else folder / "trace.json"
    try:
        num_events = write_trace(run.profiles, target)
    except OSError as error:
        raise UsageError(f"--out: '{target}': cannot be written to ({error.strerror}); choose another") from error
    hosts = {profile.header.host for profile in run.profiles}
    print(f"{target}: {num_events:,} events of {len(run.profiles)} workers; open it at https://ui.perfetto.dev")
    if len(hosts) > 1:
        print(f"the workers ran on {len(hosts)} machines: between them times are only as equal as their clocks")
    return 0


def write_trace(profiles: Sequence[Profile], target: Path) -> int:
    """Returns how many calls are in it."""
    starts = [profile.header.wall_minus_monotonic_s + profile.records["start_s"] for profile in profiles]
    origin = min((float(each.min()) for each in starts if each.size), default=0.0)
    lines: list[str] = []
    num_events = 0
    for profile, wall in zip(profiles, starts, strict=True):
        lines += [json.dumps(event) for event in _names(profile)]
        calls = [json.dumps(event) for event in _calls(profile, 1e6 * (wall - origin))]
        num_events += len(calls)
        lines += calls
    write_text(target, '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n")
    return num_events


def _names(profile: Profile) -> Generator[Event]:
    rank = profile.header.rank
    common = {"ph": "M", "pid": rank, "ts": 0}
    yield {**common, "name": "process_name", "tid": 0, "args": {"name": f"rank {rank} on {profile.header.host}"}}
    yield {**common, "name": "process_sort_index", "tid": 0, "args": {"sort_index": rank}}
    for thread, name in enumerate(_THREADS):
        yield {**common, "name": "thread_name", "tid": thread, "args": {"name": name}}


def _calls(profile: Profile, start_us: np.ndarray[Any, Any]) -> Generator[Event]:
    """One for each call, whose rows (one for each peer) follow each other."""
    records = profile.records
    first = np.flatnonzero(np.diff(records["call"], prepend=-1))
    for begin, end in zip(first, [*first[1:], len(records)], strict=True):
        rows = records[begin:end]
        row = rows[0]
        name = NAMES[int(row["name"])]
        moved = {
            key: int(rows[key].sum()) for key in ("bytes_sent", "bytes_received", "messages_sent", "messages_received")
        }
        args: dict[str, Any] = {"step": int(row["step"])}
        if name in OPERATIONS:
            args |= moved
            for key, field in (("sent_to", "bytes_sent"), ("received_from", "bytes_received")):
                args[key] = {str(each["peer"]): int(each[field]) for each in rows if each["peer"] >= 0}
        yield {
            "ph": "X",
            "name": name,
            "cat": "communication" if name in OPERATIONS else "stage",
            "pid": profile.header.rank,
            "tid": int(name in OPERATIONS),
            "ts": round(float(start_us[begin]), 3),
            "dur": round(1e6 * float(row["seconds"]), 3),
            "args": args,
        }
