"""`written/` holds what lm-eval wrote; see test_results.py."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gradeflow import adapter as adapters
from gradeflow.errors import EvaluationError
from gradeflow.evaluation import feedback, results
from gradeflow.evaluation.feedback import BenchmarkEvaluator

WRITTEN = Path(__file__).parent / "written"
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@dataclass(frozen=True)
class Workspace:
    workspace_path: Path


@dataclass(frozen=True)
class Ended:
    status: int
    output: str


@dataclass(frozen=True)
class StandInRun:
    """Stands in for the container: leaves the results that it is given, then ends."""

    status: int = 0
    leave: Callable[[Path], object] = lambda workspace: None
    output: str = "loading\n" * 300 + "the end"

    def __call__(self, workspace: Path, tasks: Sequence[str], limit: int | None) -> Ended:
        self.leave(workspace)
        return Ended(self.status, self.output)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """One with a whole adapter."""
    folder = tmp_path / "output"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    halves = {f"{LAYER}.lora_A.weight": np.ones((2, 8), "f4"), f"{LAYER}.lora_B.weight": np.ones((8, 2), "f4")}
    save_file(halves, folder / "adapter_model.safetensors")
    return Workspace(tmp_path)


def leave(*tasks: str, digest: str = "") -> Callable[[Path], object]:
    """Leaves these tasks' results as a worker does, each in a folder of its own; `digest` is another adapter's."""

    def write(workspace: Path) -> None:
        for task in tasks:
            own = workspace / "benchmark_results" / task
            shutil.copytree(WRITTEN / "0.4.13", own)
            (file,) = own.glob("results_*.json")
            tree = json.loads(file.read_text())
            tree["results"] = {name: row for name, row in tree["results"].items() if task in {name, "world"}}
            tree["group_subtasks"] = tree["group_subtasks"] if task == "world" else {}
            adapter = digest or adapters.digest(workspace / "output")
            results.write(own, tree, base="example/tiny", base_digest="b", adapter=adapter)

    return write


def leave_as_lm_eval(workspace: Path) -> None:
    """lm-eval's own files, which do not know whose adapter it was."""
    shutil.copytree(WRITTEN / "0.4.9.1", folder := workspace / "benchmark_results")
    (file,) = folder.glob("results_*.json")
    tree = json.loads(file.read_text())
    tree["config"]["model_args"] += ",lora_local_path=/workspace/output"
    file.write_text(json.dumps(tree | {"date": 4e9}))


def evaluate(workspace: Workspace, run: StandInRun, *tasks: str) -> feedback.Feedback:
    return BenchmarkEvaluator(tasks=tasks or ["cities", "sums"], run=run).evaluate(implementation=workspace)


def test_an_evaluation_that_is_whole_has_the_originals_words(workspace: Workspace) -> None:
    run = StandInRun(leave=leave("cities", "sums"))
    assert evaluate(workspace, run) == feedback.Feedback(
        execution="Benchmark completed: 2/2 tasks evaluated",
        return_checking="Benchmark Results:\n  cities: 75.00%\n  sums: 0.00%",
        code="Average Score: 37.50",
        final_decision=True,
        raw_execution=run.output,
        source_feedback={"BenchmarkEvaluator": True},
    )


def test_lm_evals_own_files_are_enough(workspace: Workspace) -> None:
    found = evaluate(workspace, StandInRun(leave=leave_as_lm_eval), "sums", "world")
    assert found.return_checking == "Benchmark Results:\n  sums: 0.00%\n  world: 33.33%"
    assert found


def test_the_originals_call_is_taken_as_it_is(workspace: Workspace) -> None:
    calls = []

    def run(folder: Path, tasks: Sequence[str], limit: int | None) -> Ended:
        calls.append((folder, list(tasks), limit))
        return StandInRun(leave=leave("sums"))(folder, tasks, limit)

    found = feedback.FTBenchmarkEvaluator("scenario", ["sums"], 10, run=run).evaluate(
        target_task=None, implementation=workspace, gt_implementation=None, queried_knowledge=None
    )
    assert found.final_decision
    assert calls == [(workspace.workspace_path, ["sums"], 10)]


