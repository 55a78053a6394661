"""Evaluation in the image that docker/evaluate.Dockerfile builds: a worker on a plan, or the original's workspace.

A container sees the folders that it needs at their own paths, those that it only reads read-only, and no network
unless something comes from the hub. It runs as the user who started it, without capabilities, and ends by itself
when its time is up, even where nobody is left to end it. The image is never pulled.
"""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradeflow import params
from gradeflow.errors import TIMED_OUT, EvaluationError, SetupError
from gradeflow.evaluation.original import BenchmarkDocker, Container, FineTune, offline
from gradeflow.evaluation.plan import Plan

WORKER = ("python", "-m", "gradeflow.evaluation.worker")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
PLAN = "plan.json"
LOG = "evaluate.log"
KILL_AFTER_S = 10
GRACE_S = 30.0
"""How long after its time a container may go on before it is ended from outside."""
KEPT_LINES = 2000
NOT_STARTED = frozenset({125, 126, 127})
KILLED = 137


@dataclass(frozen=True, slots=True)
class Ended:
    """How a container ended: its exit status, 124 for a time-out, and the last of what it said."""

    status: int
    output: str


def measure(plan: Plan, settings: params.Docker, *, online: bool | None = None) -> None:
    """Let a worker in the image carry out a plan.

    `online` says whether it may reach the hub; when it is left out, only for a base that is no folder here.

    Raises:
        SetupError: there is no Docker, no engine, no image or no such GPU.
        EvaluationError: the worker failed; what is done lies in `plan.out`.
    """
    for folder in _written(plan):
        folder.mkdir(parents=True, exist_ok=True)
    plan.write(Path(plan.out) / PLAN)
    name = new_name()
    argv = command(plan, settings, name=name, online=online)
    ended = run(argv, name=name, timeout_s=plan.settings.timeout_s)
    if ended.status:
        raise EvaluationError(explain(ended, settings, plan.settings.timeout_s), status=ended.status)


def original(
    workspace: Path,
    environment: Mapping[str, str],
    settings: params.Evaluate,
    *,
    project: Path = Path(),
) -> Ended:
    """Evaluate `workspace`/output into `workspace`/benchmark_results as the original does, FT_... and all.

    `settings` have the variables' overrides in them. The whole log is kept as benchmark_results/evaluate.log; the
    image is built from `project` first, unless BENCHMARK_DOCKER_BUILD_FROM_DOCKERFILE says no.
    """
    told = BenchmarkDocker.read(environment)
    results = workspace / "benchmark_results"
    results.mkdir(parents=True, exist_ok=True)
    if told.build_from_dockerfile:
        built = run(build_command(settings.docker.image, project), name="", timeout_s=0, environment=environment)
        if built.status:
            raise SetupError(f"docker build ended with status {built.status}:\n{_last(built.output, 20)}")
    name = new_name()
    with _window(told.terminal_tail_lines) as show:
        log = results / LOG if told.save_logs_to_file else None
        argv = original_command(workspace, environment, settings, name=name)
        return run(argv, name=name, timeout_s=settings.timeout_s, environment=environment, log=log, show=show)


def runner(
    environment: Mapping[str, str], settings: params.Evaluate, *, project: Path = Path()
) -> Callable[[Path, Sequence[str], int | None], Ended]:
    """`original`, of a workspace, tasks and a number of questions that are given later."""

    def run_in(workspace: Path, tasks: Sequence[str], limit: int | None) -> Ended:
        told = {"FT_BENCHMARK_DATASETS": json.dumps(list(tasks)), "LIMIT": str(limit or "")}
        return original(workspace, {**environment, **told}, settings, project=project)

    return run_in


def new_name() -> str:
    return f"gradeflow-evaluate-{uuid.uuid4().hex[:12]}"


def build_command(image: str, project: Path) -> list[str]:
    return ["docker", "build", "--file", str(project / "docker/evaluate.Dockerfile"), "--tag", image, str(project)]


