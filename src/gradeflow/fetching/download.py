"""Download over HTTP into a cache that outlives the process: resumed where it broke off, verified, kept by its URL.

Each URL has a folder of its own: the file under its own name once it is whole, and beside it, hidden, the part that is
there so far, what is known of both, and a lock that lets one process at a time fetch it.
"""

import contextlib
import email.utils
import fcntl
import functools
import itertools
import json
import os
import random
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from gradeflow import digest, disk
from gradeflow.errors import DataError
from gradeflow.fetching import records
from gradeflow.redact import redact

if TYPE_CHECKING:
    import httpx

CHUNK_BYTES = 1 << 16
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
Report = Callable[[str, int, int | None], None]
"""Called with a URL, the bytes of it that are there, and how many there will be."""


@dataclass(frozen=True, slots=True)
class Patience:
    """`tries` counts those in a row that bring nothing new; the wait before the next is doubled each time."""

    tries: int = 5
    stall_s: float = 30.0
    wait_s: float = 1.0
    most_wait_s: float = 60.0
    redirects: int = 10


PATIENCE = Patience()


class _GaveUp(Exception):  # noqa: N818 - no error yet: there may be another address
    """No further try mends it."""


class _Again(Exception):  # noqa: N818 - no error yet: there are more tries
    """Another try may mend it, at once or after the `wait_s` that the server asks for."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class _Part:
    """What a part is a part of: its ETag or date, empty where the server gave none to rely on, and its length."""

    validator: str
    bytes: int | None


class _Place:
    """The folder of one URL."""

    def __init__(self, url: str, cache: Path) -> None:
        self.folder = cache / digest.of_bytes(url.encode())[:32]
        self.file = self.folder / (re.sub(r"[^\w.-]", "_", name(url)).lstrip(".")[-100:] or "download")
        self.part = self.folder / ".part"

    def kept(self, sha256: str) -> bool:
        """Whether the whole file is here: with that checksum or, if that is empty, with the one that it came with."""
        expected = sha256 or self._noted(".whole").get("sha256")
        return self.file.is_file() and digest.of_file(self.file) == expected

    def keep(self, url: str, sha256: str) -> None:
        with self.part.open("rb") as file:
            os.fsync(file.fileno())
        self._note(".whole", {"url": url, "sha256": sha256})
        self.part.replace(self.file)
        self.drop()

    def size(self) -> int:
        return self.part.stat().st_size if self.part.is_file() else 0

    def known(self) -> _Part:
        noted = self._noted(".part.json")
        return _Part(str(noted.get("validator", "")), noted.get("bytes"))

    def begin(self, part: _Part) -> None:
        self.part.write_bytes(b"")
        self._note(".part.json", asdict(part))

    def drop(self) -> None:
        self.part.unlink(missing_ok=True)
        (self.folder / ".part.json").unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for other processes that fetch the same; a killed one holds no lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _noted(self, name: str) -> Mapping[str, Any]:
        try:
            noted = json.loads((self.folder / name).read_text())
        except (OSError, ValueError):
            return {}
        return noted if isinstance(noted, dict) else {}

    def _note(self, name: str, content: Mapping[str, Any]) -> None:
        scratch = self.folder / f"{name}.new"
        scratch.write_text(json.dumps(content))
        scratch.replace(self.folder / name)


def name(address: str) -> str:
    """The file's own name in a URL or a path."""
    return unquote(re.split("[?#]", address)[0].rpartition("/")[2])


def is_kept(url: str, sha256: str, cache: Path) -> bool:
    """Whether `fetch` needs no network."""
    return _Place(url, cache).kept(sha256.lower())


