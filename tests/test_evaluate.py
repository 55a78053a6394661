import json
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest

from gradeflow import adapter, evaluate, lineage, models, registry, tracking
from gradeflow.errors import (
    AdapterError,
    EvaluationError,
    GradeflowError,
    SettingsError,
    TooManyFaults,
    TrackingError,
)
from gradeflow.evaluation import process, workflow
from gradeflow.evaluation.plan import Plan
from gradeflow.params import Params
from gradeflow.types import Sample
from support import evaluation, tiny, worker_stand_in


@pytest.fixture
def settings(tiny_world: Path) -> Params:
    return tiny.settings(
        tiny_world,
        evaluate__tasks=f"[sums, {tiny_world}/choices.yaml]",
        evaluate__include=f"[{tiny_world}]",
        evaluate__batch_size=4,
    )


def test_every_figure_of_an_evaluation_is_in_one_mlflow_run(
    tiny_world: Path, settings: Params, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tiny_world / "adapter-0", tiny_world / "adapter-1"]
    evaluate.main(settings, adapter=",".join(["base", *map(str, folders)]))
    run = tracking.find_stage("evaluate")
    assert run is not None
    names = [adapter.digest(folder)[:12] for folder in folders]
    figures, tags = tracking.read_metrics(run), tracking.read_tags(run)
    for name in ["base", *names]:
        assert {f"{name}/sums/exact_match", f"{name}/choices/acc", f"{name}/choices/acc_stderr"} <= figures.keys()
    assert (tags["sums/n"], tags["choices/metric"], tags["lm_eval_version"]) == ("12", "acc,none", "0.4.13")
    results = json.loads(tracking.read_text(run, "results.json"))
    assert list(results["adapters"]) == names
    for name in names:
        told = results["adapters"][name]["tasks"]["choices"]
        assert told["value"] == figures[f"{name}/choices/acc"]
        kept = json.loads(tracking.read_text(run, f"tasks/{name}/choices/results.json"))
        assert kept["gradeflow"]["adapter"] == results["adapters"][name]["digest"]
        table = mlflow.artifacts.load_dict(f"runs:/{run}/differences/{name}_choices.json")
        right = [dict(zip(table["columns"], row, strict=True))["right"] for row in table["data"]]
        gained = right.count("adapter") - right.count("base")
        assert gained == round(12 * (told["value"] - results["base"]["tasks"]["choices"]["value"]))
    evaluate.main(settings, adapter=",".join(map(str, folders)))
    assert f"reused run {run}" in capsys.readouterr().out


