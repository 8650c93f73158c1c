"""Reports as their readers get them: what a page holds, and what holds for every page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path


class Page(HTMLParser):
    """What a page holds; AssertionError for what is not closed as it was opened."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: dict[str, str] = {}
        self.figures: list[str] = []
        self.absent: set[str] = set()
        self.labels: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.tags.add(tag)
        if tag not in self.VOID:
            self._open.append(tag)
        if "data-key" in found:
            self.numbers[found["data-key"]] = found["data-value"]
        if "data-figure" in found:
            self.figures.append(found["data-figure"])
        if "data-absent" in found:
            self.absent.add(found["data-absent"])
        if tag == "svg":
            self.labels.append(found["aria-label"])
        if "id" in found:
            self.ids.append(found["id"])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.words += f"{data}\n"


def read(path: Path) -> Page:
    """The page, with what holds for every one of them checked."""
    text = path.read_text(encoding="ascii")
    found = Page(text)
    assert "default-src 'none'" in text
    assert found.tags.isdisjoint({"script", "link", "iframe", "object", "img", "image", "metadata"})
    assert not re.search(r"<!DOCTYPE(?! html>)|<\?xml", text)
    addresses = set(re.findall(r"\b\w+://[^\"'\s<]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, addresses
    assert len(found.ids) == len(set(found.ids)), "ids of one picture are used by another"
    assert set(re.findall(r'(?:url\(|href=")#([\w-]+)', text)) <= set(found.ids)
    assert not re.search(r"\b(nan|inf|none|null)\b", found.words, re.IGNORECASE)
    assert "mathdefault" not in text
    assert not re.search(r"\b(?:nan|inf)\b", " ".join(found.numbers.values()), re.IGNORECASE)
    return found
