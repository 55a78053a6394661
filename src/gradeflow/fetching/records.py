"""Read published data files row by row, in memory that does not grow with the file.

JSON Lines; JSON (a list of objects, one object, or objects by key); CSV; Parquet; gzip of these; tar and zip archives
of all of them. The first bytes say what a file is; CSV goes by its name. A Parquet file in an archive passes through a
temporary file, and one whose row groups do not fit into memory is not guarded against.
"""

import codecs
import csv
import io
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gradeflow.errors import DataError
from gradeflow.fetching import archives
from gradeflow.fetching.archives import LIMITS, Limits

Row = dict[str, Any]

# The columns of MMLU's original CSV files, which have no header.
MMLU = ("question", "A", "B", "C", "D", "answer")
CHUNK_BYTES = 1 << 20
CUT_OFF = " (the file seems cut off)"
# An object with as many members as this, all of them objects, is a dict of rows and is read on without being held.
HELD = 100
SPACE = re.compile(r"[ \t\r\n]*")
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Record:
    """A row and where it stands; `member` is empty outside archives, `place` is its line or its number."""

    row: Row
    file: str
    member: str
    place: str

    @property
    def where(self) -> str:
        return ", ".join(filter(None, (self.file, self.member, self.place)))


def read(path: Path, member: str = "", *, name: str = "", limits: Limits = LIMITS) -> Iterator[Record]:
    """The rows of a file, or of those files in an archive that `member` matches (a glob; empty: all with rows).

    An object of objects gives one row for each, `{"key": key, **object}`; six columns without a header are MMLU's.
    `name` is what messages call the file, if not its path.

    Raises:
        DataError: naming file, member, line or row, and what is wrong there.
    """
    called = name or str(path)
    for opened in archives.read(path, member, name=called, limits=limits):
        where = f"{called}, {opened.member}" if opened.member else called
        for place, row in _rows(opened.stream, opened.member or path.name, where, limits):
            yield Record(row, called, opened.member, place)


def _rows(stream: io.BufferedReader, name: str, where: str, limits: Limits) -> Iterator[tuple[str, Row]]:
    head = stream.peek(512)
    if head.startswith(b"PAR1"):
        return _parquet(stream, where)
    if head.startswith((*archives.ZIP, archives.GZIP)) or head[257:262] == b"ustar":
        raise DataError(f"{where}: packed twice; {archives.UNPACK}")
    _require_text(head, where)
    plain = name.lower().removesuffix(".gz")
    if plain.endswith(".csv"):
        return _csv(stream, where, limits)
    first = head.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if first == b"[" or (first == b"{" and not plain.endswith((".jsonl", ".ndjson"))):
        return _json(stream, where, limits)
    return _json_lines(stream, where, limits)


def _require_text(head: bytes, where: str) -> None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or head[:2].count(0) == 1:
        raise DataError(f"{where}: UTF-16 text; save it as UTF-8")
    if is_web_page(head):
        raise DataError(f"{where}: a web page (HTML), not data; look at it in a browser")


