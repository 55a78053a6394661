import asyncio
import tempfile
from pathlib import Path

import psutil
import pytest

from gradeflow import params
from gradeflow.sandbox import Sandbox

SETTINGS = params.Sandbox(
    isolation="auto", wall_s=20.0, cpu_s=10, memory_mb=256, processes=16, disk_mb=4, output_kb=16, parallel=4
)
KINDS = (
    "print(1)",
    "1 / 0",
    "open('left', 'w').write('x')",
    "import subprocess\nsubprocess.Popen(['sleep', '60'], start_new_session=True)",
    "import os\nos._exit(3)",
)


def held() -> dict[str, int]:
    """What this process holds of the machine."""
    this = psutil.Process()
    return {
        "processes": len(this.children(recursive=True)),
        "descriptors": this.num_fds(),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "files": len(list(Path(tempfile.gettempdir()).iterdir())),
    }


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_runs_leave_nothing_and_take_no_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are counted in a temporary folder of this test's own; one run in 50 works in a folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "work").mkdir()

    async def one(sandbox: Sandbox, number: int) -> None:
        folder = tmp_path / "work" if number % 50 == 0 else None
        execution = await sandbox.run(KINDS[number % len(KINDS)], folder=folder)
        assert execution.status == ("failed" if number % len(KINDS) in {1, 4} else "ok"), execution

    async def soak() -> list[int]:
        sandbox, sizes = Sandbox(SETTINGS), []
        try:
            for thousand in range(10):
                for hundred in range(10):
                    await asyncio.gather(*(one(sandbox, 100 * hundred + number) for number in range(100)))
                sizes.append(psutil.Process().memory_info().rss >> 10)
                print(f"{thousand + 1},000 runs: {sizes[-1]} KiB, {held()}", flush=True)
        finally:
            await sandbox.close()
        return sizes

    before = held()
    sizes = asyncio.run(soak())
    assert held() == before
    assert sizes[-1] - sizes[0] < 4096, sizes
