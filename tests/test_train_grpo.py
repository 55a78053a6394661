"""Training, validation and evaluation with the real trainer, harness, sandbox and store, on a tiny base.

A named stand-in answers the operators: right where it is asked in words, nonsense where it is to write code.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import pytest
from rich.progress import Progress

from gradeflow import __main__ as cli
from gradeflow import adapter, evaluate, jsonl, params, tracking, train_grpo
from gradeflow.errors import AuditError, ProviderError
from gradeflow.grpo.rollouts import Batch
from gradeflow.params import Params
from gradeflow.types import Example, Rollout, Sample, Turn
from support import tiny
from support.chat_server import ChatServer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch, TRL and lm-eval warn in many ways, none of them ours
]
SMALL = {**tiny.TWO_STEPS, "train__val_samples": 8, "train__trace_rollouts": 1}
THEN_EVALUATED = {**SMALL, "evaluate__limit": 4, "evaluate__after_training": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Params, str]]:
    """A project folder, its settings and the id of a finished training run."""
    folder = tmp_path_factory.mktemp("project")
    tiny.project(folder)
    with pytest.MonkeyPatch.context() as patch, ChatServer(tiny.executor(folder)) as server:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)  # which mlflow sets where a test names a store
        settings = tiny.settings(folder, taught=True, models__base__url=server.url, **THEN_EVALUATED)
        train_grpo.main(settings)
        run = tracking.find_stage("train_grpo")
        assert run is not None
        yield folder, settings, run


@pytest.fixture(autouse=True)
def _there(trained: tuple[Path, Params, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained[0])
    tracking.connect(trained[1].tracking, trained[0])


def points(run: str, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in mlflow.MlflowClient().get_metric_history(run, name)]


def test_every_step_is_in_mlflow_under_the_names_that_users_know(trained: tuple[Path, Params, str]) -> None:
    _, _, run = trained
    for name in ("train/loss", "train/accuracy", "train/avg_reward", "train/kl_div", "rollouts/valid_share"):
        assert [step for step, _ in points(run, name)] == [1, 2]
    assert [step for step, _ in points(run, "val_accuracy")] == [0, 1, 2]


def test_the_run_names_data_base_scorer_and_prompts(trained: tuple[Path, Params, str]) -> None:
    _, _, run = trained
    assert set(tracking.read_datasets(run)) == {"train_mixed.jsonl", "val_mixed.jsonl"}
    assert "dataset/mixture.png" in {file.path for file in mlflow.MlflowClient().list_artifacts(run, "dataset")}
    tags = tracking.read_tags(run)
    assert {"gradeflow.base.digest", "gradeflow.scorer.version", "gradeflow.adapter.digest"} <= set(tags)
    assert {"policy", "judge", "custom", "programmer"} <= set(json.loads(tags["gradeflow.prompts"]))
    assert "gradeflow.policy" in tags["mlflow.linkedPrompts"]
    assert tags["gradeflow.cautions"].startswith("train.learning_rate is 0.005: above 0.001")


def test_the_run_says_when_and_why_it_went_back(trained: tuple[Path, Params, str]) -> None:
    folder, settings, run = trained
    assert points(run, "guard/rollbacks") == [(1, 0.0), (2, 0.0)]
    assert [step for step, _ in points(run, "guard/valid_share")] == [1, 2]
    course: Any = None
    with tracking.start_run("train_grpo", {}) as other, Progress() as progress:
        train_grpo.Watcher(settings, course, [], other, progress, folder, set()).collapse(6, "reward 0 (it was 0.5)")
    assert tracking.read_tags(other.id)["gradeflow.collapse.step_6"] == "reward 0 (it was 0.5)"


def test_tables_and_traces_show_rollouts(trained: tuple[Path, Params, str]) -> None:
    _, _, run = trained
    names = [file.path for file in mlflow.MlflowClient().list_artifacts(run, "rollouts")]
    assert names == ["rollouts/step_000001.json", "rollouts/step_000002.json"]
    experiment = mlflow.get_run(run).info.experiment_id
    found = mlflow.search_traces(locations=[experiment], return_type="list")
    found = [trace for trace in found if trace.info.trace_metadata["mlflow.sourceRun"] == run]
    assert len(found) == 2
    for trace in found:
        (wrote,) = trace.search_spans(name="policy")
        (ran,) = trace.search_spans(name="workflow")
        assert wrote.outputs["text"] == ran.inputs["completion"]
        assert wrote.attributes["mlflow.chat.tokenUsage"]["output_tokens"] > 0


def test_the_result_is_a_whole_adapter_that_names_its_base(trained: tuple[Path, Params, str], tmp_path: Path) -> None:
    _, settings, run = trained
    folder = tracking.download_artifact(run, "adapter", tmp_path)
    facts = adapter.validate(folder)
    assert facts.rank == settings.train.lora.rank
    assert facts.digest == tracking.read_tags(run)["gradeflow.adapter.digest"]
    assert "/" not in adapter.read_config(folder)["base_model_name_or_path"]


def test_the_same_training_is_not_done_twice(
    trained: tuple[Path, Params, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, settings, run = trained
    train_grpo.main(settings)
    assert f"reused run {run}" in capsys.readouterr().out


def test_training_evaluates_by_itself_when_it_ends_where_that_is_asked_for(
    trained: tuple[Path, Params, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command; the training itself is done already."""
    folder, settings, run = trained
    changes = tiny.changes(folder, models__base__url=settings.models["base"].url, **THEN_EVALUATED)
    cli.main(["train_grpo", "--params", str(tiny.ROOT / "params.yaml"), *(f"--{k}={v}" for k, v in changes.items())])
    assert tracking.find_stage("train_grpo") == run
    found = tracking.find_stage("evaluate")
    assert found is not None
    tags = tracking.read_tags(found)
    assert tags[tracking.PARENT] == run
    assert tags["gradeflow.adapter.digest"] == tracking.read_tags(run)["gradeflow.adapter.digest"]
    assert "workflow/adapter/accuracy" in tracking.read_metrics(found)


