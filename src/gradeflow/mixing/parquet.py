"""Mixed rows as Parquet: the same ones in the same order, for readers that are faster with columns.

What a source has of its own is one column of JSON, so that a file has the same columns whatever was mixed.
"""

from itertools import islice
from pathlib import Path

import orjson

from gradeflow import jsonl
from gradeflow.types import Example

AT_ONCE = 10_000
"""Rows of a row group, which is what is held in memory."""
_TEXTS = "id", "source", "problem_type", "problem", "ground_truth"


def write(rows: Path, out: Path) -> None:
    """Write the rows of a mixed JSON Lines file, with zstd: snappy's bytes differ between kinds of CPU.

    Raises:
        DataError: `out` cannot be written; what was there before is untouched.
    """
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([*((name, pa.string()) for name in _TEXTS), ("extra", pa.json_())])
    with (
        rows.open("rb") as lines,
        jsonl.placed(out) as part,
        parquet.ParquetWriter(part, schema, compression="zstd", store_schema=False) as writer,
    ):
        while some := [Example.from_row(orjson.loads(line)) for line in islice(lines, AT_ONCE)]:
            texts = ([getattr(example, name) for example in some] for name in _TEXTS)
            extra = [orjson.dumps(dict(example.extra)).decode() for example in some]
            writer.write_table(pa.table([*texts, extra], schema))
