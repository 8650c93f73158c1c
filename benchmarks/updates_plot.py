"""The picture of docs/results/updates.md from the JSON beside it: python benchmarks/updates_plot.py."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "results" / "updates"
STYLES = {
    "dense, lr 0.002": ("#000000", "-"),
    "dense, lr 0.0015": ("#000000", ":"),
    "update 0.01": ("#0072B2", "-"),
    "update 0.02": ("#D55E00", "--"),
}


def main() -> None:
    runs = json.loads((FOLDER / "gpt.json").read_text())["runs"]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for axis, steps in zip(axes, (4000, 8000), strict=True):
        for run in runs:
            if run["steps"] != steps:
                continue
            colour, line = STYLES[run["name"]]
            label = f"{run['name']}: {run['curve'][-1][1]:.4f}, {run['bytes_percent']:.1f} % of the bytes"
            axis.plot(*zip(*run["curve"], strict=True), color=colour, linestyle=line, label=label)
        axis.set(title=f"{steps} steps", xlabel="step", ylim=(0.76, 1.1), xlim=(0, steps))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper right")
    axes[0].set_ylabel("held-out loss, nats a byte")
    figure.savefig(FOLDER / "gpt.png", dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