def test_evaluation_agrees_with_validation_item_by_item(trained: tuple[Path, Params, str], tmp_path: Path) -> None:
    """One adapter, one split: lm-eval's path and the trainer's must give every sample the same grade."""
    _, settings, run = trained
    same = settings.model_copy(
        update={"evaluate": settings.evaluate.model_copy(update={"split": "validation", "limit": 8})}
    )
    evaluate.main(same)
    found = tracking.find_stage("evaluate")
    assert found is not None
    digest = tracking.read_tags(run)["gradeflow.adapter.digest"]
    step = int(tracking.read_tags(run)["gradeflow.adapter.step"])
    file = tracking.download_artifact(found, f"samples/{digest[:12]}.jsonl", tmp_path)
    evaluated = [Sample.from_row(row) for row in jsonl.read(file)]
    table = mlflow.artifacts.load_dict(f"runs:/{run}/validation/step_{step:06d}.json")
    validated = [Sample.from_row(dict(zip(table["columns"], row, strict=True))) for row in table["data"]]
    assert evaluated == validated
    assert len(evaluated) == 8


def test_an_executor_that_is_not_there_is_named_before_a_run_is_opened(trained: tuple[Path, Params, str]) -> None:
    _, settings, _ = trained
    gone = settings.models["base"].model_copy(update={"url": "http://127.0.0.1:9/v1", "retries": 0})
    before = len(mlflow.search_runs(output_format="list", search_all_experiments=True))
    with pytest.raises(ProviderError, match=r"^base: stand-in at http://127\.0\.0\.1:9/v1: unreachable"):
        train_grpo.main(settings.model_copy(update={"models": {"base": gone}}))
    assert len(mlflow.search_runs(output_format="list", search_all_experiments=True)) == before


