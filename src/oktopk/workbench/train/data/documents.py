"""Text of documents: one sentence a line, an empty line between two documents."""

from __future__ import annotations

from pathlib import Path

from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.text_files import read_lines

Document = list[str]
"""Sentences."""

_LEAST = 2
"""A random next sentence comes from another document."""


def find_documents(path: Path) -> tuple[list[Document], list[Document]]:
    """For training, and held out: from a folder with train.txt (and valid.txt) or any *.txt, or from one file.

    Where there is no valid.txt, a tenth of the documents is held out, spread evenly over the text.
    """
    if path.is_dir():
        files = [path / "train.txt"] if (path / "train.txt").is_file() else sorted(path.glob("*.txt"))
    elif path.is_file():
        files = [path]
    else:
        raise DataError(
            f"data_dir={str(path)!r}: no such folder or file; leave data_dir out to train on generated text"
        )
    held_out = path / "valid.txt"
    files = [file for file in files if file != held_out]
    if not files:
        raise DataError(f"{path}: has no train.txt nor another *.txt; it must have one sentence a line")
    documents = [document for file in files for document in read_documents(file)]
    if held_out.is_file():
        return _enough(documents, files[0]), _enough(read_documents(held_out), held_out)
    return _split(documents, files[0])


def read_documents(path: Path) -> list[Document]:
    documents: list[Document] = [[]]
    for line in read_lines(path):
        if line:
            documents[-1].append(line)
        elif documents[-1]:
            documents.append([])
    return [document for document in documents if document]


def _split(documents: list[Document], path: Path) -> tuple[list[Document], list[Document]]:
    n = len(documents)
    if n < 2 * _LEAST:
        raise DataError(
            f"{path}: has {_number(n)}, too few to hold some out; put an empty line between documents, "
            "or held-out ones into a valid.txt"
        )
    count = max(_LEAST, n // 10)
    held_out = {n * (place + 1) // count - 1 for place in range(count)}
    return [d for i, d in enumerate(documents) if i not in held_out], [documents[i] for i in sorted(held_out)]


def _enough(documents: list[Document], path: Path) -> list[Document]:
    if len(documents) < _LEAST:
        raise DataError(
            f"{path}: has {_number(len(documents))}, and a random next sentence comes from another one; "
            "put an empty line between documents"
        )
    return documents


def _number(n: int) -> str:
    return "no sentence" if n == 0 else f"{n} document{'s' if n > 1 else ''}"
