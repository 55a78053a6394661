"""Where a dataset is published, under which licence, and by whom."""

from collections.abc import Mapping
from dataclasses import dataclass

from gradeflow.types import Split


@dataclass(frozen=True, slots=True)
class File:
    """A published file of one split.

    `urls` are its addresses in order of preference, each with the SHA-256 of what it gives ("" where that is not
    known); they may be in different formats, and hold the same questions. `member` is a glob of the files inside,
    where an address gives an archive.
    """

    split: Split
    urls: Mapping[str, str]
    member: str = ""


@dataclass(frozen=True, slots=True)
class Published:
    """`licence` is an SPDX identifier; `attribution` names authors and paper in one line."""

    home: str
    licence: str
    attribution: str
    files: tuple[File, ...]
