import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradeflow import params, promote, registry, tracking
from gradeflow.params import Params
from support.evaluated import SHIPPED, World

pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]
LOAD = "import mlflow, sys; print(mlflow.artifacts.download_artifacts('models:/moving@champion'))"


def settings(folder: Path) -> Params:
    return params.load(SHIPPED, {"promote.model": "moving", "tracking.uri": f"sqlite:///{folder / 'mlflow.db'}"})


@pytest.mark.parametrize("keeps_the_old", [False, True])
def test_a_project_that_is_moved_or_copied_has_its_files_where_it_is(
    tmp_path: Path,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    keeps_the_old: bool,
) -> None:
    before, after = tmp_path / "be fore#", tmp_path / "after it"
    before.mkdir()
    monkeypatch.chdir(before)
    World(settings(before), tmp_path / "adapters").evaluation(30, (1, 80))
    promote.main(settings(before))
    assert "came from" not in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    shutil.copytree(before, after)
    if not keeps_the_old:
        shutil.rmtree(before)
    monkeypatch.chdir(after)
    capsys.readouterr()
    tracking.connect(settings(after).tracking, Path())
    assert f"came from {before}" in capsys.readouterr().err
    version = registry.get_alias("moving", "champion")
    assert version
    assert not registry.changed_files(version, registry.download(version, tmp_path / "got"))
    uri = {"MLFLOW_TRACKING_URI": settings(after).tracking.uri, "PATH": ""}
    loaded = subprocess.run([sys.executable, "-c", LOAD], env=uri, capture_output=True, text=True, check=True)
    assert Path(loaded.stdout.split("\n")[-2]).is_relative_to(after)
    with tracking.start_run("evaluate", {}) as run:
        run.log_text("new", "new.txt")
    assert list(after.rglob("new.txt"))
    assert not list(before.rglob("new.txt"))
    tracking.connect(settings(after).tracking, Path())
    assert "came from" not in capsys.readouterr().err


def test_artifacts_that_were_put_elsewhere_stay_there(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store may lie in one project and be used from another."""
    owner, other = tmp_path / "owner", tmp_path / "other"
    for folder in (owner, other):
        folder.mkdir()
    monkeypatch.chdir(other)
    given = settings(owner).tracking
    tracking.connect(given, other)
    with tracking.start_run("evaluate", {}) as run:
        run.log_text("here", "here.txt")
    monkeypatch.chdir(owner)
    tracking.connect(given, owner)
    assert "came from" not in capsys.readouterr().err
    assert tracking.read_text(run.id, "here.txt") == "here"
    other.rename(tmp_path / "unmounted")
    tracking.connect(given, owner)
    (tmp_path / "unmounted").rename(other)
    assert tracking.read_text(run.id, "here.txt") == "here"
