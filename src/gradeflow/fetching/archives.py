"""Open a data file: as it is, from gzip, or each of the wanted files in a tar, tar.gz or zip, as streams of bytes.

Nothing is unpacked to disk. An archive is refused, whatever is wanted of it, if a name in it leads out of its folder,
if it holds links or devices, if it is encrypted or cut off, or if it unpacks to more than the limits allow.
"""

import fnmatch
import gzip
import io
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

from gradeflow.errors import DataError

GZIP = b"\x1f\x8b"
ZIP = (b"PK\x03\x04", b"PK\x05\x06")
READABLE = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
UNPACK = "unpack it, and name the folder instead"


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes are in bytes, unpacked. `ratio` is that of unpacked to packed, and counts once `free_bytes` are passed."""

    members: int = 100_000
    member_bytes: int = 8 << 30
    total_bytes: int = 32 << 30
    ratio: int = 200
    free_bytes: int = 64 << 20
    row_bytes: int = 100_000_000


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream to read before the next one is asked for; `member` is empty where the file is no archive."""

    member: str
    stream: io.BufferedReader


def readable(name: str) -> bool:
    """Whether a file's name says that it holds rows, packed or not."""
    path = PurePosixPath(name.lower())
    hidden = any(part.startswith(".") or part == "__macosx" for part in path.parts)
    return not hidden and path.name.removesuffix(".gz").endswith(READABLE)


def read(path: Path, member: str = "", *, name: str = "", limits: Limits = LIMITS) -> Iterator[Opened]:
    """Streams of the file, or of those in the archive that `member` matches (a glob; empty: all with rows).

    Raises:
        DataError: it is missing, broken, unsafe or too large, or nothing in it is wanted.
    """
    name = name or str(path)
    try:
        with path.open("rb") as file:
            if file.peek(4).startswith(ZIP):
                yield from _zip(file, member, name, limits)
                return
            stream = _gunzipped(file, name, limits)
            if _is_tar(stream, path.name):
                yield from _tar(stream, member, name, limits)
            else:
                yield Opened("", stream)
    except FileNotFoundError:
        raise DataError(f"{name}: no such file") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from None