def test_an_adapter_is_found_by_folder_run_and_registry(
    tiny_world: Path, settings: Params, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its evaluation is below its training run; a stand-in writes the results."""
    folder = tiny_world / "adapter-2"
    digest = adapter.digest(folder)
    tracking.connect(settings.tracking, Path())
    with tracking.start_run("train_grpo", {}) as training:
        training.log_artifacts(folder, "adapter")
    tags = {lineage.TRAINING_RUN: training.id}
    version = registry.register(folder, "of-evaluate", digest=digest, run_id=training.id, step=3, tags=tags)
    registry.set_alias(version, "champion")
    assert evaluate.find_adapter(str(folder)) == evaluate.Found(folder)
    references = ["models:/of-evaluate@champion", "models:/of-evaluate/1", f"runs:/{training.id}"]
    for given in (*references, f"runs:/{training.id}/adapter", training.id, ""):
        found = evaluate.find_adapter(given)
        assert (adapter.digest(found.folder), found.training_run) == (digest, training.id)
    monkeypatch.setattr(process, "run", lambda plan: worker_stand_in.write(plan, "sums"))
    for limit, given in enumerate(references, start=1):
        limited = settings.model_copy(update={"evaluate": settings.evaluate.model_copy(update={"limit": limit})})
        evaluate.main(limited, adapter=given, tasks="sums")
        run = tracking.find_stage("evaluate")
        assert run is not None
        tags = tracking.read_tags(run)
        assert (tags[tracking.PARENT], tags[registry.ADAPTER_DIGEST]) == (training.id, digest)
        assert tracking.read_metrics(run)["sums/acc"] == 0.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("models:/of-nobody@champion", "no such version in the registry"),
        ("models:/of-nobody/7", "no such version in the registry"),
        ("models:/of-nobody", "names no registered adapter; expected name@alias or name/3"),
        ("runs:/0123456789abcdef0123456789abcdef", "0123456789abcdef0123456789abcdef"),
    ],
)
def test_an_adapter_that_is_not_there_is_told_with_its_name(
    given: str, said: str, settings: Params, store: Path
) -> None:
    tracking.connect(settings.tracking, Path())
    with pytest.raises(GradeflowError, match=said):
        evaluate.find_adapter(given)


def test_the_models_view_compares_adapters_by_what_was_measured(
    tiny_world: Path, settings: Params, store: Path
) -> None:
    for number in (0, 1):
        evaluate.main(settings, adapter=str(tiny_world / f"adapter-{number}"), tasks="sums", quick=True)
    run = tracking.find_stage("evaluate")
    assert run is not None
    assert tracking.read_tags(run)["sums/n"] == "10"
    experiment = mlflow.get_run(run).info.experiment_id
    found = mlflow.search_logged_models([experiment], output_format="list")
    named = {model.name: {metric.key: metric.value for metric in model.metrics or []} for model in found}
    for number in (0, 1):
        assert "sums/exact_match" in named[f"adapter-{adapter.digest(tiny_world / f'adapter-{number}')[:12]}"]
    (used,) = mlflow.get_run(run).inputs.model_inputs
    assert used.model_id in {model.model_id for model in found}


@pytest.mark.slow
def test_saved_replies_are_scored_again_in_a_run_of_their_own_without_the_base(
    tiny_world: Path, settings: Params, store: Path, tmp_path: Path
) -> None:
    evaluate.main(settings, adapter=str(tiny_world / "adapter-0"))
    first = tracking.find_stage("evaluate")
    assert first is not None
    gone = tiny.settings(
        tiny_world, base__model=tmp_path / "gone", evaluate__include=f"[{tiny_world}]", evaluate__limit=3
    )
    evaluate.main(gone, rescore=f"runs:/{first}")
    again = tracking.find_stage("evaluate")
    assert again not in {None, first}
    assert tracking.read_tags(again)["gradeflow.rescored"] == first
    assert tracking.read_metrics(again) == tracking.read_metrics(first)
    assert tracking.read_text(again, "results.json") == tracking.read_text(first, "results.json")
    name = adapter.digest(tiny_world / "adapter-0")[:12]
    tables = [mlflow.artifacts.load_dict(f"runs:/{run}/differences/{name}_choices.json") for run in (first, again)]
    assert tables[0] == tables[1]
    with pytest.raises(SettingsError, match="leave out --adapter"):
        evaluate.main(gone, rescore=first, adapter="base")
    with pytest.raises(TrackingError, match="run unknown: no artifact"):
        evaluate.main(gone, rescore="unknown")


@pytest.mark.slow
def test_workflows_that_are_scored_again_have_the_figures_of_the_first_time(
    tiny_world: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.project(tmp_path, rows=1)
    asked = {"evaluate__tasks": "[workflow]", "scorer__judge": "never", "evaluate__batch_size": 4}
    evaluate.main(tiny.settings(tiny_world, **asked), adapter=str(tiny_world / "adapter-0"))
    first = tracking.find_stage("evaluate")
    evaluate.main(tiny.settings(tiny_world, **asked, base__model=tmp_path / "gone"), rescore=first)
    again = tracking.find_stage("evaluate")
    assert again != first
    figures = [
        {name: value for name, value in tracking.read_metrics(run).items() if not name.startswith("llm/")}
        for run in (first, again)
    ]
    assert figures[0] == figures[1]
    written = [json.loads(tracking.read_text(run, "results.json")) for run in (first, again)]
    assert written[0] == written[1]
    assert written[1]["scorer"] == tracking.read_tags(again)["gradeflow.scorer.version"]
    names = ["base", adapter.digest(tiny_world / "adapter-0")[:12], "fixed_Programmer"]
    for file in (f"samples/{name}.jsonl" for name in names):
        assert tracking.read_text(first, file) == tracking.read_text(again, file)


def test_a_metric_of_all_questions_together_is_measured_without_a_table(
    tiny_world: Path, settings: Params, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As lm-eval writes perplexity: what it is made of stands at each question, and no score."""

    def run(plan: Plan) -> None:
        worker_stand_in.write(plan, "sums")
        for file in Path(plan.out).rglob("samples_sums.jsonl"):
            file.write_text(file.read_text().replace("1.0", "[-7.5, 12]").replace("0.0", "[-9.5, 15]"))

    monkeypatch.setattr(process, "run", run)
    evaluate.main(settings, adapter=str(tiny_world / "adapter-1"), tasks="sums")
    found = tracking.find_stage("evaluate")
    assert found is not None
    assert tracking.read_metrics(found)["sums/acc"] == 0.5
    assert "differences" not in {item.path for item in mlflow.MlflowClient().list_artifacts(found)}


def test_the_base_alone_can_be_measured(settings: Params, store: Path) -> None:
    evaluate.main(settings, adapter="base", tasks="choices,sums")
    run = tracking.find_stage("evaluate")
    assert run is not None
    assert {"choices/acc", "sums/exact_match"} <= tracking.read_metrics(run).keys()


def test_what_cannot_be_evaluated_is_said_before_a_run_is_opened(
    tiny_world: Path, settings: Params, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs() -> int:
        return len(mlflow.search_runs(search_all_experiments=True, output_format="list"))

    before, other = runs(), tmp_path / "other"
    with pytest.raises(SettingsError, match=r"no such task: 'sum' \(nearest: .*sums"):
        evaluate.main(settings, adapter="base", tasks="sum")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(EvaluationError, match=r"(?s)confirm_run_unsafe_code.*openai_humaneval: not in the datasets"):
        evaluate.main(settings, adapter="base", tasks="humaneval")
    with pytest.raises(AdapterError, match="Output directory not found"):
        evaluate.main(settings, adapter=str(tiny_world / "adapter-9"))
    evaluation.save_adapter(other, settings, 7)
    adapter.stamp(other, replace(models.identify(settings.base), name="another-base"))
    with pytest.raises(AdapterError, match="another-base"):
        evaluate.main(settings, adapter=str(other))
    assert runs() == before


def sample(score: float | None) -> Sample:
    fault = "unreachable" if score is None else None
    return Sample("id", "digest", "source", "math", "text", "x", score, "", valid=True, fault=fault)


def test_one_score_is_enough_for_an_evaluation() -> None:
    workflow.require_scores("base", [sample(None), sample(0.0)], "executor")


def test_an_adapter_without_a_single_score_has_not_been_evaluated() -> None:
    with pytest.raises(
        TooManyFaults, match=r"^adapter: no question has a score \(\{'unreachable': 2\}\); when executor answer"
    ):
        workflow.require_scores("adapter", [sample(None), sample(None)], "executor")
