import os
from pathlib import Path

import pytest

from gradeflow.sandbox import RefusedOutputError, read_output


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
