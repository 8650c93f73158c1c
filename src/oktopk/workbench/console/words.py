"""What is typed: readers of single words for argparse, and a parser that says what is wrong in one line."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import NoReturn

LOOPBACK = "loopback"


class UsageError(ValueError):
    """What a user asked for cannot be done; the message names the key, the value, the reason and the fix."""


class LineParser(argparse.ArgumentParser):
    """What is wrong is said in one line, as a UsageError."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        if message.startswith("unrecognized"):
            message += f"; `{self.prog.split(' [')[0]} --help` lists the known ones"
        raise UsageError(message)


_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text)
    value = round(float(found[1]) * _MULTIPLES[found[2].lower()]) if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of elements, such as 20000, 20k or 27.6M")
    return value


def density(text: str) -> float:
    value = _number(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be in (0, 1], for example 0.01 to send 1 % of the gradient")
    return value


def count(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least {least}")
        return int(text)

    return read


def positive(text: str) -> float:
    value = _number(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive number")
    return value


def one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r}: unknown; choose from {', '.join(known)}")
        return text

    return read


def rate(text: str) -> str:
    """A link's speed as `tc` writes it, or `loopback` for no link at all."""
    if text != LOOPBACK:
        bits_per_s(text)
    return text


def link_rate(text: str) -> str:
    """As `rate`, of a real link only."""
    bits_per_s(text)
    return text


def bits_per_s(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text)
    value = round(float(found[1]) * _MULTIPLES[found[2]]) if found else 0
    if not 1e6 <= value <= 1e12:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be a rate of at least 1mbit, such as 100mbit, 1gbit or 25gbit"
        )
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def seconds(text: str) -> float:
    """A time with its unit, such as 100us, 2.5ms or 1s."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a time with its unit, such as 100us, 2.5ms or 1s")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]
