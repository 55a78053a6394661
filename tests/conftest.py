"""What more than one test file needs: a real MLflow store in a temporary folder."""

import os
from pathlib import Path

import pytest

from gradeflow import params, tracking

SETTINGS = params.Tracking(uri="", experiment="gradeflow-tests")


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
