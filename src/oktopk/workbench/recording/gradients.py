"""Gradients of some steps, written down as they came, for `oktopk simulate` to send again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from oktopk.bucket import Bucket


class GradientRecorder:
    """A watcher of an AllReducer: saves every bucket of the steps in `steps`, in the order in which they come."""

    def __init__(self, folder: Path, steps: range) -> None:
        self._folder = folder
        self._steps = steps
        self._layout: list[list[dict[str, str | int]]] = []
        self._step, self._number = -1, 0

    def __call__(self, step: int, bucket: Bucket) -> None:
        if step not in self._steps:
            return
        self._number = self._number + 1 if step == self._step else 0
        self._step = step
        self._folder.mkdir(parents=True, exist_ok=True)
        gradient = bucket.flat.detach().to("cpu", torch.float32).numpy()
        np.save(self._folder / f"step_{step:06d}_bucket_{self._number:02d}.npy", gradient, allow_pickle=False)
        if step == self._steps.start:
            self._layout.append([{"name": slot.name, "numel": slot.numel} for slot in bucket.slots])
            (self._folder / "buckets.json").write_text(json.dumps(self._layout, indent=1) + "\n")