def test_a_harness_that_fails_is_told_with_its_last_words(workspace: Workspace) -> None:
    found = evaluate(workspace, StandInRun(status=137, leave=leave("cities", "sums")))
    assert found.execution == "Benchmark execution failed (exit_code=137)"
    assert found.return_checking == "lm-evaluation-harness error"
    assert found.code == StandInRun.output[-2000:]
    assert found.raw_execution == StandInRun.output
    assert not found.final_decision


def test_a_timeout_says_which_tasks_are_done(workspace: Workspace) -> None:
    found = evaluate(workspace, StandInRun(status=124, leave=leave("cities")), "sums", "cities", "world")
    assert found.execution == "Benchmark execution failed (exit_code=124)"
    assert found.return_checking == (
        "lm-evaluation-harness ran out of time; done: cities; without results: sums, world"
    )
    assert not found


@pytest.mark.parametrize(
    ("left", "execution", "said"),
    [
        (leave(), "Benchmark results unusable: 0/2 tasks evaluated", "no results of lm-eval"),
        (
            leave("cities"),
            "Benchmark results unusable: 1/2 tasks evaluated",
            "no results of task sums; there are cities",
        ),
        (leave("cities", "sums", digest="other"), "Benchmark results unusable: 0/2 tasks evaluated", "not of adapter"),
        (
            lambda workspace: shutil.copytree(WRITTEN / "0.4.13", workspace / "benchmark_results"),
            "Benchmark results unusable: 0/2 tasks evaluated",
            "these are results of the base alone, not of adapter",
        ),
    ],
)
def test_results_that_are_missing_or_anothers_are_no_zero(
    workspace: Workspace, left: Callable[[Path], object], execution: str, said: str
) -> None:
    found = evaluate(workspace, StandInRun(leave=left))
    assert found.execution == execution
    assert said in found.return_checking
    assert "Average Score" not in found.code
    assert not found.final_decision
    assert found.source_feedback == {"BenchmarkEvaluator": False}


def test_results_of_an_earlier_run_are_not_this_ones(workspace: Workspace) -> None:
    leave_as_lm_eval(workspace.workspace_path)
    (file,) = (workspace.workspace_path / "benchmark_results").glob("results_*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"date": 1.7e9}))
    found = evaluate(workspace, StandInRun(), "sums")
    assert "left by an earlier evaluation; this one has written no results" in found.return_checking
    assert not found


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (shutil.rmtree, "Output directory not found"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "No adapter weight file (*.safetensors or"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json not found"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "Invalid config JSON: "),
    ],
)
def test_an_invalid_adapter_is_told_before_anything_runs(
    workspace: Workspace, spoil: Callable[[Path], object], reason: str
) -> None:
    spoil(workspace.workspace_path / "output")
    found = evaluate(workspace, StandInRun(leave=leave("cities", "sums")))
    assert found.execution.startswith("Adapter validation failed: ")
    assert reason in found.execution
    assert not (workspace.workspace_path / "benchmark_results").exists()
    assert not found.final_decision


def test_a_metric_that_is_no_share_is_not_shown_as_one(workspace: Workspace) -> None:
    def left(folder: Path) -> None:
        leave_as_lm_eval(folder)
        (file,) = (folder / "benchmark_results").glob("results_*.json")
        tree = json.loads(file.read_text())
        tree["results"]["sums"] = {"alias": "sums", "perplexity,strict-match": 0.93}
        file.write_text(json.dumps(tree))

    found = evaluate(workspace, StandInRun(leave=left), "sums")
    assert found.return_checking == "Benchmark Results:\n  sums: 0.93 (perplexity,strict-match)"
    assert found.code == "Average Score: n/a"


def test_without_tasks_or_a_workspace_there_is_nothing_to_evaluate() -> None:
    with pytest.raises(EvaluationError, match="no tasks to evaluate"):
        BenchmarkEvaluator(run=StandInRun())
    with pytest.raises(EvaluationError, match="`implementation` is no workspace"):
        BenchmarkEvaluator(tasks=["sums"], run=StandInRun()).evaluate()
