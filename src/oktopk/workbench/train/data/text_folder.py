"""Any folder of text or source files, or one file, as one text for training and one held out."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from oktopk.workbench.train.data.errors import DataError

MAX_FILE_BYTES = 64 * 2**20
"""What one of many files may have: more is a data dump rather than something written."""

MAX_HELD_OUT_BYTES = 2**20
"""So much judges a model well enough; more would make validation long."""

_HELD_OUT_PART = 20
"""One byte in so many is held out."""

_OF_A_RUN = frozenset({"run.json", "metrics.jsonl"})
"""The files that every run writes into its folder."""


@dataclass(frozen=True)
class FolderText:
    """UTF-8, neither part empty. `left_out` are files that are no text or too large, by their paths in the folder."""

    train: bytes
    held_out: bytes
    left_out: tuple[str, ...] = ()


def read_text(path: Path, without: Collection[Path]) -> FolderText:
    """The text of a folder or of one file; the same wherever the same files are read. DataError where there is none.

    A train.txt and a valid.txt in the folder are the two texts. Otherwise all text files are joined, folder by folder
    and sorted by name, each on a new line, and the last twentieth of the bytes, at most MAX_HELD_OUT_BYTES, is held
    out. A text file is UTF-8 without NUL; of many files, each has at most MAX_FILE_BYTES. Names that begin with a dot,
    the folders `without` and the folders of earlier runs are passed over.
    """
    try:
        if not (path.is_dir() or path.is_file()):
            raise DataError(
                f"data_dir={str(path)!r}: no such folder or file; leave data_dir out to train on generated text"
            )
        if path.is_dir():
            return _split(path) or _joined(path, {each.resolve() for each in without})
        return FolderText(*_cut(path, _read_whole(path, "put text into it"), "put more text into it"))
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); make it readable") from error


def _split(folder: Path) -> FolderText | None:
    paths = folder / "train.txt", folder / "valid.txt"
    if not all(path.is_file() for path in paths):
        return None
    fix = "put text into it, or remove it to hold out a twentieth of all files"
    train, held_out = (_read_whole(path, fix) for path in paths)
    return FolderText(train, held_out)


def _read_whole(path: Path, fix: str) -> bytes:
    content = path.read_bytes()
    if not content:
        raise DataError(f"{path}: is empty; {fix}")
    if not _is_text(content):
        raise DataError(f"{path}: is not UTF-8 text without NUL; convert it")
    return content


def _joined(folder: Path, without: Collection[Path]) -> FolderText:
    texts: list[bytes] = []
    left_out: list[str] = []
    for path in _files(folder, without):
        content = path.read_bytes() if path.stat().st_size <= MAX_FILE_BYTES else None
        if content is None or not _is_text(content):
            left_out.append(path.relative_to(folder).as_posix())
        elif content:
            texts.append(content)
    fix = (
        f"put more text files into it; {len(left_out)} files were left out: a text file is UTF-8 without NUL, has at "
        f"most {MAX_FILE_BYTES >> 20} MiB, and no dot before its name"
    )
    return FolderText(*_cut(folder, b"\n".join(texts), fix), tuple(left_out))


def _cut(path: Path, whole: bytes, fix: str) -> tuple[bytes, bytes]:
    cut = len(whole) - min(len(whole) // _HELD_OUT_PART, MAX_HELD_OUT_BYTES)
    while cut < len(whole) and whole[cut] & 0xC0 == 0x80:  # inside of a character
        cut += 1
    if cut == len(whole):
        raise DataError(f"{path}: has {len(whole)} bytes of text, too few to hold some out; {fix}")
    return whole[:cut], whole[cut:]


def _files(folder: Path, without: Collection[Path]) -> Iterator[Path]:
    for place, folders, names in os.walk(folder, onerror=_raise):
        if Path(place) != folder and _OF_A_RUN.issubset(names):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if _shown(name) and Path(place, name).resolve() not in without)
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
