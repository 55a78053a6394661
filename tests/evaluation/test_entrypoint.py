import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gradeflow import adapter, params
from gradeflow.errors import AdapterError, EvaluationError, SettingsError
from gradeflow.evaluation import entrypoint, results
from gradeflow.evaluation.original import Container
from gradeflow.evaluation.plan import BASE, Plan
from support import worker_stand_in as stand_in
from support.worker_stand_in import Worker

ROOT = Path(__file__).parents[2]
LAYER = "model.layers.0.self_attn.q_proj"
Told = dict[str, str]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    """The variables of a container with a base and an adapter that fit, as files."""
    base, trained = tmp_path / "models/base", tmp_path / "output"
    base.mkdir(parents=True)
    trained.mkdir()
    (base / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 512}')
    for name in ("tokenizer.json", "chat_template.jinja"):
        (base / name).touch()
    save_file({f"{LAYER}.weight": np.zeros((8, 8), np.float32)}, base / "model.safetensors")
    named = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (trained / adapter.CONFIG).write_text(json.dumps(named | {"base_model_name_or_path": str(base)}))
    halves = (("A", (4, 8)), ("B", (8, 4)))
    tensors = {f"base_model.model.{LAYER}.lora_{half}.weight": np.ones(shape, np.float32) for half, shape in halves}
    save_file(tensors, trained / "adapter_model.safetensors")
    return {
        "BENCHMARK_TASKS": "gsm8k,mmlu",
        "BASE_MODEL": str(base),
        "ADAPTER_PATH": str(trained),
        "OUTPUT_DIR": str(tmp_path / "benchmark_results"),
    }


def evaluate(told: Told, run: Callable[[Plan], None]) -> dict[str, Any]:
    container = Container.read(told)
    settings = params.load(ROOT / "params.yaml", container.overrides())
    found: dict[str, Any] = json.loads(entrypoint.evaluate(container, settings, stand_in.Tasks(), run).read_text())
    return found


def test_results_and_samples_lie_where_the_originals_users_look(told: Told) -> None:
    found = evaluate(told, Worker().run)
    out = Path(told["OUTPUT_DIR"])
    assert sorted(path.name for path in out.iterdir() if path.is_file()) == [
        "results.json",
        "results_gsm8k_2026.json",
        "results_mmlu_2026.json",
        "samples_gsm8k.jsonl",
        "samples_mmlu.jsonl",
    ]
    assert found["results"] == {name: {"alias": name, "acc,none": 0.5} for name in ("gsm8k", "mmlu")}
    assert found["gradeflow"]["primary"] == {"gsm8k": "acc,none", "mmlu": "acc,none"}
    assert (found["lm_eval_version"], found["total_evaluation_time_seconds"]) == ("0.4.13", "3.0")


def test_the_plan_says_what_the_variables_say(told: Told) -> None:
    container = Container.read(told | {"LIMIT": "10", "NUM_GPUS": "2"})
    settings = params.load(ROOT / "params.yaml", container.overrides())
    plan = entrypoint.make_plan(container, settings, stand_in.Tasks())
    (subject,) = plan.subjects
    facts = adapter.validate(Path(told["ADAPTER_PATH"]))
    assert (subject.name, subject.digest, subject.rank) == (facts.digest[:12], facts.digest, 4)
    assert (plan.base, plan.revision, plan.dtype) == (told["BASE_MODEL"], "", "auto")
    assert plan.tasks == ["gsm8k", "mmlu"]
    assert (plan.settings.limit, plan.settings.gpus) == (10, 2)
    assert plan.settings.max_model_len == 512
    assert Path(plan.settings.cache).is_relative_to(told["OUTPUT_DIR"])


def test_tasks_are_asked_for_by_the_names_they_have(told: Told) -> None:
    found = evaluate(told | {"BENCHMARK_TASKS": "math,/own/my_task.yaml"}, Worker().run)
    assert set(found["results"]) == {"hendrycks_math", "my_task"}


def test_the_base_alone_is_measured_when_it_is_asked_for(told: Told) -> None:
    worker = Worker()
    evaluate(told | {"ADAPTER_PATH": "none"}, worker.run)
    (subject,) = worker.plans[0].subjects
    assert (subject.name, subject.digest) == (BASE, "")


def test_a_missing_adapter_is_never_the_base_alone(told: Told, tmp_path: Path) -> None:
    worker = Worker()
    with pytest.raises(SettingsError, match=r"Output directory not found.*none for the base alone"):
        evaluate(told | {"ADAPTER_PATH": str(tmp_path / "gone")}, worker.run)
    shutil.rmtree(told["ADAPTER_PATH"])
    Path(told["ADAPTER_PATH"]).mkdir()
    with pytest.raises(AdapterError, match="No adapter weight file"):
        evaluate(told, worker.run)
    assert worker.plans == []


