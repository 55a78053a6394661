import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from gradeflow import params, tracking
from gradeflow.errors import TrackingError, Unsent
from gradeflow.tracking.courier import Courier
from gradeflow.tracking.sender import Sender
from support.local_server import Listening, LocalServer
from support.mlflow_server import MlflowServer
from support.tracked import client, history, judged, status

SETTINGS = params.Tracking(uri="", experiment="gradeflow-tests")
NOBODY = "http://127.0.0.1:9"
"""An address where no server listens."""


class StallingServer(LocalServer):
    """A stand-in for a tracking server that takes every request and answers none."""

    def __init__(self) -> None:
        self.asked = 0
        super().__init__(_Stalling)


class _Stalling(BaseHTTPRequestHandler):
    server: Listening

    def do_POST(self) -> None:
        self.server.owner.asked += 1
        self.server.owner.closing.wait()


@pytest.fixture(scope="module")
def courier() -> Iterator[Courier]:
    started = Courier()
    started.start()
    wait_for(lambda: started.ready)
    yield started
    started.stop()


@pytest.fixture(params=["here", "apart"], autouse=True)
def way(request: pytest.FixtureRequest, courier: Courier, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything is true of both ways to the store."""
    monkeypatch.setattr(tracking.run, "COURIER", courier)
    monkeypatch.setattr(tracking, "start_run", partial(tracking.start_run, apart=request.param == "apart"))
    return str(request.param)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds at a run's end are tenths of one."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for name in ("away_s", "slow_s", "soon_s"):
        monkeypatch.setattr(Sender, name, 0.3)


def log_all(run: tracking.Run, step: int, note: Path) -> None:
    """One of everything that a stage logs while it runs."""
    run.log_metrics({"train/a": float(step), "train/b": step / 2}, step=step)
    run.set_tags({f"tag-{step}": "set"})
    run.log_table(f"tables/{step}.json", [{"step": step}])
    note.write_text(f"note {step}")
    run.log_artifact(note, f"notes/{step}")
    note.unlink()
    run.log_dataset(f"data-{step}", Path("data.jsonl"), "a" * 32, "training", 1)
    run.log_rollout_trace(judged(), step, "gpt-oss")


def check_all(run: tracking.Run, steps: range) -> None:
    """All that `log_all` has logged is there, once."""
    assert history(run.id, "train/a") == [(step, float(step)) for step in steps]
    assert history(run.id, "train/b") == [(step, step / 2) for step in steps]
    tags = tracking.read_tags(run.id)
    assert [tags[f"tag-{step}"] for step in steps] == ["set"] * len(steps)
    tables = [table["path"] for table in json.loads(tags["mlflow.loggedArtifacts"])]
    assert tables == [f"tables/{step}.json" for step in steps]
    for step in steps:
        assert json.loads(tracking.read_text(run.id, f"tables/{step}.json")) == {"columns": ["step"], "data": [[step]]}
        assert tracking.read_text(run.id, f"notes/{step}/note.txt") == f"note {step}"
    assert tracking.read_datasets(run.id) == dict.fromkeys((f"data-{step}" for step in steps), "a" * 32)
    traces = client().search_traces(locations=[run.experiment], run_id=run.id)
    assert sorted(int(trace.info.tags["step"]) for trace in traces) == list(steps)
    assert {(len(trace.info.assessments), len(trace.data.spans)) for trace in traces} == {(1, 9)}


def test_thousands_of_metric_points_all_arrive(store: Path) -> None:
    with tracking.start_run("many", {}) as run:
        for step in range(500):
            run.log_metrics({f"train/m{number}": float(step) for number in range(5)}, step=step)
    assert history(run.id, "train/m3") == [(step, float(step)) for step in range(500)]


def test_a_metric_point_costs_microseconds_at_the_call(store: Path) -> None:
    with tracking.start_run("cheap", {}) as run:
        started = time.perf_counter()
        for step in range(100):
            run.log_metrics({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, step)
        assert (time.perf_counter() - started) / 400 < 100e-6


def test_what_is_logged_is_in_the_store_while_the_run_goes_on(store: Path, tmp_path: Path) -> None:
    with tracking.start_run("live", {}) as run:
        log_all(run, 0, tmp_path / "note.txt")
        assert run.flush()
        check_all(run, range(1))
        assert status(run.id) == "RUNNING"


def test_a_server_that_is_away_for_a_while_loses_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with tracking.start_run("away", {}) as run:
        monkeypatch.setattr(run._sender, "_client", client(NOBODY))
        for step in range(2):
            log_all(run, step, tmp_path / "note.txt")
            run._sender._wake.set()
        wait_for(lambda: bool(run._sender.trouble))
        monkeypatch.setattr(run._sender, "_client", client())
        log_all(run, 2, tmp_path / "note.txt")
    assert status(run.id) == "FINISHED"
    check_all(run, range(3))
    said = capsys.readouterr().err
    assert said.count(f"gradeflow: {NOBODY}: no MLflow server answers there. The run goes on; what it logs waits") == 1
    assert not (store / ".gradeflow" / "outbox" / run.id).exists()


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_server_that_stays_away_leaves_everything_to_the_next_command(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[tracking.Run] = []

    def stage() -> None:
        with tracking.start_run("gone", {}, fingerprint="f-gone") as run:
            runs.append(run)
            log_all(run, 0, tmp_path / "note.txt")
            monkeypatch.setattr(run._sender, "_client", client(NOBODY))

    with pytest.raises(Unsent, match=r"no MLflow server answers there. What run .* is not lost: it waits in") as caught:
        stage()
    (run,) = runs
    assert caught.value.status == 75
    assert status(run.id) == "RUNNING"
    run._sender._thread.join()
    tracking.connect(SETTINGS, store)
    check_all(run, range(1))
    assert tracking.find_run("gone", "f-gone") == run.id
    assert f"sending what an earlier command logged in run {run.id} and could not send" in capsys.readouterr().err


def test_ctrl_c_is_not_held_up_by_a_server_that_is_gone(
    store: Path, monkeypatch: pytest.MonkeyPatch, impatient: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def stage() -> None:
        with tracking.start_run("gone", {}) as run:
            monkeypatch.setattr(run._sender, "_client", client(NOBODY))
            run.log_metrics({"a": 1.0})
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stage()
    assert time.monotonic() - started < 5
    assert "is not lost: it waits in" in capsys.readouterr().err


def test_the_stage_does_not_wait_for_a_server_that_does_not_answer(
    store: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    def stage() -> None:
        with tracking.start_run("stalled", {}) as run:
            monkeypatch.setattr(run._sender, "_client", client(server.url))
            run.log_metrics({"a": 0.0})
            run._sender._wake.set()
            wait_for(lambda: server.asked)
            started = time.perf_counter()
            for step in range(1000):
                run.log_metrics({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, step)
            took.append(time.perf_counter() - started)

    took: list[float] = []
    with StallingServer() as server, pytest.raises(Unsent, match="the tracking store does not answer"):
        stage()
    assert took[0] / 4000 < 100e-6


def test_what_a_killed_process_has_logged_is_sent_by_the_next(store: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from gradeflow import params, tracking
tracking.connect(params.Tracking(uri="", experiment="gradeflow-tests"), Path({str(store)!r}))
with tracking.start_run("killed", {{}}, fingerprint="f-killed") as run:
    for step in range(3000):
        run.log_metrics({{"a": float(step)}}, step)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, cwd=store)
    assert ended.returncode == -signal.SIGKILL
    tracking.connect(SETTINGS, store)
    resume = tracking.find_unfinished("killed", "f-killed")
    with tracking.start_run("killed", {}, resume=resume, fingerprint="f-killed") as run:
        run.log_metrics({"a": 3000.0}, 3000)
    assert history(run.id, "a") == [(step, float(step)) for step in range(3001)]


LOGGER = """
import os, random, signal, sys, threading, time
from pathlib import Path
from gradeflow import params, tracking
from gradeflow.tracking import sender

def die():
    time.sleep(random.uniform(0.0, 0.1))
    os.kill(os.getpid(), signal.SIGKILL)

last = int(sys.argv[1])
sender.PACE_S = 0.02
journal = Path("journal.txt")
tracking.connect(params.Tracking(uri="", experiment="killed"), Path())
way = sys.argv[2]
resume = tracking.find_unfinished("killed", way)
run = tracking.start_run("killed", {}, resume=resume, fingerprint=way, apart=way == "apart")
with run as run, journal.open("a", buffering=1) as file:
    done = sum(line.startswith("end") for line in journal.read_text().splitlines())
    for step in range(done, 250):
        if step == last:
            threading.Thread(target=die, daemon=True).start()
        print(f"begin {step}", file=file)
        run.log_metrics({"a": float(step)}, step)
        run.log_text(str(step), f"steps/{step % 50}.txt")
        print(f"end {step}", file=file)
        time.sleep(0.002)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_often_has_everything_once_at_its_end(store: Path, tmp_path: Path, way: str) -> None:
    """Killed while it logs or sends, at random; only the step that a kill cut off may be there for each try of it."""
    kills = (60, 150)
    same_store = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{store / 'mlflow.db'}"}
    for last in (*kills, 1000):
        command = [sys.executable, "-c", LOGGER, str(last), way]
        ended = subprocess.run(command, cwd=tmp_path, env=same_store, check=False)
        assert ended.returncode == (-signal.SIGKILL if last in kills else 0)
    run = tracking.find_run("killed", way)
    assert run
    tries = Counter(
        int(line.split()[1]) for line in (tmp_path / "journal.txt").read_text().splitlines() if line[0] == "b"
    )
    found = Counter(step for step, _ in history(run, "a"))
    assert set(found) == set(range(250))
    assert sum(tries.values()) <= 250 + len(kills)
    assert all(1 <= found[step] <= tries[step] for step in found)
    assert [tracking.read_text(run, f"steps/{number}.txt") for number in range(50)] == [str(200 + n) for n in range(50)]
    assert not list((tmp_path / ".gradeflow" / "outbox").iterdir())


def test_what_was_sent_already_is_stored_once(store: Path, tmp_path: Path) -> None:
    """A process that is killed between sending a part and removing it sends it again."""
    outbox, kept = store / ".gradeflow" / "outbox", tmp_path / "kept"
    with tracking.start_run("twice", {}) as run:
        log_all(run, 0, tmp_path / "note.txt")
        run.log_metrics({"nan": float("nan"), "inf": float("inf")})
        shutil.copytree(outbox / run.id, kept)
    shutil.copytree(kept, outbox / run.id)
    tracking.connect(SETTINGS, store)
    assert not (outbox / run.id).exists()
    check_all(run, range(1))
    assert len(history(run.id, "nan")) == len(history(run.id, "inf")) == 1


def test_what_belongs_to_another_store_waits_for_it(store: Path, tmp_path: Path) -> None:
    stranger = store / ".gradeflow" / "outbox" / ("0" * 32)
    (stranger / "000001").mkdir(parents=True)
    (stranger / "000001" / "entries.jsonl").write_text('{"tags": {"a": "b"}}\n')
    tracking.connect(SETTINGS, store)
    assert (stranger / "000001" / "entries.jsonl").exists()
    shutil.rmtree(stranger)


def test_a_point_that_the_store_refuses_costs_no_other(store: Path) -> None:
    run = tracking.start_run("bad", {})
    opened = run.__enter__()
    opened.log_metrics({"good": 1.0, "/not/a/path/": 1.0, "better": 2.0})
    with pytest.raises(TrackingError, match="refused 1 of the things logged, the first because: Invalid value"):
        run.__exit__(None, None, None)
    assert tracking.read_metrics(opened.id) == {"good": 1.0, "better": 2.0}
    assert status(opened.id) == "FAILED"
    refused = store / ".gradeflow" / "outbox" / opened.id / "refused.jsonl"
    assert '"/not/a/path/"' in refused.read_text()


def test_two_processes_do_not_write_to_one_run(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.run, "OPEN_S", 0.1)
    with tracking.start_run("one", {}) as run:
        second = tracking.start_run("one", {}, resume=run.id)
        with pytest.raises(TrackingError, match=f"run {run.id}: something else is writing to it"):
            second.__enter__()


@pytest.fixture
def server(tmp_path: Path, store: Path) -> Iterator[MlflowServer]:
    with MlflowServer(tmp_path) as server:
        tracking.connect(params.Tracking(uri=server.url, experiment="x"), tmp_path)
        yield server


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_has_everything_once(
    server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run outlives two outages: one in its middle, one at its end."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    runs: list[tracking.Run] = []

    def stage() -> None:
        with tracking.start_run("x", {}, fingerprint="f") as run:
            runs.append(run)
            for step in range(10):
                log_all(run, step, tmp_path / "note.txt")
                time.sleep(0.2)
            threading.Timer(0.1, server.kill).start()  # in the middle of what is being sent
            for step in range(10, 20):
                log_all(run, step, tmp_path / "note.txt")
            wait_for(lambda: bool(run._sender.trouble))
            server.start()
            assert run.flush()
            check_all(run, range(20))
            log_all(run, 20, tmp_path / "note.txt")
            server.kill()
            monkeypatch.setattr(Sender, "away_s", 1.0)

    with pytest.raises(Unsent):
        stage()
    (run,) = runs
    run._sender._thread.join()
    server.start()
    tracking.connect(params.Tracking(uri=server.url, experiment="x"), tmp_path)
    check_all(run, range(21))
    assert tracking.find_run("x", "f") == run.id
    assert capsys.readouterr().err.count("The run goes on; what it logs waits in") == 2
