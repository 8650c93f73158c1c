"""Values that a file may hold in any shape: read as what they should be, or not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast


def number(value: Any) -> float | None:
    """A finite number, or words that say one; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """A whole number that is not negative; else None."""
    found = number(value)
    return int(found) if found is not None and found >= 0 and found == int(found) else None


def clean(text: str) -> str:
    """Without what no page or picture can show: control characters, halves of pairs."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


class Values:
    """A JSON object."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __bool__(self) -> bool:
        return bool(self._values)

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def number(self, key: str) -> float | None:
        return number(self.get(key))

    def whole(self, key: str) -> int | None:
        return whole(self.get(key))

    def count(self, key: str) -> int:
        """0 where there is none."""
        return self.whole(key) or 0

    def text(self, key: str) -> str | None:
        found = self.get(key)
        return clean(found) if isinstance(found, str) and found else None

    def object(self, key: str) -> Values:
        found = self.get(key)
        return Values(cast("dict[str, Any]", found) if isinstance(found, dict) else {})

    def objects(self, key: str) -> list[Values]:
        return [Values(cast("dict[str, Any]", each)) for each in self.items(key) if isinstance(each, dict)]

    def items(self, key: str) -> list[Any]:
        found = self.get(key)
        return cast("list[Any]", found) if isinstance(found, list) else []

    def seconds(self) -> dict[str, float]:
        """What is under the key `seconds`."""
        mine = self.object("seconds")
        found = {stage: mine.number(stage) for stage in mine._values}
        return {stage: value for stage, value in found.items() if value is not None and value >= 0.0}
