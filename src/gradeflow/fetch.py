"""Fetch one dataset into a JSONL file: rows in the format it is published in, each with its `split`.

What comes from a URL is kept in the folder that GRADEFLOW_DOWNLOADS names, .gradeflow/downloads if it names none.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, get_args

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from gradeflow import jsonl, sources
from gradeflow.errors import DataError, SettingsError
from gradeflow.fetching import addresses, download, records
from gradeflow.fetching.addresses import Found
from gradeflow.fetching.download import PATIENCE, Patience
from gradeflow.params import Params, Source
from gradeflow.sources.published import Published
from gradeflow.types import Split

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Files of a split: addresses in order of preference, each with its checksum or "", and globs within archives.

    `setting` is the one to change if none of them gives anything.
    """

    split: Split
    addresses: Mapping[str, str]
    members: tuple[str, ...]
    setting: str


def main(params: Params, *, dataset: str, out: Path, patience: Patience = PATIENCE) -> None:
    """Fetch one dataset: made here, or read from where `fetch.<dataset>` or the dataset's authors say."""
    if dataset not in params.fetch:
        raise SettingsError(f"fetch.{dataset}: not in params.yaml; there are: {', '.join(params.fetch)}")
    settings = params.fetch[dataset]
    sources.load(dataset)  # says which there are
    made = settings.train + settings.validation + settings.test
    found = [] if made else obtain(wanted(dataset, settings), patience)
    path = out.with_name(f"{out.stem}.bad.jsonl")
    with jsonl.whole(path) if settings.bad_rows == "set aside" else contextlib.nullcontext() as file:
        bad = BadRows(file, f"fetch.{dataset}.bad_rows")
        rows = from_maker(dataset, settings) if made else from_files(dataset, found, bad)
        with Progress() as progress, contextlib.closing(rows):
            count = jsonl.write(out, progress.track(rows, description=f"fetch {dataset}", total=made or None))
    if not bad.count:
        path.unlink(missing_ok=True)
    print(f"{out}: {count} rows" + (f"; {path}: {bad.count} set aside" if bad.count else ""))


def from_maker(dataset: str, settings: Source) -> Generator[Row]:
    for split in get_args(Split):
        yield from itertools.islice(sources.made_rows(dataset, split, settings.seed), getattr(settings, split))


def wanted(dataset: str, settings: Source) -> list[Wanted]:
    """The files that the settings name or, where they name none, those that the dataset's authors publish."""
    source = sources.load(dataset)
    published: Published | None = getattr(source, "PUBLISHED", None)
    files = f"fetch.{dataset}.files"
    if settings.files:
        found = []
        for split, address in settings.files.items():
            setting = f"{files}.{split}"
            members = _members(published, split, address, setting)
            found.append(Wanted(split, {address: settings.sha256.get(split, "")}, members, setting))
        return found
    if published is None:
        lacking = "row counts: train, validation, test" if hasattr(source, "make") else f"files: set {files}"
        raise SettingsError(f"fetch.{dataset}: needs {lacking}")
    return [
        Wanted(
            file.split,
            _mirrored(file.urls, settings.mirror) | dict(file.urls),
            (file.member,),
            f"fetch.{dataset}.mirror or {files}.{file.split}",
        )
        for file in published.files
    ]


def _members(published: Published | None, split: Split, address: str, setting: str) -> tuple[str, ...]:
    """What is wanted of the authors' own archive, wherever it is now; of any other, all of it."""
    files = published.files if published else ()
    inside = [file for file in files if file.member and download.name(address) in map(download.name, file.urls)]
    if inside and split not in {file.split for file in inside}:
        there = ", ".join(file.split for file in inside)
        raise SettingsError(f"{setting}: {address} has no {split} rows; it has {there}")
    return tuple(file.member for file in inside if file.split == split) or ("",)


def _mirrored(urls: Mapping[str, str], mirror: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for url, sha256 in urls.items() if mirror else ():
        found.setdefault(f"{mirror.rstrip('/')}/{download.name(url)}", sha256)
    return found


def obtain(files: Iterable[Wanted], patience: Patience) -> list[tuple[Wanted, Found]]:
    """Each of the files on this machine, with a bar for each download.

    Raises:
        DataError: why no address gives a file, and which setting to change.
    """
    cache = Path(os.environ.get("GRADEFLOW_DOWNLOADS") or ".gradeflow/downloads")
    tasks: dict[str, TaskID] = {}

    def report(address: str, there: int, total: int | None) -> None:
        if address not in tasks:
            tasks[address] = progress.add_task(download.name(address))
        progress.update(tasks[address], completed=there, total=total)

    found = []
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        for one in files:
            try:
                found.append((one, addresses.obtain(one.addresses, cache, report, patience)))
            except DataError as error:
                raise DataError(f"{error}; {_advice(one)}") from None
    return found


def _advice(one: Wanted) -> str:
    return f"set the file's path, a folder, or another URL in {one.setting}"


class BadRows:
    """Stops at a row that cannot be used or, given a file, writes it there with the reason, and counts it."""

    def __init__(self, file: TextIO | None, setting: str) -> None:
        self.file, self.setting = file, setting
        self.count = 0

    def add(self, record: records.Record, row: Row, reason: DataError) -> None:
        if self.file is None:
            raise DataError(f"{record.where}: {reason}; to leave such rows out, set {self.setting} to `set aside`")
        said = {"where": record.where, "reason": str(reason), "row": row}
        self.file.write(json.dumps(said, ensure_ascii=False) + "\n")
        self.count += 1


def from_files(dataset: str, found: list[tuple[Wanted, Found]], bad: BadRows) -> Generator[Row]:
    for one, given in found:
        number = 0
        for (name, path), member in itertools.product(given.files.items(), one.members):
            for record in _read(path, member, name, one, given):
                for row in _usable(dataset, record, bad):
                    number += 1
                    yield {**row, "split": one.split}
        if not number:
            raise DataError(f"{given.address}: holds no rows{' to use' if bad.count else ''}; check {one.setting}")


def _read(path: Path, member: str, name: str, one: Wanted, given: Found) -> Iterator[records.Record]:
    """The file's records; one that cannot be read is not kept for the next time, unless it is as it should be."""
    try:
        yield from records.read(path, member, name=name)
    except DataError as error:
        if given.doubtful:
            path.unlink(missing_ok=True)
        raise DataError(f"{error}; {_advice(one)}") from None


def _usable(dataset: str, record: records.Record, bad: BadRows) -> Iterator[Row]:
    """The rows that the source can convert; where a published record holds several, the source has `rows`."""
    source = sources.load(dataset)
    divide: Callable[[Row], Iterable[Row]] = getattr(source, "rows", lambda row: (row,))
    try:
        rows = list(divide(record.row))
    except DataError as error:
        bad.add(record, record.row, error)
        return
    for row in rows:
        try:
            source.example(row)
        except DataError as error:
            bad.add(record, row, error)
        else:
            yield row
