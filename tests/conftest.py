"""What more than one test file needs: a real MLflow store in a temporary folder, and a disk that is soon full."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradeflow import params, tracking
from support import evaluation

SETTINGS = params.Tracking(uri="", experiment="gradeflow-tests")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With several threads MKL's sums may differ in their last bits from one run to the next."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def _store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def store(_store_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a connected sqlite store; making one takes seconds, so all tests share it."""
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "GRADEFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(_store_folder)
    tracking.connect(SETTINGS, _store_folder)
    return _store_folder


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base, three adapters, and two tasks for lm-eval: what `support.evaluation.make` makes."""
    folder = tmp_path_factory.mktemp("world")
    evaluation.make(folder)
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that holds 1 MiB and not a byte more. Only root may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("a small disk needs the program mount")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
