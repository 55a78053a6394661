"""What an agent is told of the files that it works on: the tree, the columns of tables, the form of the submission."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

DEPTH, FILES, IN_A_FOLDER = 5, 100, 20
ROWS = 1000
LONGEST_VALUE = 40
TABLES = {".csv": ",", ".tsv": "\t", ".parquet": ""}


def report(folder: Path) -> str:
    """The report in Markdown. Of a table of more rows the first `ROWS` are looked at, and it says so.

    It is made once of files that stay as they are: training asks for it in each episode.
    """
    files = ((path, path.stat()) for path in sorted(folder.rglob("*")))
    return _report(folder, tuple((path, known.st_size, known.st_mtime_ns) for path, known in files))


@lru_cache(maxsize=64)
def _report(folder: Path, _state: tuple[tuple[Path, int, int], ...]) -> str:
    parts = [f"## Directory Structure (Current Working Directory)\n```text\n{tree(folder)}\n```"]
    tables = [file for file in sorted(folder.rglob("*")) if _is_described(file)]
    if tables:
        parts.append("## Data Schema\n" + "\n\n".join(_schema(file, folder) for file in tables))
    if (sample := sample_submission(folder)) is not None and sample.suffix.lower() in TABLES:
        parts.append(_form(sample))
    return "\n\n".join(parts)


def tree(folder: Path) -> str:
    """At most `DEPTH` folders deep, `IN_A_FOLDER` entries of each, and `FILES` files in all."""
    lines, files = ["./"], 0
    for depth, entry, left_out in _walk(folder, 1):
        indent = "  " * depth
        if entry is None:
            lines.append(f"{indent}... {left_out} more")
        elif entry.is_dir():
            lines.append(f"{indent}{entry.name}/")
        elif files == FILES:
            lines.append(f"... more than {FILES} files")
            break
        else:
            files += 1
            lines.append(f"{indent}{entry.name}")
    return "\n".join(lines)


def sample_submission(folder: Path) -> Path | None:
    """The file that shows what a submission looks like."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    names = [(file, file.stem.lower()) for file in files]
    likely = [file for file, name in names if "sample" in name and "submission" in name]
    return next(iter(likely + [file for file, name in names if name == "submission"]), None)


def _walk(folder: Path, depth: int) -> Iterator[tuple[int, Path | None, int]]:
    entries = sorted(folder.iterdir())
    for entry in entries[:IN_A_FOLDER]:
        yield depth, entry, 0
        if entry.is_dir() and depth < DEPTH:
            yield from _walk(entry, depth + 1)
    if len(entries) > IN_A_FOLDER:
        yield depth, None, len(entries) - IN_A_FOLDER


def _is_described(file: Path) -> bool:
    return file.suffix.lower() in TABLES and any(word in file.stem.lower() for word in ("train", "test"))


def _schema(file: Path, folder: Path) -> str:
    import pandas as pd

    title = f"### `{file.relative_to(folder).as_posix()}`"
    try:
        rows, whole = _rows(file)
    except (ValueError, OSError) as error:  # what pandas and pyarrow raise for bytes that are no table
        return f"{title}\nIt cannot be read as a table: {str(error).splitlines()[0]}"
    columns = {
        "type": rows.dtypes.astype(str),
        "missing": rows.isna().mean().map("{:.1%}".format),
        "different": rows.nunique(),
        "such as": pd.Series({name: _shown(column) for name, column in rows.items()}, dtype=object),
    }
    seen = f"{len(rows)} rows" if whole else f"its first {len(rows)} rows"
    return f"{title}, {seen}\n```text\n{pd.DataFrame(columns).to_string()}\n```"


def _rows(file: Path) -> "tuple[pd.DataFrame, bool]":
    """The first rows, and whether these are all."""
    import pandas as pd

    if separator := TABLES[file.suffix.lower()]:
        found = pd.read_csv(file, sep=separator, nrows=ROWS + 1)
    else:
        import pyarrow.parquet

        batches = pyarrow.parquet.ParquetFile(file).iter_batches(ROWS + 1)
        found = next(batches).to_pandas()
    return found.head(ROWS), len(found) <= ROWS


def _shown(column: "pd.Series[Any]") -> str:
    said = str(column.dropna().head(2).tolist())
    return said if len(said) <= LONGEST_VALUE else f"{said[: LONGEST_VALUE - 3]}..."


def _form(sample: Path) -> str:
    title = f"## Submission Format\nThe submission has the form of `{sample.name}`"
    try:
        rows, _ = _rows(sample)
    except (ValueError, OSError):
        return f"{title}."
    names = ", ".join(f"`{name}`" for name in rows.columns)
    return f"{title}: the columns {names}, in this order.\n```text\n{rows.head().to_string(index=False)}\n```"
