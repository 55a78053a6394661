import math
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from gradeflow import __main__ as cli
from gradeflow import params, tracking
from gradeflow.commands import watch
from gradeflow.errors import TrackingError
from gradeflow.tracking import Point

SETTINGS = {"train": {"max_steps": 40}}
SOURCES = Path(watch.__file__).parents[1]


def log_steps(run: tracking.Run, steps: range) -> None:
    """What a training run logs, in small: accuracy rises, and math is learnt before text."""
    for step in steps:
        run.log_metrics(
            {
                "train/step": step,
                "train/avg_reward": step / 40,
                "train/accuracy": step / 40,
                "train/accuracy_math": 1.0,
                "train/accuracy_text": 0.25,
                "train/entropy": 0.5,
                "train/kl_div": 0.0123,
                "train/dead_group_share": 0.125,
                "train/num_total": 16,
                "train/completion_tokens": 100,
                "rollouts/valid_share": 1.0,
                "rollouts/unscored_share": 0.05,
            },
            step=step,
        )
        time.sleep(0.005)


def shown(run_id: str, now: float | None = None) -> str:
    watched = watch.Watched(tracking.read_facts(run_id))
    watched.look()
    console = Console(width=140, highlight=False)
    with console.capture() as capture:
        console.print(watch.view(watched, time.time() if now is None else now))
    return capture.get()


def row(text: str, label: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.split()[: len(label.split())] == label.split())
    return line.split()[len(label.split()) :]


def test_a_running_run_is_shown_with_figures_by_kind_courses_pace_and_time_left(store: Path) -> None:
    with tracking.start_run("train_grpo", SETTINGS) as run:
        log_steps(run, range(1, 31))
        run.log_metrics({"val_accuracy": 0.5}, step=10)
        run.log_metrics({"val_accuracy": 0.4}, step=20)
        run.flush()
        text = shown(run.id)
    assert text.startswith(f"train_grpo {run.id[:8]}  running for ")
    assert "step 30/40" in text
    assert "steps/s" in text
    assert "tokens/s" in text
    assert "left" in text
    newest = sum(range(11, 31)) / 20 / 40
    assert row(text, "reward") == [f"{newest:.4g}", watch.spark([Point(step, step, 0) for step in range(1, 31)])]
    assert row(text, "accuracy")[0] == f"{newest:.1%}"
    assert (row(text, "math")[0], row(text, "text")[0]) == ("100.0%", "25.0%")
    assert (row(text, "unscored")[0], row(text, "valid")[0]) == ("5.0%", "100.0%")
    assert (row(text, "entropy")[0], row(text, "KL")[0], row(text, "dead groups")[0]) == ("0.5", "0.0123", "12.5%")
    assert row(text, "validation") == ["40.0%", "█▁", *["best", "50.0%", "at", "step", "10"]]


def test_what_is_new_is_seen_with_one_request(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tracking.start_run("train_grpo", SETTINGS) as run:
        log_steps(run, range(1, 4))
        run.flush()
        watched = watch.Watched(tracking.read_facts(run.id))
        watched.look()
        log_steps(run, range(4, 9))
        run.flush()
        monkeypatch.setattr(tracking, "read_history", None)
        watched.look()
        watched.look()
    assert [point.step for point in watched.series["train/avg_reward"]] == [1, 2, 3, 8]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (None, "finished after 0 s"),
        (TrackingError("no: room\nat all"), "failed after 0 s: no: room at all"),
        (ValueError("of a bug"), "failed after 0 s: ValueError: of a bug"),
        (KeyboardInterrupt(), "interrupted after 0 s; the same command goes on"),
    ],
)
def test_how_a_run_ended_is_said(store: Path, end: BaseException | None, said: str) -> None:
    with tracking.start_run("train_grpo", SETTINGS) as run:
        pass
    try:
        with tracking.start_run("train_grpo", SETTINGS, resume=run.id):
            if end:
                raise end
    except (TrackingError, ValueError, KeyboardInterrupt):
        pass
    text = shown(run.id)
    assert said in re.sub(r"after \d+ s", "after 0 s", text)
    assert "no step yet" in text


def test_a_run_that_goes_on_after_a_failure_says_no_more_of_it(store: Path) -> None:
    with pytest.raises(ValueError, match="once"), tracking.start_run("train_grpo", SETTINGS) as run:
        raise ValueError("once")
    assert tracking.read_tags(run.id)[tracking.ERROR] == "ValueError: once"
    with tracking.start_run("train_grpo", SETTINGS, resume=run.id):
        assert tracking.ERROR not in tracking.read_tags(run.id)


def test_a_run_that_was_killed_is_known_by_its_silence(store: Path) -> None:
    with tracking.start_run("train_grpo", SETTINGS) as run:
        log_steps(run, range(1, 3))
        run.flush()
        assert "running for" in shown(run.id)
        later = shown(run.id, time.time() + 3 * 3600 + 5 * 60 + 20)
    assert "nothing new for 3 h 05 min: killed, hanging, or its server was away" in later


