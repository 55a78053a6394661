import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from gradeflow.grpo import checkpoint


def write(folder: Path, number: int, content: bytes = b"weights") -> Path:
    with checkpoint.writing(folder, number, {"step": number}) as part:
        (part / f"checkpoint-{number}" / "optimizer.pt").write_bytes(content)
        (part / f"checkpoint-{number}" / "adapter.safetensors").write_bytes(content)
    return folder / f"checkpoint-{number}"


def test_the_newest_is_found_with_its_state(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for number in (2, 10, 9):
        write(tmp_path, number)
    found = checkpoint.newest(tmp_path)
    assert found == tmp_path / "checkpoint-10"
    assert checkpoint.state_of(found) == {"step": 10}


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "no manifest", "half a manifest"])
def test_one_that_is_not_whole_is_skipped_and_removed(damage: str, tmp_path: Path) -> None:
    write(tmp_path, 1)
    torn = write(tmp_path, 2)
    file, manifest = torn / "optimizer.pt", torn / checkpoint.MANIFEST
    if damage == "cut":
        file.write_bytes(b"weig")
    elif damage == "changed":
        file.write_bytes(b"weightz")
    elif damage == "missing":
        file.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text()[:-5])
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-1"
    assert not torn.exists()


def test_what_is_cut_off_while_it_is_written_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with suppress(KeyboardInterrupt), checkpoint.writing(tmp_path, 2, {}) as part:
        (part / "checkpoint-2" / "optimizer.pt").write_bytes(b"half")
        raise KeyboardInterrupt
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-1"
    assert write(tmp_path, 2) == checkpoint.newest(tmp_path)


def test_a_step_that_is_done_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1, b"old")
    assert (write(tmp_path, 1, b"new") / "optimizer.pt").read_bytes() == b"new"


def test_all_but_the_newest_go(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        write(tmp_path, number)
    checkpoint.keep(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-10"}
    shutil.rmtree(tmp_path / "checkpoint-10")
    checkpoint.keep(tmp_path, 2)
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-2"