def test_an_adapter_of_another_base_is_found_before_a_model_is_loaded(told: Told) -> None:
    save_file({f"{LAYER}.weight": np.zeros((16, 16), np.float32)}, Path(told["BASE_MODEL"]) / "model.safetensors")
    with pytest.raises(AdapterError, match="q_proj"):
        evaluate(told, Worker().run)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("/gone/model", "expected a folder that is there, or a hub id"),
        ("x; touch pwned", "expected a folder that is there, or a hub id"),
    ],
)
def test_a_base_that_is_nowhere_is_told(base: str, said: str, told: Told) -> None:
    with pytest.raises(SettingsError, match=said):
        evaluate(told | {"BASE_MODEL": base}, Worker().run)


def test_an_adapter_given_as_the_base_is_told(told: Told) -> None:
    with pytest.raises(SettingsError, match=r"BASE_MODEL.*no config\.json"):
        evaluate(told | {"BASE_MODEL": told["ADAPTER_PATH"]}, Worker().run)


@pytest.mark.parametrize(("part", "status"), [("time-out", 124), ("crash", 1), ("forget", 1)])
def test_without_whole_results_there_are_none_and_what_is_done_is_said(part: str, status: int, told: Told) -> None:
    stale = Path(told["OUTPUT_DIR"]) / "results.json"
    stale.parent.mkdir()
    stale.write_text('{"results": {"gsm8k": {"acc,none": 1.0}}}')
    with pytest.raises(EvaluationError, match="done: gsm8k; without results: mmlu") as caught:
        evaluate(told, Worker(part).run)
    assert (caught.value.status, caught.value.done) == (status, ("gsm8k",))
    assert not stale.exists()


def test_results_that_are_cut_off_are_none(told: Told) -> None:
    with pytest.raises(EvaluationError, match=r"mmlu/results\.json: half-written"):
        evaluate(told, Worker("cut").run)
    assert not (Path(told["OUTPUT_DIR"]) / "results.json").exists()


def test_what_would_fail_is_found_before_the_worker_starts(told: Told) -> None:
    worker = Worker()
    for name in ("tokenizer.json", "chat_template.jinja"):
        (Path(told["BASE_MODEL"]) / name).unlink()
    with pytest.raises(EvaluationError, match=r"nothing was loaded or measured.*\n  base: .*: no tokenizer"):
        evaluate(told, worker.run)
    assert worker.plans == []


def test_the_next_call_goes_on_with_what_is_left(told: Told) -> None:
    with pytest.raises(EvaluationError):
        evaluate(told, Worker("time-out").run)
    worker = Worker()
    found = evaluate(told, worker.run)
    assert [list(plan.tasks) for plan in worker.plans] == [["mmlu"]]
    assert set(found["results"]) == {"gsm8k", "mmlu"}
    evaluate(told, worker.run)
    assert len(worker.plans) == 1


@pytest.mark.parametrize("change", [{"LIMIT": "5"}, {"ADAPTER_PATH": "none"}])
def test_what_is_done_otherwise_is_not_done(change: Told, told: Told) -> None:
    evaluate(told, Worker().run)
    worker = Worker()
    evaluate(told | change, worker.run)
    assert [list(plan.tasks) for plan in worker.plans] == [["gsm8k", "mmlu"]]


def test_another_base_of_the_same_name_is_another_base(told: Told) -> None:
    alone = told | {"ADAPTER_PATH": "none"}
    evaluate(alone, Worker().run)
    save_file({f"{LAYER}.weight": np.ones((8, 8), np.float32)}, Path(told["BASE_MODEL"]) / "model.safetensors")
    worker = Worker()
    evaluate(alone, worker.run)
    assert len(worker.plans) == 1


