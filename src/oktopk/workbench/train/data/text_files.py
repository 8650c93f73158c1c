"""Text files: lines of UTF-8."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from oktopk.workbench.train.data.errors import DataError


def read_lines(path: Path) -> Iterator[str]:
    """Each line without white space at its ends; DataError for a file that cannot be read as UTF-8."""
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield line.strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
