"""Folders of generated data say what they were made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oktopk.workbench.train.data.errors import DataError


def holds(marker: Path, parameters: dict[str, Any], what: str) -> bool:
    """Whether the marker's folder has the whole data of these parameters; DataError if it has anything else.

    `what` is the kind of data, as people call it.
    """
    folder = marker.parent
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise DataError(f"{folder}: is a file; name a folder for the {what}")
    if marker.is_file():
        try:
            found: Any = json.loads(marker.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{marker}: cannot be read ({error}); remove {folder} or name another folder") from error
        if found == parameters:
            return True
        raise DataError(
            f"{folder}: holds a {what} made with {found}, asked for was {parameters}; remove it or name another folder"
        )
    if any(folder.iterdir()):
        raise DataError(
            f"{folder}: is not empty and holds no whole {what}; remove what is there or name another folder"
        )
    return False
