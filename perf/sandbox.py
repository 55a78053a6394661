"""How long until model-written code runs, and how many runs a second, beside `subprocess.run([python, "-c", ...])`.

    python perf/sandbox.py

The time is from the call to the first line after the imports, which reads the same clock inside.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gradeflow import params
from gradeflow.sandbox import Sandbox

PARAMS = Path(__file__).parents[1] / "params.yaml"
PLAIN = "from time import monotonic_ns\nnow = monotonic_ns()\n"
PANDAS = f"import pandas\n{PLAIN}"
MEMORY = """
import pandas, harness
sizes = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
harness.result([int(sizes[name].split()[0]) / 1024 for name in ("Rss", "Private_Dirty")])
"""
Reach = Callable[[], Awaitable[int]]


def in_sandbox(sandbox: Sandbox, code: str, **run: Any) -> Reach:
    async def reach() -> int:
        execution = await sandbox.run(f"{code}import harness\nharness.result(now)", **run)
        if execution.status != "ok":
            raise SystemExit(f"{execution.error}\n{execution.stderr}")
        return execution.value

    return reach


def in_subprocess(code: str) -> Reach:
    def run() -> int:
        return int(subprocess.run([sys.executable, "-c", f"{code}print(now)"], check=True, capture_output=True).stdout)

    return lambda: asyncio.to_thread(run)


async def waits(reach: Reach, count: int, pause_s: float) -> list[float]:
    """Milliseconds from call to first line."""
    found = []
    for _ in range(count + 1):
        await asyncio.sleep(pause_s)
        called = time.monotonic_ns()
        found.append((await reach() - called) / 1e6)
    return found[1:]


async def runs_a_second(reach: Reach, count: int, parallel: int) -> float:
    slots = asyncio.Semaphore(parallel)

    async def one() -> None:
        async with slots:
            await reach()

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(count)))
    return count / (time.monotonic() - began)


def row(name: str, ours: list[float], theirs: list[float]) -> None:
    figures = [
        quantiles[at] for each in (ours, theirs) for quantiles in [statistics.quantiles(each, n=20)] for at in (9, 18)
    ]
    print(f"{name:38}" + "".join(f"{figure:9.1f}" for figure in figures) + f"{figures[0] / figures[2]:9.3f}")


async def measure(settings: params.Sandbox, count: int, folder: Path) -> None:
    sandbox = Sandbox(settings)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, isolation {settings.isolation}\n")
    print(f"{'':38}{'sandbox':>18}{'subprocess':>18}{'ratio':>9}")
    print(f"{'ms from call to first line':38}{'p50':>9}{'p95':>9}{'p50':>9}{'p95':>9}{'p50':>9}")
    try:
        plain = await waits(in_subprocess(PLAIN), count, 0)
        pandas = await waits(in_subprocess(PANDAS), count // 4, 0)
        for name, reach, pause_s, beside in (
            ("plain", in_sandbox(sandbox, PLAIN), 0.1, plain),
            ("plain, one after the other", in_sandbox(sandbox, PLAIN), 0, plain),
            ("pandas", in_sandbox(sandbox, PANDAS, packages=True), 1.0, pandas),
            ("pandas, in a working folder", in_sandbox(sandbox, PANDAS, packages=True, folder=folder), 1.0, pandas),
            ("pandas, one after the other", in_sandbox(sandbox, PANDAS, packages=True), 0, pandas),
        ):
            row(name, await waits(reach, len(beside), pause_s), beside)
        ours, theirs = [
            await runs_a_second(reach, 5 * count, settings.parallel)
            for reach in (in_sandbox(sandbox, PLAIN), in_subprocess(PLAIN))
        ]
        print(
            f"\n{settings.parallel} at once: {ours:.0f} runs a second against {theirs:.0f}, ratio {ours / theirs:.2f}"
        )
        resident, private = (await sandbox.run(MEMORY, packages=True)).value
        print(f"an interpreter that waits with pandas: {resident:.0f} MB resident, {private:.0f} MB of its own")
    finally:
        await sandbox.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=80, help="plain runs in a row; pandas has a quarter")
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(params.load(PARAMS).sandbox, count, Path(folder)))


if __name__ == "__main__":
    main()
