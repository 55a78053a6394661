import gzip
from pathlib import Path

import pytest

from gradeflow import jsonl
from gradeflow.errors import DataError


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"b": "ü"}]
    assert jsonl.write(tmp_path / "deep" / "rows.jsonl", rows) == 2
    assert list(jsonl.read(tmp_path / "deep" / "rows.jsonl")) == rows


def test_gzipped_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n'))
    assert list(jsonl.read(path)) == [{"a": 1}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1}\n{"a": ', "line 2: not JSON: Expecting value (the file seems cut off)"),
        (b'{"a": 1}\n\xff\n', "line 2: not UTF-8 at byte 0"),
        (b"[1]\n", "line 1: expected an object, found list"),
        (b"<html>\n", "line 1: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        list(jsonl.read(path))
    assert str(path) in str(raised.value)
    assert said in str(raised.value)


def test_a_truncated_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        list(jsonl.read(path))


def test_a_failed_write_leaves_the_good_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    jsonl.write(path, [{"good": True}])

    def rows():
        yield {"half": True}
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        jsonl.write(path, rows())
    assert list(jsonl.read(path)) == [{"good": True}]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
