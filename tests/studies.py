"""Studies made without training: their TOML files, and the folders of their runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oktopk.workbench.study.definition import Run, Study, read_study
from oktopk.workbench.study.running import Conditions
from tests.runs import Recipe, write_run

CONTENT: dict[str, Any] = {
    "preset": "lenet",
    "metric": "accuracy",
    "better": "higher",
    "target": 0.5,
    "seeds": [1, 2],
    "settings": {
        "workers": 2, "batch_size": 16, "epochs": 2, "corpus_train": 64, "corpus_test": 32, "density": 0.05,
        "warmup_steps": 0,
    },
    "variants": {
        "dense": {"reducer": "dense"},
        "oktopk 0.05": {},
        "oktopk 0.02, 20 dense steps": {"density": 0.02, "warmup_steps": 20},
    },
}  # fmt: skip
CONDITIONS = Conditions(num_workers=2, link="loopback", device="cpu", num_jobs=1, timeout_s=300.0)
STEPS_PER_EPOCH = 15
"""Of fabricated runs; every second epoch and the last one are validated."""


def write_study(path: Path, **changes: Any) -> Path:
    """`CONTENT` with other values; a key that is None is left out."""
    content = {key: value for key, value in {**CONTENT, **changes}.items() if value is not None}
    path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in content.items()))
    return path


def make_study(folder: Path, **changes: Any) -> Study:
    return read_study(str(write_study(folder / "made.toml", **changes)))


def _toml(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return f"{{ {', '.join(f'{json.dumps(key)} = {_toml(each)}' for key, each in value.items())} }}"


def fabricate(run: Run, final: float = 0.6, num_steps: int = 60, **conditions: Any) -> list[dict[str, Any]]:
    """A run's folder as a study leaves it; its metric grows evenly to `final`. Returns its steps.

    `conditions`: values of conditions.json other than a finished run's; status=None is a run that was stopped half way.
    """
    config = run.config
    steps = write_run(
        run.folder,
        Recipe(
            steps=num_steps,
            dense_steps=num_steps if config.reducer == "dense" else config.warmup_steps,
            steps_per_epoch=STEPS_PER_EPOCH,
            workers=config.workers,
            density=config.density,
            reducer=config.reducer,
            metrics={"accuracy": lambda part: final * part},
            profile=False,
            config=config.as_dict(),
            seed=run.seed,
        ),
    )
    about = {"status": "finished", "link": "loopback", "device": "cpu", "num_jobs": 1, **conditions}
    if about["status"] is not None:
        (run.folder / "conditions.json").write_text(json.dumps(about))
    return steps