def test_training_that_was_cut_off_goes_on_and_leaves_no_checkpoint_without_validation(
    trained: tuple[Path, Params, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off while it validates the last checkpoint, and again while it writes one: both are mended."""
    _, settings, _ = trained
    other = settings.model_copy(update={"train": settings.train.model_copy(update={"seed": 5})})
    validate = train_grpo.Watcher.validate

    def cut_off(watcher: train_grpo.Watcher, number: int) -> float:
        if number == 2:
            raise KeyboardInterrupt
        return validate(watcher, number)

    with monkeypatch.context() as patch:
        patch.setattr(train_grpo.Watcher, "validate", cut_off)
        with pytest.raises(KeyboardInterrupt):
            train_grpo.main(other)
    (run,) = mlflow.search_runs(
        filter_string=f"attributes.status = 'KILLED' and tags.`{tracking.STAGE}` = 'train_grpo'",
        order_by=["attributes.start_time DESC"],
        max_results=1,
        output_format="list",
        search_all_experiments=True,
    )
    half = Path("runs/train_grpo") / run.info.run_id / "checkpoints" / "checkpoint-3"
    half.mkdir()
    (half / "optimizer.pt").write_bytes(b"half")
    train_grpo.main(other)
    assert mlflow.get_run(run.info.run_id).info.status == "FINISHED"
    assert [step for step, _ in points(run.info.run_id, "val_accuracy")] == [0, 1, 2]
    assert [step for step, _ in points(run.info.run_id, "train/loss")] == [1, 2]
    assert not half.exists()


def test_an_adapter_that_does_nothing_is_never_the_best(
    trained: tuple[Path, Params, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of step 1, whose learning rate is 0, has the better score: that of the base."""
    _, settings, _ = trained
    slow = settings.model_copy(update={"train": settings.train.model_copy(update={"seed": 7, "warmup_steps": 1})})
    monkeypatch.setattr(train_grpo.Watcher, "validate", lambda _, number: 1.0 / (1 + number))
    train_grpo.main(slow)
    run = tracking.find_stage("train_grpo")
    assert run is not None
    assert tracking.read_tags(run)["gradeflow.adapter.step"] == "2"


def test_training_stops_where_the_judge_calls_wrong_answers_right(trained: tuple[Path, Params, str]) -> None:
    _, settings, _ = trained

    def lenient(messages: list[dict[str, str]]) -> str:
        return "<true_false>True</true_false>" if "Candidate: <<<" in messages[-1]["content"] else "nonsense"

    train = settings.train.model_copy(update={"prompts_per_step": 16, "max_steps": 4})
    with ChatServer(lenient) as server:
        model = settings.models["base"].model_copy(update={"url": server.url})
        with pytest.raises(AuditError, match=r"^judge stand-in called .* wrong answers right in the last . steps"):
            train_grpo.main(settings.model_copy(update={"train": train, "models": {"base": model}}))
    run, *_ = mlflow.search_runs(
        filter_string="attributes.status = 'FAILED'", output_format="list", search_all_experiments=True
    )
    steps = points(run.info.run_id, "judge/false_positive_rate")
    assert [step for step, _ in points(run.info.run_id, "train/loss")][-1] == steps[-1][0]
    assert steps[-1][1] == 1.0
    assert len(list((Path("runs/train_grpo") / run.info.run_id).glob("best-*/adapter_model.safetensors"))) == 1


def test_a_model_that_goes_away_ends_training_with_a_status_of_its_own_and_the_same_command_goes_on(
    trained: tuple[Path, Params, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The executor breaks down after the first checkpoint, is still away at the second try, and then is there."""
    mended = []

    def validated() -> set[Path]:
        return set(Path("runs/train_grpo").glob("*/checkpoints/checkpoint-1/validated"))

    def fault(number: int, body: dict[str, Any]) -> Any:
        return "500" if not mended and validated() - before else None

    before = validated()
    with ChatServer(tiny.executor(trained[0]), fault) as server:
        changes = tiny.changes(
            trained[0],
            **SMALL,
            train__seed=6,
            train__fault_retries=0,
            models__base__url=server.url,
            models__base__retries=0,
        )
        command = ["train_grpo", "--params", str(tiny.ROOT / "params.yaml")]
        command += [word for name, value in changes.items() for word in (f"--{name}", value)]
        said = []
        for _ in range(2):
            with pytest.raises(SystemExit) as ended:
                cli.main(command)
            assert ended.value.code == 75
            said.append(capsys.readouterr().err)
        (run,) = mlflow.search_runs(
            filter_string="params.`train.seed` = '6'", output_format="list", search_all_experiments=True
        )
        assert run.info.status == "FAILED"
        folder = Path("runs/train_grpo") / run.info.run_id / "checkpoints"
        assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
        mended.append(True)
        cli.main(command)
    assert f"base ({server.url})" in said[0]
    assert "the same command goes on from the last checkpoint" in said[0]
    assert f"{server.url}: server error" in said[1]
    assert mlflow.get_run(run.info.run_id).info.status == "FINISHED"
    assert [step for step, _ in points(run.info.run_id, "val_accuracy")] == [0, 1, 2]
    assert [step for step, _ in points(run.info.run_id, "train/loss")] == [1, 2]


def group(*samples: Sample) -> list[Rollout]:
    example = Example("id", "places", "qa", "Where?", "x")
    return [Rollout(example, (Turn((1,), (2, 3), (1, 1), "code"),), sample, ()) for sample in samples]


RIGHT = Sample("id", "digest", "places", "text", "code", "x", 1.0, "exact", valid=True, operators=("Custom",))
WRONG = replace(RIGHT, score=0.0, by="failure", failure="syntax", operators=())
UNSCORED = replace(RIGHT, score=None, by="", fault="unreachable")


@pytest.mark.parametrize(("epochs", "steps"), [(1, 10), (2, 20)])
def test_a_pass_over_the_questions_is_one_however_often_each_batch_is_learnt_from(epochs: int, steps: int) -> None:
    chosen = {"train.epochs": "1", "train.prompts_per_step": "8", "train.ppo_epochs": str(epochs)}
    settings = params.load(tiny.ROOT / "params.yaml", {**chosen, "train.eval_every": "4"})
    assert train_grpo._with_steps(settings, 80).train.max_steps == steps


def test_abstentions_are_shares_of_all_rollouts_of_a_step_replaced_ones_too() -> None:
    groups, replaced = [group(RIGHT, UNSCORED), group(RIGHT, WRONG)], [group(UNSCORED, replace(UNSCORED, fault="tie"))]
    assert train_grpo.fault_metrics(Batch(groups, replaced, 0.0), {"timeout"}) == {
        "rollouts/replaced_groups": 1,
        "rollouts/unscored_share": 0.5,
        "faults/unreachable": pytest.approx(1 / 3),
        "faults/tie": pytest.approx(1 / 6),
        "faults/timeout": 0,
    }


def test_a_group_is_dead_that_has_no_two_different_scores() -> None:
    groups = [group(RIGHT, UNSCORED), group(RIGHT, RIGHT), group(UNSCORED, UNSCORED), group(RIGHT, WRONG)]
    metrics = train_grpo.step_metrics(1, {}, Batch(groups, [], 0.0), [])
    assert (metrics["train/dead_group_share"], metrics["train/num_total"]) == (0.75, 8)
    assert (metrics["train/accuracy"], metrics["train/completion_tokens"]) == (0.8, 2)


def test_what_did_not_happen_in_a_step_counts_zero() -> None:
    first, second = (
        train_grpo.step_metrics(1, {}, Batch([group(*samples)], [], 0.0), ["Custom", "Programmer"])
        for samples in ([RIGHT], [RIGHT, WRONG])
    )
    assert first.keys() == second.keys()
    assert (first["failures/syntax"], second["failures/syntax"], second["failures/timeout"]) == (0, 1, 0)
    assert (first["operators/Custom"], second["operators/Custom"], second["operators/Programmer"]) == (1, 0.5, 0)


def test_questions_without_a_score_are_no_accuracy_of_zero() -> None:
    sample = Sample("id", "digest", "places", "text", "return 1", None, None, "", valid=False, fault="unreachable")
    assert not {"val_accuracy", "val_avg_correctness"} & set(train_grpo.validation_metrics([sample], 0.0))
    assert "accuracy" not in evaluate.workflow_metrics([sample])
    right = replace(sample, score=1.0, fault=None)
    assert train_grpo.validation_metrics([sample, right], 0.0)["val_accuracy"] == 1.0
