"""Writes slurm/ and pbs/ beside this file: a job for every reducer, scheduler and size, all from job.sh.in.

    python scripts/make_jobs.py            write them
    python scripts/make_jobs.py --check    exit 1 where one is not what the template gives

In the template a line that begins with `#@slurm ` or `#@pbs ` is for that scheduler only, and @NAMES@ are filled in.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE / "job.sh.in"
SCHEDULERS = ("slurm", "pbs")
COMPRESSORS = (
    *("dense", "topkA", "topkA2", "topkAopt", "topkDSA", "gtopk", "gaussiank", "gaussiankconcat", "gaussiankSA"),
    "oktopk",
)
# On 8 and 16 workers of batch size 8 the embedded corpus (480 utterances) gives 16 and 40 steps, AN4 (948) 30 and 80.
SIZES = {
    "debug": {"PRESET": "lstm_debug", "NODES": "2", "WALLTIME": "00:15:00", "QUEUE": "debug", "WARMUP_STEPS": "4"},
    "extended": {
        "PRESET": "lstm_extended",
        "NODES": "4",
        "WALLTIME": "01:00:00",
        "QUEUE": "debug-scaling",
        "WARMUP_STEPS": "16",
    },
}
RANKS_PER_NODE = "4"
"""Polaris has four GPUs in a node."""


def fill(template: str, scheduler: str, values: dict[str, str]) -> str:
    """The script for one scheduler; KeyError for a name in the template that has no value."""
    lines: list[str] = []
    for line in template.splitlines():
        marked = re.match(r"#@(\w+) (.*)", line)
        if marked is None or marked[1] == scheduler:
            lines.append(marked[2] if marked else line)
    return re.sub(r"@([A-Z_]+)@", lambda found: values[found[1]], "\n".join(lines) + "\n")


def all_jobs() -> dict[Path, str]:
    """Path -> content."""
    template = TEMPLATE.read_text()
    return {
        HERE / scheduler / f"{compressor}_{size}.sh": fill(
            template,
            scheduler,
            {
                "COMPRESSOR": compressor,
                "SIZE": size,
                "NAME": f"{compressor}_{size}",
                "RANKS_PER_NODE": RANKS_PER_NODE,
                **values,
            },
        )
        for scheduler in SCHEDULERS
        for compressor in COMPRESSORS
        for size, values in SIZES.items()
    }


def stale(jobs: dict[Path, str]) -> list[Path]:
    """What is missing, differs, or should not be there."""
    present = {path for scheduler in SCHEDULERS for path in (HERE / scheduler).glob("*")}
    differing = {path for path, content in jobs.items() if path not in present or path.read_text() != content}
    return sorted(differing | (present - jobs.keys()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the job scripts from their template.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a script is not up to date")
    options = parser.parse_args(arguments)
    jobs = all_jobs()
    if options.check:
        for path in stale(jobs):
            print(f"{path.relative_to(HERE.parent)}: not what the template gives; run python scripts/make_jobs.py")
        return 1 if stale(jobs) else 0
    for path, content in jobs.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        path.chmod(0o755)
    for path in stale(jobs):  # of a reducer that is no more
        path.unlink()
    print(f"{len(jobs)} scripts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
