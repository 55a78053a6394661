"""Ways in which an evaluation breaks, by the command: each has its own message, a status other than 0, no metric."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gradeflow import __main__ as cli
from gradeflow import adapter, evaluate, models
from gradeflow.evaluation import process
from gradeflow.evaluation.plan import Plan
from support import failing_worker, tiny, worker_stand_in

WEIGHTS = "adapter_model.safetensors"
Arguments = dict[str, str]
Spoil = Callable[[Path], object]


def of_another_base(folder: Path) -> None:
    settings = tiny.settings(folder.parent)
    adapter.stamp(folder, replace(models.identify(settings.base), name="another-base"))


def of_zeros(folder: Path) -> None:
    weights = {
        name: np.zeros_like(one) if "lora_B" in name else one for name, one in load_file(folder / WEIGHTS).items()
    }
    save_file(weights, folder / WEIGHTS)


def with_adapter(spoil: Spoil) -> Callable[[Path], Arguments]:
    def ask(world: Path) -> Arguments:
        spoil(Path(shutil.copytree(world / "adapter-0", world / "spoilt")))
        return {"adapter": str(world / "spoilt")}

    return ask


def without_tokenizer(world: Path) -> Arguments:
    (world / "tiny-base/tokenizer.json").unlink()
    return {"adapter": "base"}


def with_yaml(text: str) -> Callable[[Path], Arguments]:
    def ask(world: Path) -> Arguments:
        (world / "own.yaml").write_text(text)
        return {"tasks": str(world / "own.yaml")}

    return ask


BEFOREHAND: dict[str, tuple[Callable[[Path], Arguments], int, str]] = {
    "task unknown": (lambda _: {"tasks": "sum"}, 2, r"evaluate\.tasks: no such task: 'sum' \(nearest: "),
    "task half-written": (with_yaml("task: [own"), 2, r"own\.yaml, line 2: not valid YAML"),
    "adapter missing": (lambda _: {"adapter": "gone/away"}, 1, "gone/away: Output directory not found"),
    "adapter without weights": (with_adapter(lambda at: (at / WEIGHTS).unlink()), 1, "No adapter weight file"),
    "adapter cut off": (with_adapter(lambda at: (at / WEIGHTS).write_bytes(b"\0" * 9)), 1, WEIGHTS),
    "wrong base": (with_adapter(of_another_base), 1, "made for base another-base"),
    "dead adapter": (with_adapter(of_zeros), 1, "lora_B"),
    "no consent": (lambda _: {"tasks": "humaneval"}, 1, "evaluate.confirm_run_unsafe_code"),
    "data missing": (lambda _: {"tasks": "gsm8k"}, 1, r"openai/gsm8k \(main\): not in the datasets cache"),
    "base not whole": (without_tokenizer, 1, "base: .*no tokenizer"),
    "backend missing": (lambda _: {"evaluate.backend": "vllm"}, 1, "backend: vllm: .* is not there -> make vllm"),
    "context too short": (lambda _: {"evaluate.max_model_len": "99999"}, 1, "context: .* the model has"),
}


def results_changed(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        tree = json.loads((folder / "results.json").read_text())
        change(tree)
        (folder / "results.json").write_text(json.dumps(tree))

    return spoil


def cut(name: str) -> Spoil:
    return lambda folder: (folder / name).write_text((folder / name).read_text()[:-8])


RESULTS: dict[str, tuple[Spoil, str]] = {
    "results missing": (shutil.rmtree, "no results of lm-eval"),
    "results empty": (lambda at: (at / "results.json").write_text(""), "results.json: empty"),
    "results half-written": (cut("results.json"), "results.json: half-written"),
    "results of another version": (
        results_changed(lambda tree: tree.update(lm_eval_version="0.5.0", results=[])),
        "of lm-eval 0.5.0, which cannot be read; expected 0.4.9 to 0.4.13",
    ),
    "results of another task": (
        results_changed(lambda tree: tree.update(results={"others": tree["results"]["sums"]})),
        "no results of task sums; there are others",
    ),
    "results of another base": (
        results_changed(lambda tree: tree["gradeflow"]["base"].update(digest="f" * 64, name="another")),
        "these are results of .*f{12}, not of [0-9a-f]{64}",
    ),
    "results of another adapter": (
        results_changed(lambda tree: tree["gradeflow"].update(adapter="f" * 64)),
        "these are results of adapter ffff",
    ),
    "results of no adapter": (
        results_changed(lambda tree: tree["gradeflow"].update(adapter="")),
        "these are results of the base alone",
    ),
    "metric not a number": (
        results_changed(lambda tree: tree["results"]["sums"].update({"acc,none": float("nan")})),
        "sums: acc,none is nan; expected a number",
    ),
    "no metric": (results_changed(lambda tree: tree["results"]["sums"].pop("acc,none")), "sums has no metric"),
    "samples missing": (lambda at: (at / "samples_sums.jsonl").unlink(), "the samples of sums are missing"),
    "samples cut off": (cut("samples_sums.jsonl"), "samples_sums.jsonl, line 2: .*cut off"),
    "samples of fewer questions": (
        lambda at: (at / "samples_sums.jsonl").write_text('{"doc_id": 0, "acc": 1.0}\n'),
        "has 1 samples .*, but sums was measured on 2",
    ),
    "samples of other questions": (
        lambda at: (at / "samples_sums.jsonl").write_text('{"doc_id": 0, "acc": 1.0}\n{"doc_id": 2, "acc": 0.0}\n'),
        "not the same questions: 2 and 2, 2 in one alone",
    ),
}

WORKER: dict[str, tuple[str, int, str]] = {
    "time-out": ("hang", 124, r"no time left after 1 s \(evaluate.timeout_s\)"),
    "killed": ("be_killed", 1, "the worker was killed, as the system does when memory runs out"),
    "memory full": ("fill_memory", 1, "too little memory: lower evaluate.batch_size .*; MemoryError"),
    "GPU full": ("fill_gpu", 1, "too little memory: .*; RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"),
    "GPU too small for vLLM": ("fill_vllm", 1, "too little memory: .*; ValueError: No available memory for the cache"),
    "disk full": ("fill_disk", 1, "unfinished/[0-9a-f]+: No space left on device; free some space"),
    "worker broken": ("break_down", 1, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    "worker gone": ("vanish", 3, "the worker ended with status 3; what it said is above"),
}


def test_there_are_more_than_fifteen_kinds() -> None:
    messages = [said for *_, said in (*BEFOREHAND.values(), *RESULTS.values(), *WORKER.values())]
    assert len(set(messages)) == len(messages) >= 15


Fails = Callable[..., None]


@pytest.fixture
def fails(store: Path, tiny_world: Path, capsys: pytest.CaptureFixture[str]) -> Fails:
    """Runs the command, and looks at how it ends and at what MLflow has."""

    def metrics() -> list[dict[str, float]]:
        runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
        return [run.data.metrics for run in runs if run.data.metrics]

    def run(asked: Arguments, status: int, said: str, world: Path = tiny_world) -> None:
        shutil.rmtree(store / evaluate.UNFINISHED, ignore_errors=True)
        given = {"adapter": str(world / "adapter-0"), "tasks": "sums"}
        given |= {"evaluate.include": f"[{world}]", "evaluate.cache": ""} | tiny.changes(world) | asked
        before = metrics()
        with pytest.raises(SystemExit) as ended:
            cli.main(
                ["evaluate", "--params", str(tiny.ROOT / "params.yaml"), *(f"--{k}={v}" for k, v in given.items())]
            )
        assert ended.value.code == status
        message = capsys.readouterr().err.rpartition("gradeflow: ")[2]
        assert re.search(said, message)
        assert metrics() == before

    return run


@pytest.mark.parametrize("kind", BEFOREHAND)
def test_what_can_be_found_beforehand(
    kind: str, fails: Fails, tiny_world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, status, said = BEFOREHAND[kind]
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    world = Path(shutil.copytree(tiny_world, tmp_path / "world"))
    fails(ask(world), status, said, world)


@pytest.mark.parametrize("kind", RESULTS)
def test_what_a_worker_may_leave(kind: str, fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, said = RESULTS[kind]

    def run(plan: Plan) -> None:
        worker_stand_in.write(plan, "sums")
        spoil(plan.folder(plan.subjects[1].name, "sums"))

    monkeypatch.setattr(process, "run", run)
    fails({}, 1, said)


@pytest.mark.parametrize("kind", WORKER)
def test_how_a_worker_may_end(kind: str, fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, status, said = WORKER[kind]
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {failing_worker.__file__} {part} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(process, "python", lambda _: script)
    fails({"evaluate.timeout_s": "1" if part == "hang" else "0"}, status, f"{said}.*; done: none of sums; the same")