def fetch(url: str, sha256: str, cache: Path, report: Report, patience: Patience = PATIENCE) -> Path:
    """The path in the cache of what the URL gives, whole and, unless `sha256` is empty, with that checksum.

    Raises:
        DataError: naming the URL, and why it is given up.
    """
    place, expected = _Place(url, cache), sha256.lower()
    try:
        if not place.kept(expected):
            with place.locked():
                if not place.kept(expected):
                    _download(url, expected, place, report, patience)
    except _GaveUp as reason:
        raise DataError(f"{redact(url)}: {redact(str(reason))}") from None
    except OSError as error:
        advice = "or set GRADEFLOW_DOWNLOADS to another folder"
        raise DataError(f"{redact(url)}: cannot be kept in {cache}: {disk.said(error)}, {advice}") from None
    return place.file


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes longer than many a download."""
    import httpx

    return httpx.create_ssl_context()


def _download(url: str, sha256: str, place: _Place, report: Report, patience: Patience) -> None:
    import httpx

    spoiled = False
    failed, most = 0, place.size()
    with httpx.Client(
        verify=_certificates(), follow_redirects=True, timeout=patience.stall_s, max_redirects=patience.redirects
    ) as client:
        while True:
            try:
                _receive(client, url, place, report, resume_anyway=bool(sha256))
            except (_Again, httpx.TransportError) as error:
                if isinstance(error, httpx.UnsupportedProtocol):
                    raise _GaveUp(str(error)) from None
                said = str(error) if isinstance(error, _Again) else f"{type(error).__name__}: {error}"
                failed = 1 if place.size() > most else failed + 1
                most = max(most, place.size())
                if failed >= patience.tries:
                    raise _GaveUp(f"not fetched in {failed} tries ({said})") from None
                _wait(getattr(error, "wait_s", None), failed, patience)
                continue
            except httpx.TooManyRedirects:
                raise _GaveUp(f"redirected more than {patience.redirects} times") from None
            except httpx.InvalidURL as error:
                raise _GaveUp(f"not a URL: {error}") from None
            found = digest.of_file(place.part)
            if not sha256 or found == sha256:
                place.keep(url, found)
                return
            place.drop()
            if spoiled:
                raise _GaveUp(f"checksum is {found}, expected {sha256}: another version, or a broken download")
            spoiled = True


def _wait(asked_s: float | None, failed: int, patience: Patience) -> None:
    if asked_s is not None and asked_s > patience.most_wait_s:
        raise _GaveUp(f"the server asks to come back in {asked_s:.0f} s")
    backoff_s = min(patience.wait_s * 2 ** (failed - 1), patience.most_wait_s)
    time.sleep(random.uniform(backoff_s / 2, backoff_s) if asked_s is None else asked_s)


def _receive(client: "httpx.Client", url: str, place: _Place, report: Report, *, resume_anyway: bool) -> None:
    """Bring the part to its end, from where it stands if that is safe: by ETag or date, or for there is a checksum."""
    known, have = place.known(), place.size()
    if have and have == known.bytes:
        return
    if not known.validator and not resume_anyway:
        have = 0
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-"} | ({"If-Range": known.validator} if known.validator else {})
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code == 416 and have:
            place.drop()
            raise _Again("it has become shorter")
        _require_data(response)
        if response.status_code == 206:
            end, total = _range(response, have, known, place)
        else:
            have, end, total = 0, None, _length(response)
        chunks = response.iter_raw(CHUNK_BYTES)
        first = next(chunks, b"")
        if not have:
            if records.is_web_page(first):
                raise _GaveUp("the server sent a web page, not a data file")
            place.begin(_Part(_validator(response), total))
        with place.part.open("ab", buffering=0) as file:
            for chunk in itertools.chain([first], chunks):
                file.write(chunk)
                have += len(chunk)
                report(url, have, total)
    if end is not None and have != end:
        place.drop()
        raise _Again(f"the range that was sent should end at {end}, and ends at {have}")
    if total is not None and have < total:
        raise _Again(f"{have} of {total} bytes arrived")


def _require_data(response: "httpx.Response") -> None:
    status = f"the server answered {response.status_code} {response.reason_phrase}"
    if response.status_code in {408, 429} or response.status_code >= 500:
        raise _Again(status, _retry_after_s(response))
    if response.status_code not in {200, 206}:
        raise _GaveUp(status)
    if "html" in response.headers.get("content-type", ""):
        raise _GaveUp("the server sent a web page, not a data file")


def _range(response: "httpx.Response", have: int, known: _Part, place: _Place) -> tuple[int, int | None]:
    """Where the range that was sent ends, and the whole; what does not fit the part here makes it begin anew."""
    said = response.headers.get("content-range", "")
    found = CONTENT_RANGE.fullmatch(said)
    start, end = (int(found[1]), int(found[2]) + 1) if found else (-1, 0)
    total = known.bytes if not found or found[3] == "*" else int(found[3])
    length = _length(response)
    if not have or start != have or (length is not None and start + length != end):
        place.drop()
        raise _Again(f"the server sent the range {said or 'of no name'}, asked for {have}-")
    names = ("etag", "last-modified")
    sent = [response.headers[name] for name in names if name in response.headers]
    if total != (known.bytes or total) or (known.validator and sent and known.validator not in sent):
        place.drop()
        raise _Again("it has changed meanwhile")
    return end, total


def _validator(response: "httpx.Response") -> str:
    """A strong ETag or the date, which If-Range takes; empty where there is neither."""
    etag = response.headers.get("etag", "")
    return str(etag if etag.startswith('"') else response.headers.get("last-modified", ""))


def _length(response: "httpx.Response") -> int | None:
    length = response.headers.get("content-length", "")
    return int(length) if length.isdecimal() else None


def _retry_after_s(response: "httpx.Response") -> float | None:
    said = response.headers.get("retry-after", "")
    if said.isdecimal():
        return float(said)
    try:
        then = email.utils.parsedate_to_datetime(said)
    except ValueError:
        return None
    return max(0.0, (then.replace(tzinfo=then.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
