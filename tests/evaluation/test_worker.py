"""Evaluations on a tiny base with adapters of random weights, by the real lm-eval, in a worker of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradeflow.errors import EvaluationError
from gradeflow.evaluation import engine, process, worker
from gradeflow.evaluation.plan import BASE, Plan
from support import evaluation


@pytest.fixture
def planned(tiny_world: Path, tmp_path: Path) -> Callable[..., Plan]:
    """A plan for some of the adapters by their number; each set of them has a folder, and all have the same replies."""

    def make(*numbers: int, **changes: Any) -> Plan:
        out = tmp_path / f"of-{numbers}"
        return evaluation.plan(tiny_world, out, *numbers, **{"cache": str(tmp_path / "replies")} | changes)

    return make


def test_subjects_that_share_a_base_answer_as_each_does_alone(tiny_world: Path, planned: Callable[..., Plan]) -> None:
    """Sample by sample what lm-eval has for base and adapter, each loaded by lm-eval itself."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import sanitize_list

    plan = planned(0, 1)
    worker.run(plan)
    for subject in plan.subjects:
        peft = {"peft": subject.folder} if subject.folder else {}
        alone = simple_evaluate(
            model="hf",
            model_args={"pretrained": plan.base, "dtype": "float32", **peft},
            tasks=["sums", "choices"],
            task_manager=TaskManager(include_path=str(tiny_world), include_defaults=False),
            batch_size=4,
            device="cpu",
            apply_chat_template=True,
        )
        for task in ("sums", "choices"):
            rows = sorted(alone["samples"][task], key=lambda row: row["doc_id"])
            assert evaluation.replies(plan, subject, task) == json.loads(
                json.dumps([sanitize_list(row["resps"]) for row in rows])
            )
            assert len(rows) == evaluation.QUESTIONS
    base, *others = [evaluation.replies(plan, subject, "choices") for subject in plan.subjects]
    assert base not in others
    assert others[0] != others[1]


def test_no_reply_is_generated_twice(planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    worker.run(planned(0, 1))

    def refuse(_: Plan) -> Any:
        raise AssertionError("a model was loaded")

    with monkeypatch.context() as patched:
        patched.setitem(engine.LOADERS, "hf", refuse)
        worker.run(again := planned(1, 0))
        with pytest.raises(AssertionError, match="a model was loaded"):
            worker.run(planned(1, 2))
    assert evaluation.replies(again, again.subjects[1], "choices") == evaluation.replies(
        planned(0, 1), again.subjects[1], "choices"
    )


def test_an_evaluation_that_runs_out_of_time_goes_on_from_what_it_has(planned: Callable[..., Plan]) -> None:
    plan = planned(0)
    with pytest.raises(EvaluationError, match=r"no time left after 1 s .*; done: none of") as caught:
        process.run(planned(0, timeout_s=1))
    assert (caught.value.status, caught.value.done) == (124, ())
    worker.run(replace(plan, tasks=plan.tasks[:1]))
    with pytest.raises(EvaluationError) as caught:
        process.run(planned(0, timeout_s=1))
    assert caught.value.done == (plan.tasks[0],)
    before = plan.folder(BASE, plan.tasks[0]).stat().st_mtime_ns
    process.run(plan)
    assert process.done(plan) == tuple(plan.tasks)
    assert plan.folder(BASE, plan.tasks[0]).stat().st_mtime_ns == before


def test_a_worker_that_is_killed_is_no_success(planned: Callable[..., Plan]) -> None:
    plan = planned(0)

    def kill() -> None:
        while not (found := _workers(plan)):
            time.sleep(0.05)
        os.kill(found[0], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(EvaluationError, match=r"was killed, as the system does when memory runs out.*goes on"):
        process.run(plan)
    thread.join()


def test_a_worker_ends_with_the_process_that_started_it(planned: Callable[..., Plan]) -> None:
    plan = planned(0)
    code = "import sys; from pathlib import Path; from gradeflow.evaluation import process, plan; "
    code += "process.run(plan.Plan.read(Path(sys.argv[1])))"
    Path(plan.out).mkdir(parents=True)
    plan.write(Path(plan.out) / "given.json")
    parent = subprocess.Popen([sys.executable, "-c", code, str(Path(plan.out) / "given.json")])
    try:
        _until(lambda: bool(_workers(plan)))
    finally:
        parent.kill()
        parent.wait()
    _until(lambda: not _workers(plan))


@pytest.mark.slow
@pytest.mark.parametrize(("full", "left"), [("out", 0), ("out", 16 << 10), ("cache", 0)])
def test_a_disk_that_is_full_is_named_and_what_is_done_stays(
    full: str, left: int, planned: Callable[..., Plan], small_disk: Path, tmp_path: Path
) -> None:
    """The disk is a real one, and small: it has no room for the plan, for the results, or for the replies."""
    places = {"out": str(tmp_path / "out"), "cache": str(tmp_path / "cache")} | {full: str(small_disk / full)}
    plan = planned(0, cache=places["cache"])
    plan = replace(plan, out=places["out"])
    worker.run(replace(plan, tasks=plan.tasks[:1]))
    with (small_disk / "filling").open("wb", buffering=0) as filling, contextlib.suppress(OSError):
        while filling.write(bytes(1 << 12)):
            pass
    os.truncate(small_disk / "filling", (small_disk / "filling").stat().st_size - left)
    with pytest.raises(EvaluationError, match=rf"^{places[full]}.*: No space left on device; free some") as caught:
        process.run(plan)
    assert caught.value.status == 1
    assert process.done(plan) == (plan.tasks[0],)
    (small_disk / "filling").unlink()
    process.run(plan)
    assert process.done(plan) == tuple(plan.tasks)


def test_a_model_that_does_not_fit_into_memory_says_so(
    planned: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch's own words, asked for a mebibyte of gibibytes."""
    import torch

    plan = planned(0)
    Path(plan.out).mkdir()
    plan.write(tmp_path / "plan.json")
    monkeypatch.setitem(engine.LOADERS, "hf", lambda _: torch.empty(1 << 50))
    with (tmp_path / "told").open("wb") as told:
        assert worker.main(str(tmp_path / "plan.json"), str(told.fileno())) == 1
    said = (tmp_path / "told").read_text()
    assert said.startswith("too little memory: lower evaluate.batch_size")
    assert "DefaultCPUAllocator: can't allocate memory" in said


def _workers(plan: Plan) -> list[int]:
    import psutil

    told = psutil.process_iter(["cmdline"])
    return [one.pid for one in told if str(Path(plan.out) / "plan.json") in (one.info["cmdline"] or ())]


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
