"""Bad tasks are named in a file, and nobody is given them."""

import json
from pathlib import Path

import pytest

from gradeflow import params
from gradeflow.benchmarks import quarantine
from gradeflow.benchmarks.catalogue import Benchmark
from gradeflow.errors import DataError, SettingsError
from gradeflow.grpo import modeling

SHIPPED = Path(__file__).parents[2] / "params.yaml"


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "quarantine.jsonl"
    quarantine.update(str(path), "engineeringbench", ["builtin-blending-1", "b"], {"builtin-blending-1": ["gold: bad"]})
    return str(path)


def opened(file: str, **more: str) -> Benchmark:
    settings = params.load(SHIPPED, {"solve.quarantine": file, "solve.benchmark": "engineering", **more})
    return Benchmark(settings.solve, settings.sandbox, settings.grade)


def test_each_task_is_a_line_with_its_reasons(file: str) -> None:
    (line,) = Path(file).read_text().splitlines()
    assert json.loads(line) == {"benchmark": "engineering", "task": "builtin-blending-1", "reasons": ["gold: bad"]}
    assert quarantine.read(file, "engineeringbench") == {"builtin-blending-1": ["gold: bad"]}
    assert quarantine.read(file, "science") == {}


def test_an_audit_changes_what_it_has_looked_at_and_nothing_else(file: str) -> None:
    quarantine.update(file, "science", ["s"], {"s": ["leak: x"]})
    quarantine.update(file, "engineering", ["a"], {"a": ["gold: x"]})
    assert set(quarantine.read(file, "engineering")) == {"a", "builtin-blending-1"}
    quarantine.update(file, "engineering", ["builtin-blending-1", "s"], {})
    assert set(quarantine.read(file, "engineering")) == {"a"}
    assert set(quarantine.read(file, "science")) == {"s"}


def test_without_anything_bad_there_is_no_file(tmp_path: Path) -> None:
    quarantine.update(str(tmp_path / "none.jsonl"), "engineering", ["a"], {})
    quarantine.update("", "engineering", ["a"], {"a": ["gold: bad"]})
    assert list(tmp_path.iterdir()) == []
    assert quarantine.read("", "engineering") == quarantine.read(str(tmp_path / "none.jsonl"), "engineering") == {}


@pytest.mark.parametrize(
    "line", ['{"task": "a", "reasons": ["x"]}', '{"benchmark": "mle", "task": "a", "reasons": "x"}', "{}", "[]"]
)
def test_a_line_that_is_none_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_text('{"benchmark": "mle", "task": "a", "reasons": ["x"]}\n' + line + "\n")
    if line.endswith('"x"}'):
        assert quarantine.read(str(path), "mle") == {"a": "x"}
        return
    with pytest.raises(DataError, match=r"quarantine\.jsonl, line 2: expected"):
        quarantine.read(str(path), "mle")


def test_all_tasks_are_all_but_those(file: str, tmp_path: Path) -> None:
    with opened(file) as benchmark:
        assert "builtin-blending-1" in benchmark.tasks()
        assert "builtin-blending-1" not in benchmark.chosen("", None)
        assert len(benchmark.chosen("", None)) == len(benchmark.tasks()) - 1
        listing = tmp_path / "tasks.txt"
        listing.write_text("builtin-blending-1\nbuiltin-blending-2\n")
        assert benchmark.chosen("", listing) == ("builtin-blending-2",)
    with opened("") as benchmark:
        assert benchmark.chosen("", None) == benchmark.tasks()


def test_one_that_is_asked_for_by_name_is_refused_with_why(file: str) -> None:
    with (
        opened(file) as benchmark,
        pytest.raises(SettingsError, match=r"'builtin-blending-1', which is in quarantine: gold: bad\. .* delete"),
    ):
        benchmark.chosen("builtin-blending,builtin-blending-1", None)


def test_training_skips_them(file: str) -> None:
    given = {"solve.quarantine": file, "solve.benchmark": "engineering", "solve.task": "", "train.tasks.limit": "6"}
    settings = params.load(SHIPPED, given)
    with Benchmark(settings.solve, settings.sandbox, settings.grade) as benchmark:
        found, _ = modeling.tasks(settings, benchmark)
    assert len(found) == 6
    assert "builtin-blending-1" not in {one.id for one in found}
