from pathlib import Path

import pytest
import torch

from gradeflow import disk


def test_what_torch_cannot_say_of_a_full_disk_is_said(small_disk: Path) -> None:
    folder = small_disk / "runs" / "not there yet"
    with pytest.raises(OSError, match="No space left on device") as caught, disk.watched(folder):
        torch.save(torch.zeros(1 << 20), small_disk / "weights.pt")
    assert caught.value.filename == str(folder)
    assert disk.said(caught.value) == "No space left on device; free some space"


def test_what_is_wrong_where_there_is_room_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="something else"), disk.watched(tmp_path):
        raise RuntimeError("something else")


def test_an_error_that_names_its_file_is_told_of_that_file(small_disk: Path) -> None:
    (small_disk / "fill").write_bytes(bytes(1 << 20))
    with pytest.raises(FileNotFoundError) as caught, disk.watched(small_disk):
        (small_disk / "nowhere").read_text()
    assert caught.value.filename == str(small_disk / "nowhere")