def start(told: Told, *command: str, **more: str) -> "subprocess.Popen[str]":
    """A process with these variables, Python's and no others."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "HOME") if name in os.environ}
    environment = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | kept | told | more
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """The status and the last line."""
    said, _ = process.communicate()
    return process.returncode, said.splitlines()[-1]


def acting(part: str) -> tuple[str, ...]:
    return sys.executable, stand_in.__file__, part, "--params", str(ROOT / "params.yaml")


def test_a_whole_evaluation_ends_with_0_and_says_where_results_are(told: Told) -> None:
    assert ended(start(told, *acting(""))) == (
        0,
        f"gradeflow: done: gsm8k, mmlu: {told['OUTPUT_DIR']}/results.json",
    )


@pytest.mark.parametrize(
    ("part", "change", "status", "said"),
    [
        ("time-out", {}, 124, "time is up; done: gsm8k; without results: mmlu"),
        ("forget", {}, 1, "the worker ended without results; done: gsm8k"),
        ("", {"NUM_GPUS": "four"}, 2, "NUM_GPUS is 'four'; expected a number of GPUs"),
        ("", {"BENCHMARK_TASKS": "gsm8k,no such"}, 2, "'no such': no such task"),
        ("", {"OUTPUT_DIR": "/dev/null/results"}, 1, "/dev/null"),
    ],
)
def test_a_failure_has_its_status_and_a_clear_last_line(
    part: str, change: Told, status: int, said: str, told: Told
) -> None:
    found, line = ended(start(told | change, *acting(part)))
    assert found == status
    assert line.startswith(f"gradeflow: failed, status {status}: ")
    assert said in line


def test_one_that_is_stopped_says_what_is_done(told: Told) -> None:
    process = start(told, *acting("hang"))
    assert process.stdout is not None
    assert process.stdout.readline() == "hanging\n"
    process.send_signal(signal.SIGTERM)
    status, line = ended(process)
    assert status == 128 + signal.SIGTERM
    assert "ended by SIGTERM; done: gsm8k; without results: mmlu" in line


def test_timeout_ends_it_with_124_as_the_originals_does(told: Told) -> None:
    process = start(told, "timeout", "--kill-after=10", "600", *acting("hang"))
    assert process.stdout is not None
    assert process.stdout.readline() == "hanging\n"
    process.send_signal(signal.SIGALRM)  # what tells it that time is up
    status, line = ended(process)
    assert status == 124
    assert "ended by SIGTERM; done: gsm8k; without results: mmlu" in line


@pytest.mark.parametrize("told_offline", [{"HF_HUB_OFFLINE": "1"}, {"HF_DATASETS_OFFLINE": "1"}])
def test_a_base_by_hub_id_comes_from_the_folder_of_the_datasets_when_offline(
    told_offline: Told, told: Told, tmp_path: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    kept = tmp_path / "benchmarks/hub/models--Qwen--small"
    (kept / "snapshots").mkdir(parents=True)
    shutil.copytree(told["BASE_MODEL"], kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text(commit)
    named = Path(told["ADAPTER_PATH"]) / adapter.CONFIG
    named.write_text(named.read_text().replace(told["BASE_MODEL"], "Qwen/small"))
    told |= {"BASE_MODEL": "Qwen/small", "HF_DATASETS_CACHE": str(tmp_path / "benchmarks")} | told_offline
    assert ended(start(told, *acting("")))[0] == 0
    status, line = ended(start(told | {"BASE_MODEL": "Qwen/other"}, *acting("")))
    assert status == 1
    assert "BASE_MODEL is 'Qwen/other', which is no folder here, and from the hub it cannot be had" in line
    assert "Mount a folder with the model" in line


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_images_script_starts_it_and_reads_no_name_as_a_command(shell: str, tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    shutil.copy(ROOT / "docker/evaluate-entrypoint.sh", app / "eval_entrypoint.sh")
    shutil.copy(ROOT / "params.yaml", app)
    hostile = f"x'\"; touch {tmp_path / 'pwned'}; $(touch {tmp_path / 'pwned'}) `touch {tmp_path / 'pwned'}`"
    told = dict.fromkeys(("BASE_MODEL", "BENCHMARK_TASKS", "ADAPTER_PATH"), hostile)
    told["OUTPUT_DIR"] = str(tmp_path / "out")
    status, line = ended(start(told, shell, str(app / "eval_entrypoint.sh")))
    assert status == 2
    assert line.startswith(f"gradeflow: failed, status 2: BASE_MODEL is {hostile!r}; expected a folder that is there")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.slow
def test_what_lm_eval_itself_writes_is_collected(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lm-eval's own model that answers at random, where a worker would load one."""
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it looks there for its own tokenizer
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 3)
    manager = TaskManager(include_defaults=False)

    def run(plan: Plan) -> None:
        for name in plan.tasks:
            task = {
                "task": name,
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path)},
                "test_split": "test",
                "output_type": "generate_until",
                "doc_to_text": "{{question}}",
                "doc_to_target": "{{answer}}",
                "generation_kwargs": {"until": ["\n"]},
                "metric_list": [{"metric": "exact_match"}],
            }
            found = simple_evaluate(model="dummy", tasks=[task], task_manager=manager, bootstrap_iters=0)
            folder = plan.folder(plan.subjects[0].name, name)
            folder.mkdir(parents=True)
            tracker = EvaluationTracker(output_path=str(folder / results.NAME))
            samples = found.pop("samples")
            tracker.save_results_aggregated(results=found, samples=samples)
            tracker.save_results_samples(task_name=name, samples=samples[name])
            adapter = plan.subjects[0].digest
            named = found | {"model_name": plan.base, "model_source": "dummy"}
            results.write(folder, named, base=plan.base, base_digest=plan.base_digest, adapter=adapter)

    found = evaluate(told | {"BENCHMARK_TASKS": "one,two"}, run)
    for part in ("results", "configs", "versions", "n-shot", "higher_is_better", "n-samples"):
        assert set(found[part]) == {"one", "two"}
    names = {path.name for path in Path(told["OUTPUT_DIR"]).iterdir()}
    for task in ("one", "two"):
        assert any(name.startswith(f"samples_{task}_2") for name in names)
    assert sum(name.startswith("results_2") for name in names) == 2
