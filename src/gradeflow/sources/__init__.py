"""One file per dataset. A source module has

- `example(row) -> Example`: one row of any form in which the dataset is published, converted; DataError says which
  field is wrong;
- where the dataset is published, `PUBLISHED`, which says where, and `original(example) -> row`: the row of the
  original file again;
- where a published record holds several questions, `rows(record)`: one row for each;
- where Gradeflow makes the data itself, `make(random) -> row`: one row in a published format.

A row's `split` is set by `fetch`. Adding a dataset is one module here and one line under `fetch` in params.yaml.
"""

import importlib
import pkgutil
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

from gradeflow import digest
from gradeflow.errors import SettingsError
from gradeflow.types import Example, Split

Row = dict[str, Any]
# Modules of this package that are no datasets.
PARTS = {"fields", "published"}


class SourceModule(Protocol):
    def example(self, row: Mapping[str, Any]) -> Example: ...


def known() -> list[str]:
    return sorted({module.name for module in pkgutil.iter_modules(__path__)} - PARTS)


def load(name: str) -> SourceModule:
    if name not in known():
        raise SettingsError(f"fetch.{name}: no such dataset; known: {', '.join(known())}")
    return cast("SourceModule", importlib.import_module(f"{__name__}.{name}"))


def maker(name: str) -> Callable[[random.Random], Row]:
    """The function that makes one row of a procedural source."""
    make = getattr(load(name), "make", None)
    if make is None:
        raise SettingsError(f"fetch.{name}: needs files (its data is published, not made here)")
    return cast("Callable[[random.Random], Row]", make)


def split_of(problem: str) -> Split:
    """The split a made problem belongs to: 80 / 10 / 10 by digest, so that no seed can carry one across."""
    bucket = int(digest.of_bytes(problem.encode())[:8], 16) % 10
    return "test" if bucket == 9 else "validation" if bucket == 8 else "train"


def made(name: str, split: Split, seed: int) -> Iterator[Example]:
    """Endless distinct examples of one split of a procedural source."""
    for row in made_rows(name, split, seed):
        yield load(name).example(row)


def made_rows(name: str, split: Split, seed: int) -> Iterator[Row]:
    make, convert = maker(name), load(name).example
    rng = random.Random(f"{name}/{split}/{seed}")
    seen: set[str] = set()
    repeats = 0
    while True:
        row = make(rng)
        problem = convert(row).problem
        if split_of(problem) != split:
            continue
        if problem in seen:
            repeats += 1
            if repeats > 10_000:
                raise SettingsError(f"fetch.{name}: {len(seen)} distinct {split} rows are all that it can make")
            continue
        seen.add(problem)
        repeats = 0
        yield {**row, "split": split}


def identify(source: str, problem: str) -> str:
    """An example's id: its source and the digest of what is asked, so that order and file do not matter."""
    return f"{source}-{digest.of_bytes(problem.encode())[:16]}"
