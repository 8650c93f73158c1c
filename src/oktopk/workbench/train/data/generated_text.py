"""Text that needs no download and has something to learn, from a small grammar.

A sentence is a subject, a verb, an object and perhaps a place, all of one topic. Determiners and verbs agree with their
nouns in number, a noun has its own few verbs and adjectives, a verb its own few objects, and what was the object of a
sentence is the subject of the next: within a story, one sentence tells of the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator

from oktopk.workbench.train.data.errors import DataError

PARAMETERS_FILE = "corpus.json"
_FORMAT = 1  # raise it when the same parameters would give other bytes
_SINGULAR, _PLURAL = ("a", "the", "every"), ("some", "the", "many")
_PLACES = ("near", "behind", "under")
_UNKNOWN_PART = 0.01
_STORY_SENTENCES = (12, 24)


@dataclass(frozen=True)
class Topic:
    """Words that belong together; of a noun's or verb's few companions, the seed decides which."""

    nouns: tuple[str, ...]
    verbs: tuple[str, ...]
    adjectives: tuple[str, ...]


def _topic(nouns: str, verbs: str, adjectives: str) -> Topic:
    return Topic(tuple(nouns.split()), tuple(verbs.split()), tuple(adjectives.split()))


_TOPICS = (
    _topic("ship sailor wave whale anchor island harbor gull", "follow sink greet cover", "salty distant grey calm"),
    _topic("cook oven spoon onion kettle table guest plate", "warm scratch feed season", "hot fresh greasy sweet"),
    _topic("tree owl hunter trail mushroom fox branch river", "shade surround track hide", "mossy dark tall silent"),
    _topic("train driver ticket station bridge signal wagon clerk", "delay stop carry check", "late crowded loud blue"),
    _topic("actor stage curtain singer mask chorus poet lamp", "praise light mock adore", "famous velvet tragic grand"),
    _topic("planet comet orbit rocket crater moon pilot probe", "circle launch scan reach", "cold round bright remote"),
    _topic("farmer cow fence tractor barn goat field rooster", "plow chase guard wake", "muddy wooden fat early"),
    _topic("doctor nurse needle ward patient pill bandage fever", "cure visit soothe examine", "pale clean weak white"),
)
NUM_TOPICS = len(_TOPICS)


@dataclass(frozen=True)
class _Grammar:
    """For each topic and word, which few others go with it, as places in the topic's lists."""

    verbs: list[list[list[int]]]
    adjectives: list[list[list[int]]]
    objects: list[list[list[int]]]

    @classmethod
    def of(cls, generator: Generator) -> _Grammar:
        def companions(of: int, among: int, count: int) -> list[list[int]]:
            return [generator.permutation(among)[:count].tolist() for _ in range(of)]

        return cls(
            [companions(len(topic.nouns), len(topic.verbs), 2) for topic in _TOPICS],
            [companions(len(topic.nouns), len(topic.adjectives), 2) for topic in _TOPICS],
            [companions(len(topic.verbs), len(topic.nouns), 3) for topic in _TOPICS],
        )

    def story(self, generator: Generator, num_sentences: int) -> list[list[str]]:
        """Sentences of one topic, as words."""
        topic = int(generator.integers(NUM_TOPICS))
        noun, plural = int(generator.integers(len(_TOPICS[topic].nouns))), bool(generator.integers(2))
        told: list[list[str]] = []
        for _ in range(num_sentences):
            verb = _pick(generator, self.verbs[topic][noun])
            words = self._phrase(generator, topic, noun, plural)
            words.append(_TOPICS[topic].verbs[verb] + ("" if plural else "s"))
            noun, plural = _pick(generator, self.objects[topic][verb]), bool(generator.integers(2))
            words += self._phrase(generator, topic, noun, plural)
            if generator.random() < 0.25:
                place = int(generator.integers(len(_TOPICS[topic].nouns)))
                words += [_PLACES[int(generator.integers(len(_PLACES)))], *self._phrase(generator, topic, place, False)]
            told.append(words)
        return told

    def _phrase(self, generator: Generator, topic: int, noun: int, plural: bool) -> list[str]:
        determiners = _PLURAL if plural else _SINGULAR
        words = [determiners[int(generator.integers(len(determiners)))]]
        if generator.random() < 0.5:
            words.append(_TOPICS[topic].adjectives[_pick(generator, self.adjectives[topic][noun])])
        return [*words, _TOPICS[topic].nouns[noun] + ("s" if plural else "")]


def write_sentences(folder: Path, *, num_train: int, num_held_out: int, seed: int) -> None:
    """The Penn Treebank's layout: {train,valid,test}.txt, one sentence a line, some words unknown. See `_write`."""

    def text(grammar: _Grammar, generator: Generator, num_sentences: int) -> str:
        lines: list[str] = []
        while len(lines) < num_sentences:
            for words in grammar.story(generator, _story_length(generator)):
                lines.append(" ".join("<unk>" if generator.random() < _UNKNOWN_PART else word for word in words))
        return "".join(f"{line}\n" for line in lines[:num_sentences])

    _write(folder, "sentences", text, num_train, num_held_out, seed)


def write_documents(folder: Path, *, num_train: int, num_held_out: int, seed: int) -> None:
    """{train,valid,test}.txt with so many documents: one sentence a line, an empty line between two. See `_write`."""

    def text(grammar: _Grammar, generator: Generator, num_documents: int) -> str:
        stories = [grammar.story(generator, _story_length(generator)) for _ in range(num_documents)]
        return "\n".join("".join(" ".join(words).capitalize() + ".\n" for words in story) for story in stories)

    _write(folder, "documents", text, num_train, num_held_out, seed)


def _write(
    folder: Path,
    kind: str,
    text: Callable[[_Grammar, Generator, int], str],
    num_train: int,
    num_held_out: int,
    seed: int,
) -> None:
    """The same bytes for the same parameters; nothing where these lie already, DataError where others do."""
    if seed < 0:
        raise ValueError(f"seed={seed!r}: must be a whole number, at least 0")
    parameters = {"corpus": kind, "format": _FORMAT, "train": num_train, "held_out": num_held_out, "seed": seed}
    marker = folder / PARAMETERS_FILE
    try:
        if marker.is_file():
            found = json.loads(marker.read_text(encoding="utf-8"))
            if found != parameters:
                raise DataError(
                    f"{folder}: holds text made with {found}, asked for was {parameters}; remove it or use another name"
                )
            return
        folder.mkdir(parents=True, exist_ok=True)
        streams = np.random.default_rng(seed).spawn(4)
        grammar = _Grammar.of(streams[0])
        sizes = {"train": num_train, "valid": num_held_out, "test": num_held_out}
        for generator, (name, size) in zip(streams[1:], sizes.items(), strict=True):
            (folder / f"{name}.txt").write_text(text(grammar, generator, size), encoding="utf-8")
        marker.write_text(json.dumps(parameters, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error}); choose another out_dir") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{marker}: is damaged ({error}); remove {folder}") from error


def _story_length(generator: Generator) -> int:
    return int(generator.integers(_STORY_SENTENCES[0], _STORY_SENTENCES[1] + 1))


def _pick(generator: Generator, options: Sequence[int]) -> int:
    return options[int(generator.integers(len(options)))]
