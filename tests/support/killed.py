"""Commands in processes of their own, which may be killed at any moment; what they import is imported once."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from gradeflow import __main__ as cli

KILLED = -signal.SIGKILL
IMPORTS = ("datasets", "matplotlib.figure", "mlflow", "mlflow.store.tracking.sqlalchemy_store", "openai", "peft", "trl")
PATIENCE_S = 300.0


def run(folder: Path, words: Sequence[str], kill_after_s: float | None = None) -> int:
    """The exit status of the command in `folder`, or KILLED. What it says is added to `folder`/said.txt."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.killed", *IMPORTS])
    process = context.Process(target=_run, args=(folder, list(words)))
    process.start()
    process.join(PATIENCE_S if kill_after_s is None else kill_after_s)
    process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(folder: Path, words: list[str]) -> None:
    import torch

    torch.set_num_threads(1)  # with several, MKL's sums may differ in their last bits from one run to the next
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "GRADEFLOW_"))]:
        del os.environ[name]  # other tests' stores
    os.chdir(folder)
    with (folder / "said.txt").open("a", buffering=1) as said:
        sys.stdout = sys.stderr = said
        cli.main(words)