class _Counted(io.RawIOBase):
    """Bytes as they come out of `source`, counted against the limits; what breaks on the way becomes a DataError.

    `packed` says how many bytes went in, where that is to be compared. `last` is the place of the last byte but 0.
    """

    def __init__(
        self, source: IO[bytes] | gzip.GzipFile, name: str, limits: Limits, packed: Callable[[], int] | None = None
    ) -> None:
        self.source, self.name, self.limits, self.packed = source, name, limits, packed
        self.count = 0
        self.last = -1

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.source.read(len(buffer))
        except EOFError:
            raise DataError(f"{self.name}: cut off: its end is missing; fetch it again") from None
        except (gzip.BadGzipFile, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
            raise DataError(f"{self.name}: broken: {error}; fetch it again") from None
        if significant := len(data.rstrip(b"\0")):
            self.last = self.count + significant - 1
        self.count += len(data)
        if self.packed:
            _require_size(self.count, self.packed(), self.name, self.limits)
        buffer[: len(data)] = data
        return len(data)


def _require_size(unpacked: int, packed: int, name: str, limits: Limits) -> None:
    if unpacked > limits.total_bytes:
        raise DataError(f"{name}: unpacks to more than {limits.total_bytes:,} bytes, which no dataset here has")
    if unpacked > limits.free_bytes and unpacked > limits.ratio * packed:
        raise DataError(f"{name}: unpacks to more than {limits.ratio} times its size, which no dataset here does")


def _gunzipped(stream: io.BufferedReader, name: str, limits: Limits) -> io.BufferedReader:
    if not stream.peek(2).startswith(GZIP):
        return stream
    raw = stream.raw
    packed = (lambda: raw.count) if isinstance(raw, _Counted) else stream.tell
    return io.BufferedReader(_Counted(gzip.GzipFile(fileobj=stream), name, limits, packed))


def _is_tar(stream: io.BufferedReader, name: str) -> bool:
    return stream.peek(512)[257:262] == b"ustar" or name.lower().endswith((".tar", ".tgz", ".tar.gz"))


def _tar(packed: io.BufferedReader, member: str, name: str, limits: Limits) -> Iterator[Opened]:
    counted = _Counted(packed, name, limits)
    seen: list[str] = []
    wanted = 0
    try:
        with tarfile.open(fileobj=io.BufferedReader(counted), mode="r|") as archive:
            for info in archive:
                _require_safe(info.name, name, seen, limits)
                if not info.isdir() and (not info.isfile() or info.issparse()):
                    raise DataError(f"{name}, {info.name}: a link or a device, which no dataset needs; {UNPACK}")
                if info.isfile() and _matches(info.name, member):
                    wanted += 1
                    _require_member(info.size, f"{name}, {info.name}", limits)
                    yield _member(archive.extractfile(info), info.name, name, limits)
            end = archive.offset
            while counted.read(1 << 20):
                pass
    except tarfile.TarError as error:
        raise DataError(f"{name}: broken or cut off: {error}; fetch it again") from None
    if counted.last >= end or counted.count < end + tarfile.BLOCKSIZE:
        raise DataError(f"{name}: broken or cut off: the mark at the end of a tar is missing; fetch it again")
    _require_wanted(wanted, member, name, seen)


def _zip(file: BinaryIO, member: str, name: str, limits: Limits) -> Iterator[Opened]:
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{name}: broken or cut off: {error}; fetch it again") from None
    with archive:
        infos = [info for info in archive.infolist() if not info.filename.endswith("/")]  # is_dir fails without a name
        seen: list[str] = []
        for info in infos:
            _require_safe(info.filename, name, seen, limits)
            if stat.S_ISLNK(info.external_attr >> 16):
                raise DataError(f"{name}, {info.filename}: a link, which no dataset needs; {UNPACK}")
            if info.flag_bits & 1:
                raise DataError(f"{name}, {info.filename}: encrypted; {UNPACK}")
            _require_member(info.file_size, f"{name}, {info.filename}", limits)
            _require_size(info.file_size, info.compress_size, f"{name}, {info.filename}", limits)
        _require_size(sum(info.file_size for info in infos), limits.total_bytes, name, limits)
        wanted = [info for info in infos if _matches(info.filename, member)]
        _require_wanted(len(wanted), member, name, seen)
        for info in wanted:
            try:
                stream = archive.open(info)
            except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, EOFError, RuntimeError) as error:
                raise DataError(f"{name}, {info.filename}: cannot be unpacked: {error}; {UNPACK}") from None
            with stream:
                yield _member(stream, info.filename, name, limits)


def _member(stream: IO[bytes] | None, member: str, name: str, limits: Limits) -> Opened:
    assert stream is not None
    where = f"{name}, {member}"
    return Opened(member, _gunzipped(io.BufferedReader(_Counted(stream, where, limits)), where, limits))


def _matches(name: str, member: str) -> bool:
    name = name.removeprefix("./")
    return fnmatch.fnmatchcase(name, member) if member else readable(name)


def _require_safe(name: str, archive: str, seen: list[str], limits: Limits) -> None:
    """Note the name among those seen, unless it leads out of the archive's folder or is one too many."""
    if name.startswith("/") or re.match(r"[A-Za-z]:", name) or ".." in re.split(r"[/\\]", name):
        raise DataError(f"{archive}, {name}: leads out of the archive's folder; do not use this archive")
    seen.append(name)
    if len(seen) > limits.members:
        raise DataError(f"{archive}: holds more than {limits.members:,} files, which no dataset here does")


def _require_member(size: int, name: str, limits: Limits) -> None:
    if size > limits.member_bytes:
        raise DataError(f"{name}: {size:,} bytes, more than the {limits.member_bytes:,} that a file may have")


def _require_wanted(count: int, member: str, name: str, seen: Sequence[str]) -> None:
    if not count:
        named = ", ".join(seen[:5]) + (", ..." if len(seen) > 5 else "")
        kinds = f"matches {member}" if member else f"is of {', '.join(READABLE)}"
        raise DataError(f"{name}: no file in it {kinds}; it has {named or 'none'}")
