import errno
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from gradeflow.tracking.outbox import ENTRIES, Busy, Outbox


def sent(outbox: Outbox) -> list[Any]:
    """Everything that waits, taken as a sender takes it."""
    found = []
    while part := outbox.take():
        found += part.entries()
        part.remove()
    return found


def test_entries_come_out_in_the_order_in_which_they_came_in(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "run")
    outbox.add({"number": 1})
    outbox.add({"number": 2})
    first = outbox.take()
    outbox.add({"number": 3})
    assert first
    assert list(first.entries()) == [{"number": 1}, {"number": 2}]
    first.remove()
    assert sent(outbox) == [{"number": 3}]
    assert outbox.is_empty()
    outbox.close()
    assert not (tmp_path / "run").exists()


def test_a_part_that_was_not_removed_is_taken_again_before_later_ones(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "run")
    outbox.add({"number": 1})
    assert outbox.take()
    outbox.add({"number": 2})
    outbox.close()
    again = Outbox(tmp_path / "run")
    again.add({"number": 3})
    assert sent(again) == [{"number": 1}, {"number": 2}, {"number": 3}]


def test_files_lie_beside_the_entry_that_names_them(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "run")
    outbox.add_file(lambda own: (own / "a.txt").write_text("a"), {"folder": "notes"})
    part = outbox.take()
    assert part
    (entry,) = part.entries()
    assert entry["folder"] == "notes"
    assert (part.folder / entry["file"] / "a.txt").read_text() == "a"


@pytest.mark.parametrize("kept", [1, 8, 15])
def test_a_line_that_was_cut_off_is_left_out_and_harms_no_other(tmp_path: Path, kept: int) -> None:
    outbox = Outbox(tmp_path / "run")
    outbox.add({"number": 1})
    outbox.close()
    (entries,) = (tmp_path / "run").rglob(ENTRIES)
    with entries.open("ab") as file:
        file.write(b'{"number": 222}'[:kept])
    again = Outbox(tmp_path / "run")
    again.add({"number": 3})
    assert sent(again) == [{"number": 1}, {"number": 3}]


def test_a_killed_process_leaves_what_it_added_and_no_lock(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from gradeflow.tracking.outbox import Outbox
outbox = Outbox(Path({str(tmp_path / "run")!r}))
for number in range(1000):
    outbox.add({{"number": number}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert sent(Outbox(tmp_path / "run")) == [{"number": number} for number in range(1000)]


def test_one_at_a_time_has_an_outbox(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "run")
    outbox.add({"number": 1})
    with pytest.raises(Busy, match="run run: something else is writing to it"):
        Outbox(tmp_path / "run")
    code = (
        f"from pathlib import Path; from gradeflow.tracking.outbox import Outbox; Outbox(Path({str(outbox.folder)!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "Busy" in ended.stderr
    outbox.close()
    assert sent(Outbox(tmp_path / "run")) == [{"number": 1}]


def test_a_child_that_outlives_its_parent_does_not_hold_the_outbox(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "run")
    outbox.add({"number": 1})
    if (child := os.fork()) == 0:
        signal.pause()
    try:
        outbox.close()
        assert sent(Outbox(tmp_path / "run")) == [{"number": 1}]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_full_disk_costs_the_entry_that_found_no_room_and_no_other(small_disk: Path) -> None:
    outbox = Outbox(small_disk / "run")
    numbers = itertools.count()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        deque(outbox.add({"number": number, "text": "x" * 5000}) for number in numbers)
    failed = next(numbers) - 1
    part = outbox.take()
    assert part
    assert [entry["number"] for entry in part.entries()] == list(range(failed))


def test_what_is_refused_is_kept_with_the_reason(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "run")
    outbox.add({"tags": {"a": "b"}})
    part = outbox.take()
    assert part
    part.refuse({"tags": {"a": "b"}}, "not that one")
    part.remove()
    outbox.close()
    (line,) = (tmp_path / "run" / "refused.jsonl").read_text().splitlines()
    assert json.loads(line) == {"why": "not that one", "tags": {"a": "b"}}