def command(plan: Plan, settings: params.Docker, *, name: str, online: bool | None = None) -> list[str]:
    """`docker run` of a worker on `plan.out`/plan.json. The plan's paths hold inside, relative ones too."""
    if online is None:
        online = not Path(plan.base).is_dir()
    hub, datasets = caches(os.environ)
    writable = {path.absolute() for path in _written(plan)}
    readable = {path.absolute() for path in _read(plan) if path.exists()}
    readable |= {target for path in readable for target in _linked(path)}
    kept = {path for path in (hub, datasets) if path.is_dir()}
    mounts = dict.fromkeys(readable | kept, False) | dict.fromkeys(writable | (kept if online else set()), True)
    values = {"HF_HUB_CACHE": str(hub), "HF_DATASETS_CACHE": str(datasets)} | ({} if online else OFFLINE)
    return [
        *_docker_run(settings, name=name, online=online),
        *(part for path in sorted(mounts) for part in _mount(path, path, writable=mounts[path])),
        *(part for item in values.items() for part in ("--env", "=".join(item))),
        *("--workdir", str(Path.cwd())),
        *_entry(settings.image, plan.settings.timeout_s, [*WORKER, str((Path(plan.out) / PLAN).absolute())]),
    ]


def original_command(
    workspace: Path, environment: Mapping[str, str], settings: params.Evaluate, *, name: str
) -> list[str]:
    """`docker run` of the original's entry in the workspace, with the base and the datasets of FT_FILE_PATH.

    LIMIT, BATCH_SIZE, NUM_GPUS and HF_ALLOW_CODE_EVAL are handed on from the environment.
    """
    tuned, docker = FineTune.read(environment), BenchmarkDocker.read(environment)
    inside = Path(docker.mount_path)
    mounts = [_mount(workspace.absolute(), inside, writable=True)]
    base = Path(tuned.base).resolve() if Path(tuned.base).is_dir() else None
    if base is not None:
        mounts += [_mount(path, path, writable=False) for path in (base, *sorted(_linked(base)))]
    if tuned.benchmarks is not None:
        tuned.benchmarks.mkdir(parents=True, exist_ok=True)
        mounts.append(_mount(tuned.benchmarks.absolute(), inside / "benchmarks", writable=True))
    values = {
        "BENCHMARK_TASKS": ",".join(tuned.benchmark_datasets),
        "BASE_MODEL": str(base or tuned.base),
        "ADAPTER_PATH": str(inside / "output"),
        "OUTPUT_DIR": str(inside / "benchmark_results"),
        "HF_DATASETS_CACHE": str(inside / "benchmarks"),
    }
    handed_on = ("LIMIT", "BATCH_SIZE", "NUM_GPUS", "HF_ALLOW_CODE_EVAL")
    values |= {name: environment[name] for name in handed_on if environment.get(name)}
    Container.read(values)
    online = not offline(environment)
    values |= {} if online else OFFLINE
    return [
        *_docker_run(settings.docker, name=name, online=online),
        *(part for mount in mounts for part in mount),
        *(part for item in values.items() for part in ("--env", "=".join(item))),
        *("--workdir", str(inside)),
        *_entry(settings.docker.image, settings.timeout_s, docker.default_entry),
    ]


def run(
    argv: Sequence[str],
    *,
    name: str,
    timeout_s: int = 0,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    show: Callable[[str], None] = lambda line: print(line, end="", flush=True),
    grace_s: float = GRACE_S,
) -> Ended:
    """Run a docker command, passing on what it says; the container `name` never outlives it, nor the time-out by much.

    Raises:
        SetupError: Docker is not there, or could not start the container.
    """
    try:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise SetupError(
            f"{argv[0]}: {error.strerror}. Install Docker Engine (https://docs.docker.com/engine/install), or evaluate "
            "on this machine: evaluate.where local"
        ) from None
    expired = threading.Event()

    def end() -> None:
        """The container first: it outlives a client that is killed."""
        if name:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                kill = ["docker", "kill", name]
                subprocess.run(kill, env=environment, capture_output=True, timeout=GRACE_S, check=False)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def expire() -> None:
        if process.poll() is None:
            expired.set()
            end()

    timer = threading.Timer(timeout_s + grace_s, expire)
    kept: deque[str] = deque(maxlen=KEPT_LINES)
    began = time.monotonic()
    with process, contextlib.ExitStack() as stack:
        file = stack.enter_context(log.open("w", encoding="utf-8")) if log else None
        if timeout_s:
            timer.start()
        try:
            for line in _lines(process):
                kept.append(line)
                if file:
                    file.write(line)
                show(line)
            status = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                end()
    output = "".join(kept)
    if status in NOT_STARTED and argv[1:2] == ["run"]:
        raise SetupError(_not_started(status, output))
    # `timeout` itself ends with 137 where it had to kill what would not end.
    late = status == KILLED and 0 < timeout_s <= time.monotonic() - began
    return Ended(TIMED_OUT if expired.is_set() or late else status, output)


