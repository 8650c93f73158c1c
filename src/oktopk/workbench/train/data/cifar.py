"""CIFAR-10 as it is distributed: the python batches or the binary ones, with as many images as they hold.

    data_batch_1 ... data_batch_5, test_batch                 pickled by Python 2, read without running anything
    data_batch_1.bin ... data_batch_5.bin, test_batch.bin     1 + 3072 bytes for each image

They lie in the data folder, or below it in the folder that the archive makes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.images import Labels, Pixels, Split, check_labels

NUM_CLASSES = 10
SHAPE = (3, 32, 32)
FILES: Mapping[Split, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
    "test": ("test_batch",),
}
_IMAGE_BYTES = 3 * 32 * 32
_LARGEST_FILE_BYTES = 2**26
"""Twice a full batch."""
_AGAIN = "download it again from https://www.cs.toronto.edu/~kriz/cifar.html"
_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


def read_cifar10(folder: Path, split: Split) -> tuple[Pixels, Labels]:
    """All images of a split, in the order of the files; DataError for what is missing or damaged."""
    place, suffix = _find(folder)
    parts = [_read(place / f"{name}{suffix}") for name in FILES[split]]
    return np.concatenate([pixels for pixels, _ in parts]), np.concatenate([labels for _, labels in parts])


def write_binary(path: Path, pixels: Pixels, labels: Labels) -> None:
    """One file of the binary version."""
    records = np.concatenate([labels.astype(np.uint8)[:, None], pixels.reshape(len(pixels), _IMAGE_BYTES)], axis=1)
    path.write_bytes(records.tobytes())


def _find(folder: Path) -> tuple[Path, str]:
    """Where the files are, and what their names end in."""
    first = FILES["train"][0]
    for place in (folder, folder / "cifar-10-batches-bin", folder / "cifar-10-batches-py"):
        for suffix in (".bin", ""):
            if (place / f"{first}{suffix}").is_file():
                return place, suffix
    raise DataError(
        f"{folder}: holds no CIFAR-10: looked for {first} and {first}.bin, there and in cifar-10-batches-py and "
        "cifar-10-batches-bin; unpack the archive there, or leave data_dir empty for embedded data"
    )


def _read(path: Path) -> tuple[Pixels, Labels]:
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise DataError(f"{path}: is larger than any batch of CIFAR-10; {_AGAIN}")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {_AGAIN}") from error
    pixels, labels = _of_binary(content, path) if path.suffix == ".bin" else _of_pickle(content, path)
    if not len(labels):
        raise DataError(f"{path}: holds no image; {_AGAIN}")
    check_labels(labels, NUM_CLASSES, path)
    return pixels.reshape(-1, *SHAPE), labels


def _of_binary(content: bytes, path: Path) -> tuple[Pixels, Labels]:
    if len(content) % (1 + _IMAGE_BYTES):
        raise DataError(
            f"{path}: has {len(content)} bytes, must be a multiple of {1 + _IMAGE_BYTES}, so it is cut off; {_AGAIN}"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + _IMAGE_BYTES)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _of_pickle(content: bytes, path: Path) -> tuple[Pixels, Labels]:
    try:
        batch: Any = _BatchUnpickler(content, path).load()
    except DataError:
        raise
    except Exception as error:  # damaged bytes make an unpickler raise anything
        raise DataError(
            f"{path}: is no pickled batch of CIFAR-10 ({type(error).__name__}: {error}); {_AGAIN}"
        ) from error
    entries = cast("dict[Any, Any]", batch) if isinstance(batch, dict) else {}
    data, found = (entries.get(name.encode(), entries.get(name)) for name in ("data", "labels"))
    pixels = data.as_bytes_of(_IMAGE_BYTES) if isinstance(data, _Remembered) else None
    labels = cast("list[Any] | None", found if isinstance(found, list) else None)
    if pixels is None or labels is None or not all(type(label) is int for label in labels):
        raise DataError(
            f"{path}: must be a dict with `data`, n x {_IMAGE_BYTES} bytes, and `labels`, n integers; {_AGAIN}"
        )
    if len(labels) != len(pixels):
        raise DataError(f"{path}: has {len(pixels)} images and {len(labels)} labels; {_AGAIN}")
    return pixels, np.array(labels, dtype=np.int64)


class _Remembered:
    """Stands in for whatever a pickle calls, and does nothing: it keeps what it was called with."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def as_bytes_of(self, row_bytes: int) -> Pixels | None:
        """Taken for a pickled array of bytes (version, shape, dtype, by columns, content); None where it is not one."""
        match self.state:
            case (_, (int(rows), int(columns)), _Remembered(arguments=(b"u1" | "u1", *_)), False | 0, bytes(content)):
                if columns == row_bytes and len(content) == rows * columns:
                    return np.frombuffer(content, dtype=np.uint8).reshape(rows, columns)
            case _:
                pass
        return None


class _BatchUnpickler(pickle.Unpickler):
    """Knows the names that a pickled array needs, and calls not even those."""

    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._path = path

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in _KNOWN:
            raise DataError(
                f"{self._path}: wants to run {module_name}.{global_name}, which no batch of CIFAR-10 does; "
                f"do not trust it, {_AGAIN}"
            )
        return _Remembered
