"""Images in a folder for each class, as ImageNet is usually unpacked.

    train/CLASS/*.{jpg,jpeg,png}      val/CLASS/*.{jpg,jpeg,png}

Classes are numbered by the sorted names of their folders. Images are decoded when they are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations, repeat
from pathlib import Path

import numpy as np
from PIL import Image

from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.images import Labels, Pixels, Split, chance

FOLDERS: Mapping[Split, str] = {"train": "train", "test": "val"}
MAX_PIXELS = 50_000_000
"""What an image may decode to: more is an attack or a mistake."""
_SUFFIXES = (".jpg", ".jpeg", ".png")
_FORMATS = ("JPEG", "PNG")
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_TRIES = 10
_MARGIN = 256 / 224
"""Held-out images: the shorter side is this much longer than the square that is cut from the middle."""

Box = tuple[float, float, float, float]


class ImageFolder:
    """A split as squares of `size` pixels, decoded by `threads` at once.

    Training images are cut out at random and mirrored half of the time where `augment`; else the middle is taken.
    """

    def __init__(
        self, folder: Path, split: Split, *, size: int, augment: bool = False, seed: int = 0, threads: int = 1
    ) -> None:
        classes = find_classes(folder)
        self.num_classes = len(classes)
        self._paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            paths = _images(folder / FOLDERS[split] / name)
            self._paths += map(str, paths)
            labels += [label] * len(paths)
        self._labels = np.array(labels, dtype=np.int64)
        self._size = size
        self._augment = augment
        self._seed = seed
        self._decoders = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    def __len__(self) -> int:
        return len(self._paths)

    def batch(self, indices: Sequence[int], epoch: int | None) -> tuple[Pixels, Labels]:
        images = self._decoders.map(self._image, indices, repeat(epoch))
        return np.stack(list(images)), self._labels[np.asarray(indices, dtype=np.int64)]

    def _image(self, index: int, epoch: int | None) -> Pixels:
        image = read_image(Path(self._paths[index]))
        flip = False
        if self._augment and epoch is not None:
            generator = chance(self._seed, epoch, index)
            box = random_box(image.width, image.height, generator)
            flip = generator.random() < 0.5
        else:
            box = middle_box(image.width, image.height)
        square = np.asarray(image.resize((self._size, self._size), Image.Resampling.BILINEAR, box=box))
        return (square[:, ::-1] if flip else square).transpose(2, 0, 1)


def find_classes(folder: Path) -> list[str]:
    """The sorted names of the class folders; DataError unless train and val have the same."""
    found = {name: _class_names(folder / name) for name in FOLDERS.values()}
    for name, other in permutations(found):
        if lacking := sorted(found[name] - found[other]):
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise DataError(
                f"{folder / other}: lacks the class {lacking[0]!r}{more}, which {name} has; give both the same folders"
            )
    return sorted(found[FOLDERS["train"]])


def read_image(path: Path) -> Image.Image:
    """Decoded, in RGB; DataError naming the file."""
    try:
        with Image.open(path, formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(
                    f"{path}: has {image.width} x {image.height} pixels, more than {MAX_PIXELS}; "
                    "scale it down or remove it"
                )
            # transparency of a palette is only understood on the way to RGBA
            return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")
    except DataError:
        raise
    except Exception as error:  # damaged bytes make a decoder raise anything
        raise DataError(f"{path}: cannot be read as JPEG or PNG ({error}); replace it or remove it") from error


def random_box(width: int, height: int, generator: np.random.Generator) -> Box:
    """A part of 8 % to 100 % of the area, a third wider or higher than a square at most; else the middle square."""
    for _ in range(_TRIES):
        area = width * height * generator.uniform(*_AREA)
        ratio = math.exp(generator.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        wide, high = max(1, round(math.sqrt(area * ratio))), max(1, round(math.sqrt(area / ratio)))
        if wide <= width and high <= height:
            left, top = int(generator.integers(0, width - wide + 1)), int(generator.integers(0, height - high + 1))
            return (left, top, left + wide, top + high)
    return _middle(width, height, min(width, height))


def middle_box(width: int, height: int) -> Box:
    """What held-out images are judged by."""
    return _middle(width, height, min(width, height) / _MARGIN)


def _middle(width: int, height: int, side: float) -> Box:
    left, top = (width - side) / 2, (height - side) / 2
    return (left, top, left + side, top + side)


def _class_names(folder: Path) -> set[str]:
    try:
        names = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be listed ({error.strerror}); expected train/CLASS/*.jpg and val/CLASS/*.jpg (or .png) "
            "in data_dir, or leave data_dir empty for embedded data"
        ) from error
    if not names:
        raise DataError(f"{folder}: holds no class folders; expected CLASS/*.jpg or CLASS/*.png in it")
    return names


def _images(folder: Path) -> list[Path]:
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in _SUFFIXES and not p.name.startswith("."))
    if not paths:
        raise DataError(f"{folder}: holds no image; add .jpg or .png files, or remove the class from train and val")
    return paths
