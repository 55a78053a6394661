import gzip
import os
import subprocess
import sys
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
        (b"[" * 100_000, "line 1: not JSON: nested too deeply"),
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


def test_a_full_disk_leaves_the_good_file_alone(small_disk: Path) -> None:
    path = small_disk / "rows.jsonl"
    jsonl.write(path, [{"good": True}])
    with pytest.raises(DataError, match=r"rows\.jsonl: cannot be written.*No space left on device; free some space"):
        jsonl.write(path, ({"text": "x" * 1000} for _ in range(2000)))
    assert list(jsonl.read(path)) == [{"good": True}]
    assert [file.name for file in small_disk.iterdir()] == ["rows.jsonl"]


def test_a_file_where_a_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"rows\.jsonl: cannot be written, and is as it was: "):
        jsonl.write(tmp_path / "file" / "rows.jsonl", [])


def test_what_a_killed_process_has_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    living = f".rows.jsonl.{os.getppid()}.part"
    for name in (f".rows.jsonl.{ended.pid}.part", living, ".other.jsonl.part"):
        (tmp_path / name).touch()
    jsonl.write(tmp_path / "rows.jsonl", [])
    assert {file.name for file in tmp_path.iterdir()} == {"rows.jsonl", living, ".other.jsonl.part"}
