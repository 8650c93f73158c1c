"""Labelled images as the image tasks read them, whatever they were stored as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from oktopk.workbench.train.data.errors import DataError

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Split = Literal["train", "test"]


class LabelledImages(Protocol):
    """All images of a split, of one size."""

    @property
    def num_classes(self) -> int: ...

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], epoch: int | None) -> tuple[Pixels, Labels]:
        """(batch, channels, height, width), and the classes. `epoch` varies the images; None: as they are.

        A function of its arguments and the seed alone. May be called from any thread, one at a time.
        """
        ...


@dataclass(frozen=True)
class Shift:
    """Moved by up to `pad` pixels, black moving in, and mirrored half of the time where `flip`."""

    pad: int
    flip: bool


class ImageArrays:
    """Images that fit into memory; a `shift` is applied in training."""

    def __init__(self, pixels: Pixels, labels: Labels, num_classes: int, shift: Shift | None, seed: int) -> None:
        assert len(pixels) == len(labels)
        self.num_classes = num_classes
        self._pixels = pixels
        self._labels = labels
        self._shift = shift
        self._seed = seed

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Sequence[int], epoch: int | None) -> tuple[Pixels, Labels]:
        chosen = np.asarray(indices, dtype=np.int64)
        pixels = self._pixels[chosen]
        if self._shift is not None and epoch is not None:
            pixels = np.stack(
                [
                    shifted(image, self._shift, chance(self._seed, epoch, index))
                    for image, index in zip(pixels, indices, strict=True)
                ]
            )
        return pixels, self._labels[chosen]


def chance(seed: int, epoch: int, index: int) -> np.random.Generator:
    """What decides how an image is varied in an epoch: no other image, worker or moment."""
    return np.random.default_rng((seed, epoch, index))


def shifted(image: Pixels, shift: Shift, generator: np.random.Generator) -> Pixels:
    """A new image of the same shape."""
    _, height, width = image.shape
    down, right = (int(place) for place in generator.integers(0, 2 * shift.pad + 1, 2))
    padded = np.pad(image, ((0, 0), (shift.pad, shift.pad), (shift.pad, shift.pad)))
    cut = padded[:, down : down + height, right : right + width]
    return cut[:, :, ::-1] if shift.flip and generator.random() < 0.5 else cut


def check_labels(labels: Labels, num_classes: int, where: object) -> None:
    """DataError for a class that there is not."""
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise DataError(
            f"{where}: image {wrong[0]} is of class {labels[wrong[0]]}, must be in [0, {num_classes}); "
            "download or write it again"
        )
