"""Raw files read in pieces and in parallel: each row becomes an entry of numbers, and is read again if it is drawn.

A raw file is what `fetch` writes: rows in the format that a dataset is published in, each with its `split`. Where a
dataset has no validation rows, a tenth of its training rows, by their digest, are validation rows.
"""

import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from gradeflow import sources
from gradeflow.errors import DataError
from gradeflow.mixing import near
from gradeflow.mixing.grams import Grams, words
from gradeflow.types import Example, ProblemType, Split

PIECE_BYTES = 8 << 20
SPLITS: tuple[Split, ...] = ("test", "validation", "train")
"""What a duplicate in two splits is kept for: held-out questions win over training rows."""
TYPES = get_args(ProblemType)
_PLACES: Mapping[str, int] = {name: place for names in (SPLITS, TYPES) for place, name in enumerate(names)}
ENTRY = np.dtype(
    [
        ("high", np.uint64),
        ("low", np.uint64),
        ("offset", np.uint64),
        ("length", np.uint32),
        ("source", np.uint16),
        ("split", np.uint8),
        ("type", np.uint8),
    ]
)
"""`high` and `low` are the digest of the problem, `source` the number of a raw file, in which a row has its place."""
_TRAIN_END = b'"split": "train"}\n'
_SPLIT = re.compile(rb'"split": ?"(train|validation|test)"\}\s*\Z')
_VALIDATION = b'"split": "validation"', b'"split":"validation"'


@dataclass(frozen=True, slots=True)
class Raw:
    """One dataset's raw file; `number` is its place among all. What is not mixed is only kept out of training."""

    name: str
    number: int
    path: Path
    is_mixed: bool = True

    @property
    def is_made(self) -> bool:
        """Whether the rows are made here: alike by intent, with splits that were kept apart when they were made."""
        return hasattr(sources.load(self.name), "make")

    @property
    def lends(self) -> bool:
        """Whether some training rows must do for validation."""
        with self.path.open("rb") as file:
            if not self.path.stat().st_size:
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return all(content.rfind(said) < 0 for said in _VALIDATION)


