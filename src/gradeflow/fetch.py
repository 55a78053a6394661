"""Fetch one dataset into a JSONL file: rows in the format it is published in, each with its `split`."""

import contextlib
import hashlib
import itertools
import tempfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from rich.progress import DownloadColumn, Progress

from gradeflow import disk, jsonl, sources
from gradeflow.errors import DataError, SettingsError
from gradeflow.params import Params, Source
from gradeflow.types import Split

TRIES = 3


def main(params: Params, *, dataset: str, out: Path) -> None:
    """Fetch one dataset: made here, or read from the original files that `fetch.<dataset>.files` names."""
    if dataset not in params.fetch:
        raise SettingsError(f"fetch.{dataset}: not in params.yaml; there are: {', '.join(params.fetch)}")
    settings = params.fetch[dataset]
    sources.load(dataset)  # says which there are
    rows = from_files(dataset, settings) if settings.files else from_maker(dataset, settings)
    total = None if settings.files else settings.train + settings.validation + settings.test
    with Progress() as progress, contextlib.closing(rows):
        count = jsonl.write(out, progress.track(rows, description=f"fetch {dataset}", total=total))
    print(f"{out}: {count} rows")


def from_maker(dataset: str, settings: Source) -> Generator[dict[str, Any]]:
    for split in get_args(Split):
        yield from itertools.islice(sources.made_rows(dataset, split, settings.seed), getattr(settings, split))


def from_files(dataset: str, settings: Source) -> Generator[dict[str, Any]]:
    convert = sources.load(dataset).example
    with tempfile.TemporaryDirectory() as scratch:
        for split, address in settings.files.items():
            path = _local(address, Path(scratch), settings.sha256.get(split))
            number = 0
            for number, row in enumerate(_rows(path, address), start=1):
                _check(convert, row, f"{address}, row {number}")
                yield {**row, "split": split}
            if not number:
                raise DataError(f"{address}: holds no rows; check fetch.{dataset}.files.{split}")


def _rows(path: Path, address: str) -> Iterator[dict[str, Any]]:
    """What the file holds; what is wrong with it is told of its address, since the download is gone by then."""
    try:
        yield from jsonl.read(path)
    except DataError as error:
        raise DataError(str(error).replace(str(path), address, 1)) from None


def _check(convert: Any, row: Mapping[str, Any], where: str) -> None:
    try:
        convert(row)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _local(address: str, scratch: Path, sha256: str | None) -> Path:
    path = _download(address, scratch) if "://" in address else Path(address)
    if not path.is_file():
        raise DataError(f"{address}: no such file")
    if sha256 is not None:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256.lower():
            raise DataError(f"{address}: checksum is {found}, expected {sha256}: another version, or a broken download")
    return path


def _download(url: str, scratch: Path) -> Path:
    import httpx

    path = scratch / (url.rsplit("/", 1)[-1] or "download")
    for attempt in itertools.count(1):
        try:
            with Progress(*Progress.get_default_columns(), DownloadColumn()) as progress:
                _stream(url, path, progress)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status < 500 or attempt >= TRIES:
                raise DataError(f"{url}: the server answered {status} {error.response.reason_phrase}") from None
        except (httpx.TransportError, httpx.InvalidURL) as error:
            if attempt >= TRIES or isinstance(error, httpx.InvalidURL):
                raise DataError(
                    f"{url}: not fetched in {attempt} tries ({type(error).__name__}: {error}). "
                    "Without a network, set the file's path in fetch.<dataset>.files"
                ) from None
        except OSError as error:
            raise DataError(
                f"{url}: cannot be kept in {scratch}: {disk.said(error)}, or set TMPDIR to another folder"
            ) from None
        else:
            return path
    raise AssertionError


def _stream(url: str, path: Path, progress: Progress) -> None:
    import httpx

    with httpx.stream("GET", url, follow_redirects=True, timeout=30) as response:
        response.raise_for_status()
        if "html" in response.headers.get("content-type", ""):
            raise DataError(f"{url}: the server sent a web page, not a data file")
        size = int(response.headers["content-length"]) if "content-length" in response.headers else None
        task = progress.add_task(path.name, total=size)
        with path.open("wb") as file:
            for chunk in response.iter_bytes():
                file.write(chunk)
                progress.update(task, completed=response.num_bytes_downloaded)
        if size is not None and response.num_bytes_downloaded != size:
            raise httpx.ReadError(f"{response.num_bytes_downloaded} of {size} bytes arrived")