def is_web_page(head: bytes) -> bool:
    """Whether these first bytes of a file are HTML's."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip()[:14].lower().startswith((b"<!doctype", b"<html"))


def _lines(stream: io.BufferedReader, where: str, limits: Limits) -> Iterator[tuple[str, str]]:
    number = 0
    while line := stream.readline(limits.row_bytes + 1):
        number += 1
        place = f"line {number}"
        if len(line) > limits.row_bytes:
            raise DataError(f"{where}, {place}: longer than {limits.row_bytes:,} bytes")
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}, {place}: not UTF-8 at byte {error.start + 1} of the line") from None
        yield place, text.removeprefix("\ufeff") if number == 1 else text


def _json_lines(stream: io.BufferedReader, where: str, limits: Limits) -> Iterator[tuple[str, Row]]:
    for place, line in _lines(stream, where, limits):
        if not line.strip():
            continue
        try:
            value = DECODER.decode(line)
            _require_characters(line, value)
        except json.JSONDecodeError as error:
            cut = "" if line.endswith("\n") else CUT_OFF
            raise DataError(f"{where}, {place}: not JSON: {error.msg}{cut}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}, {place}: {_why(error)}") from None
        yield place, _require_object(value, f"{where}, {place}")


def _json(stream: io.BufferedReader, where: str, limits: Limits) -> Iterator[tuple[str, Row]]:
    text = _Text(stream, where, limits)
    number = 0
    while first := text.peek():
        for value in text.items() if first == "[" else text.rows() if first == "{" else (text.value(),):
            number += 1
            place = f"row {number}"
            yield place, _require_object(value, f"{where}, {place}")


def _require_object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object, found {type(value).__name__}")
    return value


class _Text:
    """JSON text, decoded as it is needed: no more is held than the value being read."""

    def __init__(self, stream: io.BufferedReader, where: str, limits: Limits) -> None:
        self.stream, self.where, self.limits = stream, where, limits
        self.text = ""
        self.at = 0
        self.line = 1
        self.bytes = 0
        self.ended = False
        self.decoder = codecs.getincrementaldecoder("utf-8")()

    def more(self) -> bool:
        """Drop what is read, and read as much again as is left; False at the end."""
        left = len(self.text) - self.at
        if left > self.limits.row_bytes:
            self.refuse(f"a value longer than {self.limits.row_bytes:,} bytes")
        data = self.stream.read(max(CHUNK_BYTES, left))
        self.ended = not data
        pending = len(self.decoder.getstate()[0])
        try:
            text = self.decoder.decode(data, final=self.ended)
        except UnicodeDecodeError as error:
            place = self.bytes - pending + error.start + 1
            raise DataError(f"{self.where}: not UTF-8 at byte {place:,} of the file") from None
        if not self.bytes:
            text = text.removeprefix("\ufeff")
        self.bytes += len(data)
        self.line += self.text.count("\n", 0, self.at)
        self.text = self.text[self.at :] + text
        self.at = 0
        return not self.ended

    def peek(self) -> str:
        """The next character that is no space, which is not yet taken; empty at the end."""
        while True:
            space = SPACE.match(self.text, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def take(self, expected: str) -> str:
        """The next character, which must be one of those expected."""
        if (found := self.peek()) == "" or found not in expected:
            self.refuse(f"not JSON: expected {' or '.join(expected)}{'' if found else CUT_OFF}")
        self.at += 1
        return found

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
                if end == len(self.text) and self.more():
                    continue
                _require_characters(self.text[self.at : end], value)
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated") or error.pos > len(self.text) - 16
                read = error.pos - self.at
                if not (unfinished and self.more()):
                    self.refuse(f"not JSON: {error.msg}{CUT_OFF if unfinished else ''}", self.at + read)
            except (ValueError, RecursionError) as error:
                self.refuse(_why(error))
            else:
                self.at = end
                return value

    def items(self) -> Iterator[Any]:
        self.take("[")
        if self.peek() == "]":
            self.at += 1
            return
        while True:
            yield self.value()
            if self.take(",]") == "]":
                return

    def members(self) -> Iterator[tuple[str, Any]]:
        self.take("{")
        if self.peek() == "}":
            self.at += 1
            return
        seen: set[str] = set()
        while True:
            if self.peek() != '"':
                self.refuse("not JSON: expected a name in quotes")
            key = self.value()
            if key in seen:
                self.refuse(f"not JSON: {key!r} stands twice in an object")
            seen.add(key)
            self.take(":")
            yield key, self.value()
            if self.take(",}") == "}":
                return

    def rows(self) -> Iterator[Any]:
        """The object itself, or, where all in it are objects, each of them with its key."""
        members = self.members()
        start = self.bytes
        held: Row = {}
        for key, value in members:
            held[key] = value
            if len(held) >= HELD and _all_objects(held):
                break
            if self.bytes - start > self.limits.row_bytes:
                self.refuse(f"a row longer than {self.limits.row_bytes:,} bytes")
        if not _all_objects(held):
            yield held
            return
        for key, value in held.items():
            yield {"key": key, **value}
        for key, value in members:
            yield {"key": key, **value} if isinstance(value, dict) else value

    def refuse(self, reason: str, at: int | None = None) -> NoReturn:
        line = self.line + self.text.count("\n", 0, self.at if at is None else at)
        raise DataError(f"{self.where}, line {line}: {reason}")


def _all_objects(values: Row) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values.values())


def _object(pairs: Sequence[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice!r} stands twice in an object")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)


def _require_characters(text: str, value: Any) -> None:
    """JSON can name halves of a character, which no UTF-8 file can hold."""
    if HALF_CHARACTER.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ValueError(f"{half} is half a character without its other half") from None


def _why(error: ValueError | RecursionError) -> str:
    return f"not JSON: {'nested too deeply' if isinstance(error, RecursionError) else error}"


def _csv(stream: io.BufferedReader, where: str, limits: Limits) -> Iterator[tuple[str, Row]]:
    reader = csv.reader((line for _, line in _lines(stream, where, limits)), strict=True)
    columns: Sequence[str] = ()
    try:
        for cells in reader:
            place = f"line {reader.line_num}"
            if not cells:
                continue
            if not columns:
                headless = len(cells) == len(MMLU) and cells[-1].strip() in {"A", "B", "C", "D"}
                columns = MMLU if headless else cells
                if "" in columns or len(set(columns)) < len(columns):
                    raise DataError(f"{where}, {place}: the header names a column twice or not at all")
                if not headless:
                    continue
            if len(cells) != len(columns):
                raise DataError(f"{where}, {place}: {len(cells)} cells, expected {len(columns)}: {', '.join(columns)}")
            yield place, dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{where}, line {reader.line_num}: not CSV: {error}") from None


def _parquet(stream: io.BufferedReader, where: str) -> Iterator[tuple[str, Row]]:
    import pyarrow as pa
    from pyarrow import parquet

    number = 0
    with tempfile.TemporaryFile() as scratch:
        file: Any = stream
        if not isinstance(stream.raw, io.FileIO):
            shutil.copyfileobj(stream, scratch, CHUNK_BYTES)
            file = scratch
        try:
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", _require_json(row, f"{where}, row {number}")
        except (pa.ArrowException, OSError, ValueError) as error:
            said = " ".join(str(error).split())
            raise DataError(f"{where}, after row {number}: broken Parquet: {said}; fetch it again") from None


def _require_json(row: Row, where: str) -> Row:
    for name, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}, field {name}: no JSON value: {error}") from None
    return row
