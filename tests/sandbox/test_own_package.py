"""Installed among other packages, Gradeflow is not among those that sandboxed code can import: it has graders."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradeflow.sandbox import bubblewrap, landlock
from support.sandboxes import execute, without_landlock

LAYERS = pytest.mark.parametrize("isolation", ["auto", pytest.param("landlock", marks=without_landlock)])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages with Gradeflow in it, as pip would install it."""
    folder = tmp_path / "site-packages"
    for package in ("gradeflow/benchmarks", "other"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("answer = 42\n")
    (folder / "gradeflow" / "__init__.py").write_text("")
    (folder / "single.py").write_text("answer = 43\n")
    monkeypatch.setattr(bubblewrap, "packages", lambda: (str(folder),))
    monkeypatch.setattr(bubblewrap, "OWN", str(folder / "gradeflow"))
    bubblewrap.shown.cache_clear()
    yield folder
    bubblewrap.shown.cache_clear()


@LAYERS
def test_other_packages_can_be_imported(site: Path, isolation: str) -> None:
    code = "import harness, other, single\nharness.result([other.answer, single.answer])"
    found = execute(code, isolation=isolation, packages=True)
    assert (found.status, found.value) == ("ok", [42, 43])


@LAYERS
@pytest.mark.parametrize(
    "code",
    [
        "from gradeflow.benchmarks import answer",
        "import harness\nopen(harness.inputs['site'] + '/gradeflow/benchmarks/__init__.py').read()",
        "import harness\nopen(harness.inputs['site'] + '/gradeflow/new', 'w')",
    ],
)
def test_gradeflow_itself_cannot(site: Path, isolation: str, code: str) -> None:
    assert execute(code, isolation=isolation, packages=True, inputs={"site": str(site)}).status == "failed"


@LAYERS
def test_what_is_named_in_it_can_be_read_all_the_same(site: Path, isolation: str) -> None:
    """A grader's sandbox is given stand-ins that lie in the package."""
    file = site / "gradeflow" / "benchmarks" / "__init__.py"
    code = "import harness\nharness.result(open(harness.inputs['file']).read())"
    found = execute(code, isolation=isolation, packages=True, inputs={"file": str(file)}, readable=[file.parent])
    assert (found.status, found.value) == ("ok", "answer = 42\n")


def test_where_it_is_not_installed_nothing_is_hidden() -> None:
    assert bubblewrap.hidden(["/usr/lib"]) == []
    assert list(landlock.around("/usr/lib", "/home/someone/gradeflow")) == ["/usr/lib"]
