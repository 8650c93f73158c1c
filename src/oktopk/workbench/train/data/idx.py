"""MNIST and data sets like it: idx files, plain or compressed by gzip.

train-images-idx3-ubyte  train-labels-idx1-ubyte  t10k-images-idx3-ubyte  t10k-labels-idx1-ubyte     (each also .gz)
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.images import Labels, Pixels, Split, check_labels

NUM_CLASSES = 10
SIZE = 28
FILES: Mapping[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_UNSIGNED_BYTES = 8
_LARGEST_BYTES = 2**31
_AGAIN = "download or write it again"


def read_mnist(folder: Path, split: Split) -> tuple[Pixels, Labels]:
    """All images of a split, (n, 1, 28, 28), and their classes; DataError for what is missing or damaged."""
    images_path, labels_path = (_find(folder, name) for name in FILES[split])
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1).astype(np.int64)
    if images.shape[1:] != (SIZE, SIZE):
        raise DataError(f"{images_path}: images are {images.shape[1]} x {images.shape[2]}, must be {SIZE} x {SIZE}")
    if len(images) != len(labels):
        raise DataError(f"{images_path}: has {len(images)} images, {labels_path.name} {len(labels)} labels; {_AGAIN}")
    if not len(images):
        raise DataError(f"{images_path}: holds no image; {_AGAIN}")
    check_labels(labels, NUM_CLASSES, labels_path)
    return images[:, None], labels


def read_idx(path: Path, num_dimensions: int) -> NDArray[np.uint8]:
    """The bytes of an idx file, of exactly the size that its header says, in as many dimensions."""
    header_bytes = 4 + 4 * num_dimensions
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(header_bytes)
            shape = _shape(header, num_dimensions, path)
            expected = math.prod(shape)
            content = file.read(expected + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); {_AGAIN}") from error
    if len(content) != expected:
        found = "more" if len(content) > expected else str(len(content))
        raise DataError(f"{path}: its header promises {expected} bytes, there are {found}; {_AGAIN}")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    path.write_bytes(
        struct.pack(f">HBB{values.ndim}I", 0, _UNSIGNED_BYTES, values.ndim, *values.shape) + values.tobytes()
    )


def _shape(header: bytes, num_dimensions: int, path: Path) -> Sequence[int]:
    wanted = struct.pack(">HBB", 0, _UNSIGNED_BYTES, num_dimensions)
    if header[:4] != wanted:
        raise DataError(
            f"{path}: begins with 0x{header[:4].hex()}, an idx file of this kind with 0x{wanted.hex()}; {_AGAIN}"
        )
    if len(header) < 4 + 4 * num_dimensions:
        raise DataError(f"{path}: ends within its header; {_AGAIN}")
    shape = struct.unpack(f">{num_dimensions}I", header[4:])
    if math.prod(shape) > _LARGEST_BYTES:
        raise DataError(
            f"{path}: its header promises {math.prod(shape)} bytes, at most {_LARGEST_BYTES} are read; {_AGAIN}"
        )
    return shape


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"{folder}: holds neither {name} nor {name}.gz; put the data set's four idx files there, or leave data_dir "
        "empty for embedded data"
    )
