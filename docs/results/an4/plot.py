"""Draws an4.png from dense.csv and oktopk.csv: python plot.py (needs matplotlib)."""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
STYLES = {"dense": ("#0072B2", "o", "-"), "oktopk": ("#D55E00", "s", "--")}  # tell apart without colour too


def main() -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2))
    for name, (color, marker, line) in STYLES.items():
        with (HERE / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        epochs = [int(row["epoch"]) for row in rows]
        for axis, column in zip(axes, ("loss", "val_loss", "wer"), strict=True):
            values = [float(row[column]) for row in rows]
            axis.plot(epochs, values, line, color=color, marker=marker, markersize=4, label=name)
    for axis, title in zip(axes, ("training loss", "held-out loss", "held-out WER"), strict=True):
        axis.axvspan(0, 2.5, color="#999999", alpha=0.2, label="dense warm-up of oktopk")
        axis.set_title(title)
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[1].set_yscale("log")
    axes[2].set_ylim(0, 1.05)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(HERE / "an4.png", dpi=110)


if __name__ == "__main__":
    main()