def explain(ended: Ended, settings: params.Docker, timeout_s: int) -> str:
    """Why a container failed, in a line, and then the last of what it said."""
    said = _last(ended.output, 5)
    if ended.status == TIMED_OUT:
        why = f"not done after {timeout_s} s (evaluate.timeout_s); what is done is kept, the same command goes on"
    elif ended.status == KILLED:
        why = f"killed: most likely it needed more than evaluate.docker.memory, {settings.memory}"
    else:
        why = f"ended with status {ended.status}"
    return f"evaluation in {settings.image}: {why}{':' if said else ''}\n{said}".rstrip()


def caches(environment: Mapping[str, str]) -> tuple[Path, Path]:
    """Where Hugging Face's libraries keep what comes from the hub, and prepared datasets."""
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache/huggingface")
    hub, datasets = environment.get("HF_HUB_CACHE"), environment.get("HF_DATASETS_CACHE")
    return Path(hub or home / "hub").absolute(), Path(datasets or home / "datasets").absolute()


def _docker_run(settings: params.Docker, *, name: str, online: bool) -> list[str]:
    return [
        *("docker", "run", "--rm", "--init", "--pull", "never", "--name", name),
        *("--memory", settings.memory, "--shm-size", settings.shm_size),
        *(("--gpus", _row(settings.gpus)) if settings.gpus else ()),
        *("--user", f"{os.getuid()}:{os.getgid()}"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *(("--env", "HF_TOKEN") if online else ("--network", "none")),
    ]


def _entry(image: str, timeout_s: int, words: Sequence[str]) -> list[str]:
    first, *rest = ["timeout", f"--kill-after={KILL_AFTER_S}", str(timeout_s), *words] if timeout_s else words
    return ["--entrypoint", first, image, *rest]


def _mount(source: Path, target: Path, *, writable: bool) -> tuple[str, str]:
    return "--mount", _row("type=bind", f"source={source}", f"target={target}", *(() if writable else ("readonly",)))


def _row(*fields: str) -> str:
    """Docker reads mounts and GPUs as a row of CSV: `device=0,1` is one field, in quotes."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(fields)
    return text.getvalue()


def _read(plan: Plan) -> Iterator[Path]:
    yield Path(plan.base)
    yield from (Path(subject.folder) for subject in plan.subjects if subject.folder)
    yield from map(Path, (*plan.settings.include, *plan.settings.data.values()))
    yield from (Path(task).parent for task in plan.tasks if Path(task).is_file())


def _written(plan: Plan) -> list[Path]:
    return [Path(folder) for folder in (plan.out, plan.settings.cache) if folder]


def _linked(path: Path) -> set[Path]:
    """Files that links in a folder lead to outside of it, as they do in the hub's cache."""
    if not path.is_dir():
        return set()
    targets = {link.resolve() for link in path.rglob("*") if link.is_symlink()}
    return {target for target in targets if target.exists() and not target.is_relative_to(path.resolve())}


def _lines(process: "subprocess.Popen[str]") -> Iterator[str]:
    assert process.stdout is not None
    return iter(lambda: process.stdout.readline(65536), "")  # type: ignore[union-attr] # it is the pipe


def _not_started(status: int, output: str) -> str:
    remedies = {
        "docker daemon": "start Docker's engine (sudo systemctl start docker), join the group docker, or evaluate on "
        "this machine: evaluate.where local",
        "No such image": "build it: docker build --file docker/evaluate.Dockerfile --tag IMAGE .",
        "could not select device driver": "install NVIDIA's container toolkit, or set evaluate.docker.gpus to nothing "
        "(BENCHMARK_DOCKER_ENABLE_GPU=false)",
    }
    found = (todo for said, todo in remedies.items() if said in output)
    todo = next(found, "build the image anew: docker build --file docker/evaluate.Dockerfile --tag IMAGE .")
    return f"docker run could not start the container (status {status}): {_last(output, 3)}\n{todo}"


def _last(output: str, count: int) -> str:
    lines: Iterable[str] = (line.rstrip() for line in output.splitlines())
    return "\n".join([line for line in lines if line][-count:])


@contextlib.contextmanager
def _window(lines: int) -> Iterator[Callable[[str], None]]:
    """The last lines on the terminal, moving; on what is no terminal, once at the end; with 0, all as they come."""
    if not lines:
        yield lambda line: print(line, end="", flush=True)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    kept: deque[str] = deque(maxlen=lines)
    with Live(console=Console(file=sys.stdout), refresh_per_second=4) as live:

        def show(line: str) -> None:
            kept.append(line.rstrip())
            live.update(Text.from_ansi("\n".join(kept)))

        yield show
