import os
from pathlib import Path

import pytest

from gradeflow.sandbox import RefusedOutputError, read_output
from gradeflow.sandbox.output import unlinked_size


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "submission.csv").write_bytes(b"id,x\n")
    assert read_output(tmp_path, "sub/submission.csv", 5) == b"id,x\n"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("link", "symbolic links"),
        ("fifo", "regular"),
        ("folder", "regular"),
        ("inner/secret", "Not a directory"),
        ("large", "larger than 10 bytes"),
        ("missing", "No such file"),
        ("../secret", "not a name inside"),
        ("/etc/hostname", "not a name inside"),
        ("", "not a name inside"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("42")
    work = tmp_path / "work"
    (work / "folder").mkdir(parents=True)
    (work / "link").symlink_to(tmp_path / "outside" / "secret")
    (work / "inner").symlink_to(tmp_path / "outside")
    (work / "large").write_bytes(bytes(11))
    os.mkfifo(work / "fifo")
    with pytest.raises(RefusedOutputError, match=reason):
        read_output(work, name, 10)


def test_open_files_without_a_name_are_counted_once(tmp_path: Path) -> None:
    me, gone = Path("/proc/self"), Path("/proc/0")
    before = unlinked_size([me, gone], tmp_path)
    with (tmp_path / "x").open("wb") as file, (tmp_path / "x").open("rb"):
        file.write(bytes(8192))
        file.flush()
        assert unlinked_size([me], tmp_path) == before
        (tmp_path / "x").unlink()
        assert unlinked_size([me, gone], tmp_path) == before + 8192
