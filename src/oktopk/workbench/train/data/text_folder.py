"""Any folder of text or source files as one text for training and one held out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from oktopk.workbench.train.data.errors import DataError

MAX_FILE_BYTES = 64 * 2**20
"""What a file may have unless it is train.txt or valid.txt: more is a data dump rather than something written."""

_HELD_OUT_PART = 20
"""One byte in so many is held out."""


@dataclass(frozen=True)
class FolderText:
    """UTF-8, neither part empty. `left_out` are files that are no text or too large, by their paths in the folder."""

    train: bytes
    held_out: bytes
    left_out: tuple[str, ...] = ()


def read_text(folder: Path, without: Path) -> FolderText:
    """The text of a folder; the same wherever the same files are read. DataError where there is none.

    A train.txt and a valid.txt in the folder are the two texts. Otherwise all text files are joined, folder by folder
    and sorted by name, each on a new line, and the last twentieth of the bytes is held out. A text file is UTF-8
    without NUL and has at most MAX_FILE_BYTES. Names that begin with a dot, and the folder `without`, are passed over.
    """
    if not folder.is_dir():
        raise DataError(f"data_dir={str(folder)!r}: no such folder; leave data_dir out to train on generated text")
    try:
        return _split(folder) or _joined(folder, without.resolve())
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); make it readable") from error


def _split(folder: Path) -> FolderText | None:
    paths = folder / "train.txt", folder / "valid.txt"
    if not all(path.is_file() for path in paths):
        return None
    train, held_out = (path.read_bytes() for path in paths)
    for path, content in zip(paths, (train, held_out), strict=True):
        if not content:
            raise DataError(f"{path}: is empty; put text into it, or remove it to hold out a twentieth of all files")
        if not _is_text(content):
            raise DataError(f"{path}: is not UTF-8 text without NUL; convert it")
    return FolderText(train, held_out)


def _joined(folder: Path, without: Path) -> FolderText:
    texts: list[bytes] = []
    left_out: list[str] = []
    for path in _files(folder, without):
        content = path.read_bytes() if path.stat().st_size <= MAX_FILE_BYTES else None
        if content is None or not _is_text(content):
            left_out.append(path.relative_to(folder).as_posix())
        elif content:
            texts.append(content)
    whole = b"\n".join(texts)
    cut = len(whole) - len(whole) // _HELD_OUT_PART
    while cut < len(whole) and whole[cut] & 0xC0 == 0x80:  # inside of a character
        cut += 1
    if cut == len(whole):
        raise DataError(
            f"{folder}: has {len(whole)} bytes of text, too few to hold some out, and {len(left_out)} other files; a "
            f"text file is UTF-8 without NUL and at most {MAX_FILE_BYTES >> 20} MiB, and no dot begins its path"
        )
    return FolderText(whole[:cut], whole[cut:], tuple(left_out))


def _files(folder: Path, without: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if _shown(name) and Path(place, name).resolve() != without)
        yield from (path for name in sorted(names) if _shown(name) and (path := Path(place, name)).is_file())


def _shown(name: str) -> bool:
    return not name.startswith(".")


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _raise(error: OSError) -> NoReturn:
    raise error
