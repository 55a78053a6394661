"""What it costs to log metrics: our `Run.log_metrics` beside MLflow's own calls, on sqlite and on a server.

    python perf/tracking.py

A step logs so many points. `at the call` is what the training thread pays; `points/s` counts until the store has all;
`CPU` is what this process spends on a point, in all its threads. Then steps of real work, with and without tracking.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlflow
import numpy as np

from gradeflow import params, tracking

Log = Callable[[Mapping[str, float], int], object]


@dataclass(frozen=True)
class Cost:
    call_us: float
    points_a_second: float
    cpu_us: float


@contextmanager
def ours() -> Iterator[Log]:
    with tracking.start_run("perf", {}, apart=True) as run:
        yield run.log_metrics


def theirs() -> mlflow.ActiveRun:
    return mlflow.start_run(experiment_id=mlflow.get_experiment_by_name("perf").experiment_id)


@contextmanager
def one_by_one() -> Iterator[Log]:
    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            mlflow.log_metric(name, value, step)

    with theirs():
        yield log


@contextmanager
def a_step_at_once() -> Iterator[Log]:
    with theirs():
        yield mlflow.log_metrics


@contextmanager
def asynchronous() -> Iterator[Log]:
    with theirs():
        yield lambda values, step: mlflow.log_metrics(values, step, synchronous=False)
        mlflow.flush_async_logging()


@contextmanager
def buffered() -> Iterator[Log]:
    os.environ["MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS"] = "1"
    try:
        with asynchronous() as log:
            yield log
    finally:
        del os.environ["MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS"]


WAYS = {
    "Run.log_metrics": ours,
    "mlflow.log_metric, each point": one_by_one,
    "mlflow.log_metrics, each step": a_step_at_once,
    "the same, asynchronous": asynchronous,
    "the same, buffered for 1 s": buffered,
}


def values(points: int, step: int) -> dict[str, float]:
    return {f"train/metric_{number}": step + number / 7 for number in range(points)}


def cost(way: Callable[[], AbstractContextManager[Log]], points: int, steps: int) -> Cost:
    calls, cpu, began = 0.0, time.process_time(), time.perf_counter()
    with way() as log:
        for step in range(steps):
            found = values(points, step)
            called = time.perf_counter()
            log(found, step)
            calls += time.perf_counter() - called
    count = points * steps
    return Cost(calls / count * 1e6, count / (time.perf_counter() - began), (time.process_time() - cpu) / count * 1e6)


def work(seconds: float) -> Callable[[], float]:
    """A step as training has it: small matrix products, each of which lets go of the interpreter."""
    matrix = np.random.default_rng(0).random((384, 384), dtype=np.float32)

    def step(products: int) -> float:
        began = time.perf_counter()
        for _ in range(products):
            np.tanh(matrix @ matrix)
        return time.perf_counter() - began

    step(50)
    products = max(1, round(seconds / min(step(100) / 100 for _ in range(5))))
    return lambda: step(products)


def step_costs(seconds: float, points: int, rounds: int) -> tuple[float, float, float]:
    """Mean seconds of a step without tracking and with it, and of the call alone; thirty steps of each in turn."""
    one = work(seconds)
    without, tracked, calls = [], [], []
    with tracking.start_run("perf", {}, apart=True) as run:
        for begin in range(0, rounds * 30, 30):
            without += [one() for _ in range(30)]
            for step in range(begin, begin + 30):
                taken = one()
                began = time.perf_counter()
                run.log_metrics(values(points, step), step)
                calls.append(time.perf_counter() - began)
                tracked.append(taken + calls[-1])
            run.flush()  # what the sender still has is not the next steps' to pay
    return statistics.fmean(without), statistics.fmean(tracked), statistics.fmean(calls)


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """A real `mlflow server` over sqlite, in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["mlflow", "server", "--port", str(port), "--workers", "1", "--backend-store-uri"]
    command += [f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "artifacts")]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=folder, env=environment, stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}"
        while not answers(url):
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    except OSError:
        return False


def table(uri: str, folder: Path, points: int, given: Mapping[str, int]) -> None:
    tracking.connect(params.Tracking(uri=uri, experiment="perf"), folder)
    with ours() as log:
        log(values(points, 0), 0)  # what is imported and made once is not counted
    found = {name: cost(way, points, given[name]) for name, way in WAYS.items()}
    best = found["Run.log_metrics"]
    for name, one in found.items():
        figures = f"{one.call_us:12.1f}{one.points_a_second:12.0f}{one.cpu_us:10.0f}"
        ratios = f"{one.call_us / best.call_us:14.1f}{best.points_a_second / one.points_a_second:12.2f}"
        print(f"{name:34}{figures}{ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=64, help="metric points a step")
    parser.add_argument(
        "--steps", type=int, default=300, help="steps logged; a tenth of that where each point is a call"
    )
    parser.add_argument("--step_s", type=float, default=0.4, help="seconds of a step of real work")
    parser.add_argument("--rounds", type=int, default=3, help="times thirty such steps, with and without tracking")
    given = parser.parse_args()
    steps = dict.fromkeys(WAYS, given.steps) | {"mlflow.log_metric, each point": given.steps // 10}
    print(f"{given.points} points a step, {given.steps} steps\n")
    print(f"{'':34}{'at the call':>12}{'points/s':>12}{'CPU':>10}{'call: times':>14}{'points/s:':>12}")
    print(f"{'':34}{'us a point':>12}{'':>12}{'us/point':>10}{'ours':>14}{'ours times':>12}")
    with tempfile.TemporaryDirectory() as name, server(Path(name)) as url:
        os.chdir(name)
        for store, uri in {"sqlite": "", "a server": url}.items():
            print(f"\n{store}")
            table(uri, Path(name), given.points, steps)
            without, tracked, call = step_costs(given.step_s, given.points, given.rounds)
            print(
                f"a step of work: {without:.4f} s, tracked {tracked:.4f} s ({tracked / without - 1:+.2%}), "
                f"of which in the call {call / without:.3%}"
            )


if __name__ == "__main__":
    main()
