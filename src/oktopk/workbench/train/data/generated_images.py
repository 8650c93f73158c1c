"""Image data sets that need no download: ten shapes with colours of their own, before a noisy background.

They are laid out as CIFAR-10 (binary version), MNIST (idx files) or ImageNet (a folder for each class). All shapes look
the same in a mirror, so that mirrored images keep their class.
"""

from __future__ import annotations

import colorsys
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from oktopk.workbench.train.data import cifar, idx, image_folder
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.generated import holds
from oktopk.workbench.train.data.images import Labels, Pixels, Split

Layout = Literal["cifar10", "mnist", "imagenet"]
Plane = NDArray[np.float64]

PARAMETERS_FILE = "images.json"
_FORMAT = 1  # raise it when the same parameters would give other bytes
_FOLDER_SIZES = (64, 80)
_HUE_JITTER = 0.08
_NOISE = (0.03, 0.10)
_EDGE = 0.08
"""Width of the soft edge of a shape, in half images."""


def _disc(x: Plane, y: Plane) -> Plane:
    return 0.75 - np.hypot(x, y)


def _ring(x: Plane, y: Plane) -> Plane:
    return 0.18 - np.abs(np.hypot(x, y) - 0.62)


def _square(x: Plane, y: Plane) -> Plane:
    return 0.65 - np.maximum(np.abs(x), np.abs(y))


def _frame(x: Plane, y: Plane) -> Plane:
    return 0.16 - np.abs(np.maximum(np.abs(x), np.abs(y)) - 0.60)


def _triangle(x: Plane, y: Plane) -> Plane:
    return np.minimum(0.65 - y, (y + 0.75) / 2 - np.abs(x))


def _plus(x: Plane, y: Plane) -> Plane:
    arms = 0.22 - np.minimum(np.abs(x), np.abs(y))
    return np.minimum(arms, 0.80 - np.maximum(np.abs(x), np.abs(y)))


def _cross(x: Plane, y: Plane) -> Plane:
    return _plus((x + y) / np.sqrt(2.0), (x - y) / np.sqrt(2.0))


def _rows(x: Plane, y: Plane) -> Plane:
    del x
    return 0.3 * np.cos(3.0 * np.pi * y)


def _columns(x: Plane, y: Plane) -> Plane:
    return _rows(y, x)


def _checks(x: Plane, y: Plane) -> Plane:
    return 0.3 * np.cos(2.0 * np.pi * x) * np.cos(2.0 * np.pi * y)


SHAPES: Mapping[str, Callable[[Plane, Plane], Plane]] = {
    "disc": _disc, "ring": _ring, "square": _square, "frame": _frame, "triangle": _triangle,
    "plus": _plus, "cross": _cross, "rows": _rows, "columns": _columns, "checks": _checks,
}  # fmt: skip
"""By class: how far inside the shape a point of [-1, 1] x [-1, 1] is."""
_CLASSES = tuple(SHAPES)


def generate(folder: Path, layout: Layout, *, num_train: int, num_test: int, seed: int) -> None:
    """Writes a data set; the same bytes for the same parameters.

    Classes take turns. Does nothing where a whole data set of these parameters lies already; DataError for a folder
    with anything else in it.
    """
    fewest = len(SHAPES)
    for key, value, least in (("num_train", num_train, fewest), ("num_test", num_test, fewest), ("seed", seed, 0)):
        if value < least:
            raise ValueError(f"{key}={value!r}: must be a whole number, at least {least}")
    parameters = {"layout": layout, "format": _FORMAT, "num_train": num_train, "num_test": num_test, "seed": seed}
    if holds(folder / PARAMETERS_FILE, parameters, "data set"):
        return
    train, test = np.random.default_rng(seed).spawn(2)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _WRITERS[layout](folder, "train", num_train, train)
        _WRITERS[layout](folder, "test", num_test, test)
        (folder / PARAMETERS_FILE).write_text(json.dumps(parameters, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written ({error}); remove what is there or name another folder"
        ) from error


def paint(label: int, size: int, generator: Generator, colour: bool = True) -> Pixels:
    """One image of the class, (3 or 1, size, size): the shape somewhere near the middle, in nearly its own colour.

    Grey ones are light on black, as MNIST's.
    """
    scale = generator.uniform(0.75, 1.05)
    right, down = generator.uniform(-0.15, 0.15, 2)
    places = np.linspace(-1.0, 1.0, size)
    x = np.tile((places - right) / scale, (size, 1))
    y = np.tile((places[:, None] - down) / scale, (1, size))
    inside = np.clip(0.5 + SHAPES[_CLASSES[label]](x, y) / _EDGE, 0.0, 1.0)
    if colour:
        hue = label / len(_CLASSES) + generator.uniform(-_HUE_JITTER, _HUE_JITTER)
        front = _rgb(hue, generator.uniform(0.5, 0.9), generator.uniform(0.7, 1.0))
        back = _rgb(generator.random(), generator.uniform(0.0, 0.4), generator.uniform(0.15, 0.45))
    else:
        front, back = np.array([generator.uniform(0.7, 1.0)]), np.zeros(1)
    clean = back[:, None, None] + (front - back)[:, None, None] * inside
    noisy = clean + generator.uniform(*_NOISE) * generator.standard_normal(clean.shape)
    return np.round(255.0 * np.clip(noisy, 0.0, 1.0)).astype(np.uint8)


def _rgb(hue: float, saturation: float, value: float) -> Plane:
    return np.array(colorsys.hsv_to_rgb(hue % 1.0, saturation, value))


def _paint_all(count: int, size: int, generator: Generator, colour: bool) -> tuple[Pixels, Labels]:
    labels = np.arange(count) % len(_CLASSES)
    return np.stack([paint(int(label), size, generator, colour) for label in labels]), labels


def _write_cifar10(folder: Path, split: Split, count: int, generator: Generator) -> None:
    pixels, labels = _paint_all(count, cifar.SHAPE[1], generator, colour=True)
    names = cifar.FILES[split]
    for name, part in zip(names, np.array_split(np.arange(count), len(names)), strict=True):
        cifar.write_binary(folder / f"{name}.bin", pixels[part], labels[part])


def _write_mnist(folder: Path, split: Split, count: int, generator: Generator) -> None:
    pixels, labels = _paint_all(count, idx.SIZE, generator, colour=False)
    images_name, labels_name = idx.FILES[split]
    idx.write_idx(folder / images_name, pixels[:, 0])
    idx.write_idx(folder / labels_name, labels.astype(np.uint8))


def _write_imagenet(folder: Path, split: Split, count: int, generator: Generator) -> None:
    for number in range(count):
        label = number % len(_CLASSES)
        size = int(generator.integers(_FOLDER_SIZES[0], _FOLDER_SIZES[1] + 1))
        path = folder / image_folder.FOLDERS[split] / _CLASSES[label] / f"{number:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(paint(label, size, generator).transpose(1, 2, 0)).save(path)


_WRITERS: Mapping[Layout, Callable[[Path, Split, int, Generator], None]] = {
    "cifar10": _write_cifar10,
    "mnist": _write_mnist,
    "imagenet": _write_imagenet,
}
