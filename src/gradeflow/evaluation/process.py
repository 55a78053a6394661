"""The worker as a process of its own: it may be given a time, and what it leaves is there when it is gone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from gradeflow.adapter import vllm
from gradeflow.errors import TIMED_OUT, EvaluationError
from gradeflow.evaluation.plan import Backend, Plan
from gradeflow.evaluation.worker import LONGEST, told
from gradeflow.llm.vllm_process import BOUND

STOP_S = 10
"""What a worker has to end by itself, as with the original's `timeout --kill-after=10`."""


def run(plan: Plan) -> None:
    """Measure what the plan says, in a process on this machine.

    Raises:
        EvaluationError: it ended before everything was measured; `done` are the tasks that were.
    """
    out = Path(plan.out)
    with told(plan):
        out.mkdir(parents=True, exist_ok=True)
        plan.write(out / "plan.json")
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    worker = [str(python(plan.backend)), "-m", "gradeflow.evaluation.worker", str(out / "plan.json"), str(writing)]
    command = [sys.executable, "-c", BOUND, *worker]
    with open(reading, "rb", buffering=0) as last_words:  # noqa: PTH123 - a descriptor
        try:
            process = subprocess.Popen(command, env=environment(), start_new_session=True, pass_fds=[writing])
        finally:
            os.close(writing)
        try:
            status = process.wait(plan.settings.timeout_s or None)
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
        finally:
            _stop(process)
        failure = (last_words.read(LONGEST) or b"").decode(errors="replace")
    if status:
        raise EvaluationError(_said(plan, status, failure), done=done(plan), status=_status(status))


def python(backend: Backend) -> Path:
    """The interpreter that has the backend: this one, or that of vLLM's environment."""
    return vllm.program().with_name("python").absolute() if backend == "vllm" else Path(sys.executable)


def environment() -> dict[str, str]:
    """What a worker finds in its environment: no run of MLflow, which is the caller's to write."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_RUN", "GRADEFLOW_PARENT"))
    }
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}
    return {"VLLM_CPU_KVCACHE_SPACE": "1", **quiet, **kept}


def done(plan: Plan) -> tuple[str, ...]:
    """The tasks in which every subject has whole results."""
    return tuple(
        task for task in plan.tasks if all(plan.folder(subject.name, task).is_dir() for subject in plan.subjects)
    )


def _status(status: int) -> int:
    return status if status > 0 else 1


def _said(plan: Plan, status: int, failure: str) -> str:
    whole = ", ".join(done(plan)) or "none"
    again = f"done: {whole} of {', '.join(plan.tasks)}"
    if not plan.replies:
        again += "; the same command goes on from there"
    if status == TIMED_OUT:
        return f"no time left after {plan.settings.timeout_s} s (evaluate.timeout_s); {again}"
    if failure:
        return f"{failure}; {again}"
    if status == -signal.SIGKILL:
        return f"the worker was killed, as the system does when memory runs out: lower evaluate.batch_size; {again}"
    return f"the worker ended with status {status}; what it said is above; {again}"


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the worker and all that it started."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(STOP_S)
        except ProcessLookupError:
            process.wait()
        except subprocess.TimeoutExpired:
            continue
