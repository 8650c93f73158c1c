"""A corpus in AN4's layout and grammar that needs no download: every character has a sound of its own.

A character's sound is a loop of `_LOOP` samples with three formants. A voiced one is a single period, read at the
speaker's pitch; the others are noise, read at the sample rate.
"""

from __future__ import annotations

import json
import wave
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.generated import holds
from oktopk.workbench.train.data.manifest import write_manifests

Samples = NDArray[np.float64]

PARAMETERS_FILE = "corpus.json"
SAMPLE_RATE = 16000
NUM_SPEAKERS = {"train": 8, "test": 3}

_FORMAT = 1  # raise it when the same parameters would give other bytes
_LOOP = 16384
_FORMANTS_HZ = ((300.0, 500.0, 800.0), (1100.0, 1600.0, 2300.0), (2900.0, 3800.0, 5000.0))
_FORMANT_GAINS = (1.0, 0.8, 0.7)
_HIGHEST_HZ = 7000.0
_PITCH_HZ = (90.0, 230.0)
_FORMANT_SCALE = (0.9, 1.1)
_SPEED = (0.9, 1.15)
_SOUND_S = (0.058, 0.070)
_SPACE_S = 0.040
_REPEAT_GAP_S = 0.015
_MARGIN_S = (0.06, 0.10)
_SHORTEST_S = 0.6
_RAMP = np.sin(np.linspace(0.0, np.pi / 2, SAMPLE_RATE // 100)) ** 2
_SPACE_LEVEL = 0.03
_SNR_DB = (20.0, 30.0)
_PEAK = 0.5

_MAX_CHARACTERS = 35
_NOISY = "CFHKPSTX"
_VOICED = "ABDEGIJLMNOQRUVWYZ"


def _words(text: str) -> list[str]:
    return text.split()


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CONTROL = _words("ENTER ERASE GO HELP NO REPEAT RUBOUT START STOP YES")
_DIGITS = _words("ZERO ONE TWO THREE FOUR FIVE SIX SEVEN EIGHT NINE")
_TEENS = _words("TEN ELEVEN TWELVE THIRTEEN FOURTEEN FIFTEEN SIXTEEN SEVENTEEN EIGHTEEN NINETEEN")
_TENS = _words("TWENTY THIRTY FORTY FIFTY SIXTY SEVENTY EIGHTY NINETY")
_MONTHS = _words("JANUARY FEBRUARY MARCH APRIL MAY JUNE JULY AUGUST SEPTEMBER OCTOBER NOVEMBER DECEMBER")
_ORDINALS = _words(
    "FIRST SECOND THIRD FOURTH FIFTH SIXTH SEVENTH EIGHTH NINTH TENTH ELEVENTH TWELFTH THIRTEENTH FOURTEENTH "
    "FIFTEENTH SIXTEENTH SEVENTEENTH EIGHTEENTH NINETEENTH TWENTIETH"
)
_DAYS = (
    *_ORDINALS,
    *(f"TWENTY {ordinal}" for ordinal in _ORDINALS[:9]),
    "THIRTIETH",
    "THIRTY FIRST",
)
_NAMES = _words(
    "AARON ADAM ALICE AMY ANDREW ANNA ARTHUR BARBARA BEN BRIAN CARL CAROL CATHY CHRIS CLARA CRAIG DANIEL DAVID DIANA "
    "DONALD DORIS EDWARD ELLEN EMILY ERIC EVE FELIX FIONA FRANK FRED GARY GEORGE GLORIA GRACE GREG HARRY HELEN HENRY "
    "HUGO IAN INGRID IRENE ISAAC IVAN JACK JANE JASON JOHN JULIA KAREN KEITH KEVIN KIM KURT LARRY LAURA LEO LINDA "
    "LISA LUKE MARIA MARK MARTIN MARY MAX NANCY NEIL NICK NINA NORA OLGA OLIVER OSCAR OTTO PAMELA PAUL PETER PHIL "
    "QUENTIN RACHEL RALPH RITA ROBERT ROGER RUTH SALLY SAM SARAH SIMON SUSAN TED TERRY THOMAS TINA URSULA VERA VICTOR "
    "WALTER WENDY XAVIER YVONNE ZOE"
)
_STREETS = _words(
    "ALDER ASPEN BEACON BEECH BIGELOW BOND BRIDGE CANAL CEDAR CENTRE CHERRY CHURCH CRAIG DEVON DOVER ELM FIFTH FORBES "
    "FOREST GARDEN GRANT GROVE HARBOR HAZEL HICKORY HILL HOWE IVY JAMES KENT LAKE LAUREL LIBERTY LINDEN LOCUST MAIN "
    "MAPLE MARKET MILL MURRAY NEGLEY NORTH OAK OLIVE ORCHARD PARK PEARL PENN PINE POPLAR QUEEN RIVER SPRUCE STATE "
    "SUMMIT UNION VALLEY VINE WALNUT WATER WILKINS WILLOW WOOD YORK"
)


@dataclass(frozen=True)
class Speaker:
    """A voice; `loops` has the sound of every character, each of mean square 1."""

    pitch_hz: float
    speed: float
    loops: dict[str, Samples]


def generate(folder: Path, *, num_train: int = 480, num_test: int = 64, seed: int = 0) -> None:
    """Writes the corpus and its manifests; the same bytes for the same parameters.

    Does nothing where a whole corpus of these parameters lies already; DataError for a folder with anything else in it.
    """
    for key, value, least in (("num_train", num_train, 1), ("num_test", num_test, 1), ("seed", seed, 0)):
        if value < least:
            raise ValueError(f"{key}={value!r}: must be a whole number, at least {least}")
    parameters = {"corpus": "an4-like", "format": _FORMAT, "num_train": num_train, "num_test": num_test, "seed": seed}
    if holds(folder / PARAMETERS_FILE, parameters, "corpus"):
        return
    streams = np.random.default_rng(seed).spawn(2)
    train = sentences(streams[0], num_train)
    test = sentences(streams[1], num_test, known=train)
    try:
        _write_split(folder / "train" / "an4", train, make_speakers(streams[0], NUM_SPEAKERS["train"]), streams[0])
        _write_split(folder / "test" / "an4", test, make_speakers(streams[1], NUM_SPEAKERS["test"]), streams[1])
        write_manifests(folder)
        (folder / PARAMETERS_FILE).write_text(json.dumps(parameters, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written ({error}); remove what is there or name another folder"
        ) from error


def sentences(generator: Generator, count: int, known: Iterable[str] = ()) -> list[str]:
    """So many sentences of AN4's kinds; none that is in `known`, except for single words."""
    taken = set(known)
    found: list[str] = []
    while len(found) < count:
        sentence = _sentence(generator)
        if len(sentence) <= _MAX_CHARACTERS and (" " not in sentence or sentence not in taken):
            found.append(sentence)
    return found


def make_speakers(generator: Generator, count: int) -> list[Speaker]:
    """Voices spread evenly over pitch, formant scale and speed, which are combined at random."""

    def spread(limits: tuple[float, float]) -> list[float]:
        places = (generator.permutation(count) + generator.uniform(0.25, 0.75, count)) / count
        return (limits[0] * (limits[1] / limits[0]) ** places).tolist()

    voices = zip(spread(_PITCH_HZ), spread(_FORMANT_SCALE), spread(_SPEED), strict=True)
    return [Speaker(pitch, speed, _loops(generator, pitch, scale)) for pitch, scale, speed in voices]


def speak(text: str, speaker: Speaker, generator: Generator) -> Samples:
    """The text in this voice with some noise, peak 0.5: a sound of 50 to 80 ms per character, a pause per space."""
    margins = generator.uniform(*_MARGIN_S, 2)
    parts: list[Samples] = []
    for index, character in enumerate(text):
        if index and character == text[index - 1]:
            parts.append(np.zeros(round(_REPEAT_GAP_S * SAMPLE_RATE)))
        parts.append(_sound(character, speaker, generator))
    lacking = _SHORTEST_S * SAMPLE_RATE - sum(map(len, parts)) - margins.sum() * SAMPLE_RATE
    before, after = (int(margin * SAMPLE_RATE + max(0.0, lacking) / 2) + 1 for margin in margins)
    clean = np.concatenate([np.zeros(before), *parts, np.zeros(after)])
    level = np.sqrt(np.mean(np.square(np.concatenate(parts)))) * 10 ** (-generator.uniform(*_SNR_DB) / 20)
    noisy = clean + level * generator.standard_normal(len(clean))
    return _PEAK * noisy / np.abs(noisy).max()


def _sound(character: str, speaker: Speaker, generator: Generator) -> Samples:
    """One character, softly begun and ended, so that there is a dip between any two."""
    loop = speaker.loops[character]
    base_s = _SPACE_S if character == " " else generator.uniform(*_SOUND_S)
    time = np.arange(round(base_s / speaker.speed * SAMPLE_RATE))
    step = 1.0
    if character in _VOICED:
        first, last = generator.uniform(0.98, 1.02, 2)  # the pitch drifts
        step = speaker.pitch_hz / SAMPLE_RATE * _LOOP * (first + (last - first) * time / (2 * len(time)))
    start = generator.integers(_LOOP)
    sound = loop[(start + time * step).astype(np.int64) % _LOOP]
    sound[: len(_RAMP)] *= _RAMP
    sound[-len(_RAMP) :] *= _RAMP[::-1]
    return sound


def _loops(generator: Generator, pitch_hz: float, scale: float) -> dict[str, Samples]:
    """Noisy characters differ from each other in two formants at least, voiced ones in one."""
    triples = list(product(range(3), repeat=3))
    noisy = [triple for triple in triples if sum(triple) % 3 == 0]
    voiced = [triple for triple in triples if sum(triple) % 3 != 0]
    noise_step_hz = SAMPLE_RATE / _LOOP
    loops = {" ": _SPACE_LEVEL * _loop(generator, noise_step_hz, (500.0,))}
    for letters, codes, step_hz in ((_NOISY, noisy, noise_step_hz), (_VOICED, voiced, pitch_hz)):
        for letter, code in zip(letters, codes, strict=False):
            formants = [scale * choices[place] for choices, place in zip(_FORMANTS_HZ, code, strict=True)]
            loops[letter] = _loop(generator, step_hz, formants)
    return loops


def _loop(generator: Generator, step_hz: float, formants_hz: Sequence[float]) -> Samples:
    """A loop with a partial every `step_hz`, each as loud as the formants near it make it, in random phase."""
    frequencies = step_hz * np.arange(_LOOP // 2 + 1)
    loudness = np.zeros(len(frequencies))
    for formant, gain in zip(formants_hz, _FORMANT_GAINS, strict=False):
        loudness += gain / (1.0 + ((frequencies - formant) / (90.0 + 0.05 * formant)) ** 2)
    loudness[0] = 0.0
    loudness[frequencies > _HIGHEST_HZ] = 0.0
    loop = np.fft.irfft(loudness * np.exp(2j * np.pi * generator.random(len(frequencies))), _LOOP)
    return loop / np.sqrt(np.mean(np.square(loop)))


def _sentence(generator: Generator) -> str:
    kind = generator.random()
    if kind < 0.05:
        return _pick(generator, _CONTROL)
    if kind < 0.13:
        return " ".join(_pick(generator, _NAMES))
    if kind < 0.20:
        return " ".join(_pick(generator, _STREETS))
    if kind < 0.36:
        return _date(generator)
    if kind < 0.50:
        return _digits(generator, 3, 6)
    if kind < 0.58:
        return " ".join(_two_digits(generator) for _ in range(generator.integers(2, 4)))
    if kind < 0.68:
        number = _two_digits(generator) if generator.random() < 0.5 else _digits(generator, 2, 4)
        return f"{_pick(generator, _CONTROL)} {number}"
    if kind < 0.78:
        return f"{_pick(generator, _CONTROL)} {_code(generator)}"
    return _code(generator)


def _code(generator: Generator) -> str:
    letters = " ".join(_pick(generator, _LETTERS) for _ in range(generator.integers(3, 8)))
    return f"{letters} {_digits(generator, 1, 4)}"


def _date(generator: Generator) -> str:
    day = f"{_pick(generator, _MONTHS)} {_pick(generator, _DAYS)}"
    return day if generator.random() < 0.3 else f"{day} NINETEEN {_two_digits(generator)}"


def _digits(generator: Generator, least: int, most: int) -> str:
    return " ".join(_pick(generator, _DIGITS) for _ in range(generator.integers(least, most + 1)))


def _two_digits(generator: Generator) -> str:
    """Ten to ninety-nine."""
    value = int(generator.integers(10, 100))
    if value < 20:
        return _TEENS[value - 10]
    ten = _TENS[value // 10 - 2]
    return ten if value % 10 == 0 else f"{ten} {_DIGITS[value % 10]}"


def _pick(generator: Generator, options: Sequence[str]) -> str:
    return options[int(generator.integers(len(options)))]


def _write_split(folder: Path, texts: Sequence[str], speakers: Sequence[Speaker], generator: Generator) -> None:
    for kind in ("wav", "txt"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for index, text in enumerate(texts):
        number = index % len(speakers)
        key = f"al{index:05d}-s{number}"
        samples = np.round(32767 * speak(text, speakers[number], generator)).astype("<i2")
        with wave.open(str(folder / "wav" / f"{key}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(SAMPLE_RATE)
            file.writeframes(samples.tobytes())
        (folder / "txt" / f"{key}.txt").write_text(text + "\n", encoding="utf-8")