def test_the_newest_run_is_meant_unless_one_is_named(store: Path, tmp_path: Path) -> None:
    tracking.connect(params.Tracking(uri=f"sqlite:///{store / 'mlflow.db'}", experiment="watched"), tmp_path)
    with pytest.raises(
        TrackingError, match=r"experiment watched has no train_grpo run yet. This starts one: gradeflow"
    ):
        watch.find("", "watched")
    with tracking.start_run("train_grpo", SETTINGS) as first:
        pass
    time.sleep(0.01)
    with tracking.start_run("train_grpo", SETTINGS) as second:
        pass
    time.sleep(0.01)
    with tracking.start_run("evaluate", {}) as other:
        pass
    assert watch.find("", "watched") == second.id
    assert watch.find(first.id[:8], "watched") == watch.find(first.id, "watched") == first.id
    tracking.note_reuse("train_grpo", first.id)
    assert watch.find("", "watched") == first.id
    with pytest.raises(TrackingError, match="no train_grpo run whose name has 'nothing like it' in it"):
        watch.find("nothing like it", "watched")
    with pytest.raises(TrackingError, match=f"run {other.id} is of evaluate; watch shows runs of train_grpo"):
        watch.find(other.id, "watched")


def test_the_command_prints_once_where_nobody_looks_on(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tracking.start_run("train_grpo", SETTINGS) as run:
        log_steps(run, range(1, 3))
        run.flush()
        monkeypatch.setenv("COLUMNS", "140")
        settings = ["--params", str(SOURCES.parents[1] / "params.yaml")]
        settings += ["--tracking.uri", f"sqlite:///{store / 'mlflow.db'}"]
        cli.run(["watch", run.id[:8], *settings])
    said = capsys.readouterr().out
    assert "step 2/40" in said
    assert "\x1b" not in said


def test_a_terminal_follows_the_run_until_it_ends(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = tracking.start_run("train_grpo", SETTINGS)
    run = opened.__enter__()
    monkeypatch.setattr(watch, "EVERY_S", 0.01)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "140")

    def train() -> None:
        log_steps(run, range(1, 41))
        opened.__exit__(None, None, None)

    threading.Timer(0.3, train).start()
    uri = f"sqlite:///{store / 'mlflow.db'}"
    watch.main(params.load(SOURCES.parents[1] / "params.yaml", {"tracking.uri": uri}), run=run.id, once=False)
    said = capsys.readouterr().out
    assert said.index("no step yet") < said.index("finished after") < said.rindex("step 40/40")


def test_ctrl_c_ends_watch_and_not_the_run(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: watch.Watched) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "EVERY_S", 0.0)
    monkeypatch.setattr(watch.Watched, "look_again", interrupt)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    uri = f"sqlite:///{store / 'mlflow.db'}"
    with tracking.start_run("train_grpo", SETTINGS) as run:
        watch.main(params.load(SOURCES.parents[1] / "params.yaml", {"tracking.uri": uri}), run=run.id, once=False)
        assert tracking.read_facts(run.id).status == "RUNNING"


def test_a_server_that_goes_away_is_said_and_asked_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tracking.start_run("train_grpo", SETTINGS) as run:
        pass
    watched = watch.Watched(tracking.read_facts(run.id))

    def away(_: str) -> tracking.Facts:
        raise TrackingError("nobody there")

    with monkeypatch.context() as patch:
        patch.setattr(tracking, "read_facts", away)
        watched.look_again()
    assert watched.trouble == "nobody there"
    watched.look_again()
    assert watched.trouble == ""


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([1.0], ""),
        ([0.0, 0.5, 1.0], "▁▅█"),
        ([2.0, 2.0], "▁▁"),
        ([0.0, math.nan, 1.0], "▁█"),
    ],
)
def test_a_course_in_bars(values: list[float], bars: str) -> None:
    assert watch.spark([Point(value, step, 0.0) for step, value in enumerate(values)]) == bars


def test_a_long_course_is_drawn_from_means() -> None:
    course = watch.spark([Point(step % 2 + step / 1000, step, 0.0) for step in range(10_000)])
    assert len(course) <= watch.WIDTH
    assert (course[0], course[-1]) == ("▁", "█")
    assert sorted(course) == list(course)
    assert set(watch.spark([Point(0.98, step, 0.0) for step in range(1000)])) == {"▁"}


def test_time_left_leaves_out_the_time_before_a_run_was_resumed(store: Path) -> None:
    at = [0.0, 1.0, 2.0, 50_000.0, 50_001.0, 50_002.0]
    steps = [Point(step, step, when) for step, when in enumerate(at, start=1)]
    with tracking.start_run("train_grpo", SETTINGS) as run:
        line = watch.progress(tracking.read_facts(run.id), steps, 36)
    console = Console(width=140)
    with console.capture() as capture:
        console.print(line)
    assert "1.00 steps/s" in capture.get()
    assert "30 s left" in capture.get()


@pytest.mark.parametrize("name", [watch.STEP, *(name for name, _, _ in watch.ROWS), watch.VALIDATION])
def test_what_is_shown_is_what_training_logs(name: str) -> None:
    others = (path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py") if path.name != "watch.py")
    assert any(f'"{name}"' in text for text in others)


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0 s"), (59.6, "1 min 00 s"), (61, "1 min 01 s"), (7325, "2 h 02 min")]
)
def test_durations(seconds: float, said: str) -> None:
    assert watch.duration(seconds) == said