@dataclass(frozen=True, slots=True)
class Piece:
    """The lines that begin at `start` or later and before `end`."""

    raw: Raw
    lends: bool
    start: int
    end: int

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Each line that is not empty, with its offset."""
        with self.raw.path.open("rb", 1 << 18) as file:
            offset = self.start
            if offset:
                file.seek(offset - 1)
                offset += len(file.readline()) - 1
            for line in file:
                if offset >= self.end:
                    return
                if not line.isspace():
                    yield offset, line
                offset += len(line)

    def where(self, offset: int) -> str:
        with self.raw.path.open("rb") as file:
            before = sum(chunk.count(b"\n") for chunk in _chunks(file.read, offset))
        return f"{self.raw.path}, line {before + 1}"


@dataclass(frozen=True, slots=True)
class Scanned:
    """Entries of one piece, their `bands` (none where nobody looks for near duplicates), and of held-out rows what is
    asked. `leaks` has, by the place of a training row, the number of an evaluation question and the words they share.
    """

    entries: NDArray[Any]
    bands: NDArray[np.uint64]
    questions: Sequence[str] = ()
    leaks: Mapping[int, tuple[int, str]] = field(default_factory=dict)


def pieces(raws: Iterable[Raw]) -> list[Piece]:
    found = []
    for raw in raws:
        if not raw.path.is_file():
            raise DataError(f"{raw.path}: no such file; `dvc repro` makes it")
        size, lends = raw.path.stat().st_size, raw.lends
        found += [Piece(raw, lends, start, min(start + PIECE_BYTES, size)) for start in range(0, size, PIECE_BYTES)]
    return found


def held_out(piece: Piece, with_bands: bool) -> Scanned:  # noqa: FBT001 - what all pieces share
    """The validation and test rows of a piece."""
    entries: list[tuple[int, ...]] = []
    questions, told, is_made = [], [], piece.raw.is_made
    for offset, line, split, example in _examples(piece, training=False):
        entries.append(_entry(piece, offset, line, split, example))
        questions.append("" if is_made else example.question)
        if with_bands:
            told.append(words(example.problem))
    return Scanned(np.array(entries, ENTRY), near.bands(told), questions)


def training(piece: Piece, shared: tuple[Grams, bool]) -> Scanned:
    """The training rows of a piece, looked through for the grams of evaluation questions; bands if that is shared."""
    grams, with_bands = shared
    entries: list[tuple[int, ...]] = []
    questions, told, is_made = [], [], piece.raw.is_made
    for offset, line, split, example in _examples(piece, training=True):
        entries.append(_entry(piece, offset, line, split, example))
        if not is_made:
            questions.append(example.question)
        if with_bands:
            told.append(words(example.problem))
    return Scanned(np.array(entries, ENTRY), near.bands(told), leaks=dict(grams.find(questions)))


def read(raws: Sequence[Raw], entries: NDArray[Any]) -> list[Example]:
    """The examples of entries, from their files."""
    found: dict[int, Example] = {}
    for raw in raws:
        convert = sources.load(raw.name).example
        places = np.flatnonzero(entries["source"] == raw.number)
        places = places[np.argsort(entries["offset"][places])]
        starts, lengths = entries["offset"][places].tolist(), entries["length"][places].tolist()
        last = -1
        with raw.path.open("rb") as file:
            for place, start, length in zip(places.tolist(), starts, lengths, strict=True):
                if start != last:  # where it is the same, so is the example
                    row = orjson.loads(os.pread(file.fileno(), length, start))
                    row.pop("split", None)
                    example, last = convert(row), start
                found[place] = example
    return [found[place] for place in range(len(entries))]


def _examples(piece: Piece, *, training: bool) -> Iterator[tuple[int, bytes, Split, Example]]:
    convert = sources.load(piece.raw.name).example
    for offset, line in piece.lines():
        split = _told(line)
        if split and ((split := _lent(piece, split, line)) == "train") != training:
            continue
        try:
            row = orjson.loads(line)
            if not isinstance(row, dict):
                raise DataError(f"expected an object, found {type(row).__name__}")
            said = row.pop("split", None)
            split = split or _lent(piece, _as_split(said), line)
            if (split == "train") == training:
                yield offset, line, split, convert(row)
        except orjson.JSONDecodeError as error:
            cut = "" if line.endswith(b"\n") else " (the file seems cut off)"
            said = f"not JSON: {error.msg}{cut}; `dvc repro` makes it anew"
            raise DataError(f"{piece.where(offset)}: {said}") from None
        except DataError as error:
            raise DataError(f"{piece.where(offset)}: {error}") from None


def _told(line: bytes) -> Split | None:
    """The split at the end of a line as `fetch` writes it; None where only the whole row tells."""
    if line.endswith(_TRAIN_END):
        return "train"
    found = _SPLIT.search(line[-40:])
    return _as_split(found[1].decode()) if found else None


def _as_split(name: Any) -> Split:
    if name not in SPLITS:
        raise DataError(f"field split: {name!r} is none of {', '.join(reversed(SPLITS))}")
    found: Split = name
    return found


def _lent(piece: Piece, split: Split, line: bytes) -> Split:
    return "validation" if piece.lends and split == "train" and xxhash.xxh3_64_intdigest(line) % 10 == 0 else split


def _entry(piece: Piece, offset: int, line: bytes, split: Split, example: Example) -> tuple[int, ...]:
    digest = xxhash.xxh3_128_intdigest(_plain(example.problem))
    return (
        digest >> 64,
        digest & 0xFFFFFFFFFFFFFFFF,
        offset,
        len(line),
        piece.raw.number,
        _PLACES[split],
        _PLACES[example.problem_type],
    )


def _plain(text: str) -> bytes:
    """The text without a difference of case or white space; most have one space between words as they are."""
    text = text.casefold().strip()
    if text.isprintable() and "  " not in text:  # of all white space, only a plain space is printable
        return text.encode()
    return " ".join(text.split()).encode()


def _chunks(read_bytes: Callable[[int], bytes], size: int) -> Iterator[bytes]:
    while size > 0 and (chunk := read_bytes(min(size, 1 << 20))):
        size -= len(chunk)
        yield chunk
