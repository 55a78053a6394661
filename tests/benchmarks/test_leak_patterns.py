"""The six published ways in which tasks leak their answers, on a built-in task: each is blocked or flagged.

Where the sandbox blocks a way, the same script gets through it without isolation.
"""

import contextlib
import csv
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradeflow import benchmarks, params
from gradeflow.attempt import Attempt
from gradeflow.benchmarks import Competition, soundness
from gradeflow.errors import DataError
from support import attempts

SHIPPED = Path(__file__).parents[2] / "params.yaml"
CONCLUDE = "<Conclusion>done</Conclusion>"
SUBMIT = "import harness\nopen(harness.inputs['submission'], 'wb').write({content})"
Rows = list[dict[str, str]]


@pytest.fixture
def pumps(tmp_path: Path) -> Competition:
    made = benchmarks.load("mle").competition("builtin-pumps", tmp_path / "data")
    made.prepare()
    return made


def rows(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rewrite(path: Path, table: Rows) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)


def answers(competition: Competition) -> dict[str, str]:
    assert competition.answers is not None
    return {row["id"]: row["failed"] for row in rows(competition.answers)}


def attempted(competition: Competition, codes: list[str], tmp_path: Path, isolation: str = "auto") -> Attempt:
    replies = [*(f"<Experiment>\n{code}\n</Experiment>" for code in codes), CONCLUDE]
    chosen = params.load(
        SHIPPED,
        {
            "solve.log_path": str(tmp_path / "results"),
            "solve.memory_mb": "1024",
            "solve.review": "false",
            "sandbox.isolation": isolation,
        },
    )
    return attempts.attempted(chosen, competition, replies)


def telemetry(attempt: Attempt, name: str) -> Rows:
    path = attempt.workspace.telemetry / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


# Flagged by the audit


def beside(competition: Competition) -> None:
    """An auxiliary file: service records that were written after the month."""
    records = [{"pump": name, "visits": "0" if failed == "0" else "3"} for name, failed in answers(competition).items()]
    rewrite(competition.public_dir / "service.csv", records)


def in_names(competition: Competition) -> None:
    (competition.public_dir / "photos").mkdir()
    for name, failed in answers(competition).items():
        (competition.public_dir / "photos" / f"{name}-{'worn' if failed == '1' else 'good'}.jpg").touch()


def in_order(competition: Competition) -> None:
    known, path = answers(competition), competition.public_dir / "test.csv"
    rewrite(path, sorted(rows(path), key=lambda row: known[row["id"]]))


def derived(competition: Competition) -> None:
    """The whole fleet, as it was before the ids were given and the test rows drawn."""
    known = answers(competition)
    train, test = (rows(competition.public_dir / f"{name}.csv") for name in ("train", "test"))
    fleet = [*train, *({**row, "failed": known[row["id"]]} for row in test)]
    rewrite(
        competition.public_dir / "fleet.csv",
        [
            {name: value for name, value in row.items() if name != "id"}
            for row in sorted(fleet, key=lambda row: row["age"])
        ],
    )


@pytest.mark.parametrize(
    ("leak", "said"),
    [
        (beside, "the column visits of service.csv tells failed"),
        (in_names, "file names such as "),
        (in_order, "the order of rows in test.csv tells failed"),
        (derived, "fleet.csv has 400 of the 400 test rows, and its column failed tells their failed"),
    ],
)
def test_a_leak_through_public_files_is_flagged(
    leak: Callable[[Competition], None], said: str, pumps: Competition, tmp_path: Path
) -> None:
    assert soundness.inspect(pumps, tmp_path) == []
    leak(pumps)
    (found,) = soundness.inspect(pumps, tmp_path)
    assert (found.check, found.unusable) == ("leak", True)
    assert found.said.startswith(said)


# Blocked by workspace and sandbox


@pytest.mark.parametrize("isolation", ["auto", "none"])
def test_the_answers_beside_the_public_files_are_out_of_reach(
    isolation: str, pumps: Competition, tmp_path: Path
) -> None:
    code = SUBMIT.format(content=f"open({str(pumps.answers)!r}, 'rb').read()")
    attempt = attempted(pumps, [code], tmp_path, isolation)
    assert attempt.report.score == (1.0 if isolation == "none" else None)
    (run,) = telemetry(attempt, "sandbox_runs")
    assert run["exc_type"] == (None if isolation == "none" else "FileNotFoundError")


def test_a_link_among_the_public_files_is_refused(pumps: Competition, tmp_path: Path) -> None:
    assert pumps.answers is not None
    (pumps.public_dir / "more.csv").symlink_to(pumps.answers)
    with pytest.raises(DataError, match=r"more\.csv: a link; public data must be plain files"):
        attempted(pumps, [], tmp_path)


def test_what_an_agent_sees_does_not_depend_on_how_good_its_submission_is(pumps: Competition, tmp_path: Path) -> None:
    """A test-feedback loop has nothing to go by: submissions are graded once, when the work is over."""
    worst = "id,failed\n" + "".join(f"{name},{1 - int(failed)}\n" for name, failed in answers(pumps).items())
    best = "id,failed\n" + "".join(f"{name},{failed}\n" for name, failed in answers(pumps).items())
    seen = []
    for number, pair in enumerate(([worst, worst], [worst, best], ["nonsense", best])):
        codes = [SUBMIT.format(content=repr(text.encode())) for text in pair]
        attempt = attempted(pumps, codes, tmp_path / str(number))
        assert attempt.report.score == (0.0 if pair[1] == worst else 1.0)
        assert len(telemetry(attempt, "grade_reports")) == 1
        looks = [event for event in telemetry(attempt, "conversation") if event["event"] == "observation"]
        seen.append([event["payload"] for event in looks])
    assert len(seen[0]) == 2
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("isolation", ["auto", "none"])
def test_the_grader_is_not_there_to_be_asked(isolation: str, pumps: Competition, tmp_path: Path) -> None:
    """Its own answers would be as good as a score: those of a built-in task are made from its seed."""
    source = Path(benchmarks.__file__).parents[2]
    code = (
        f"import sys\nsys.path.insert(0, {str(source)!r})\nfrom gradeflow.benchmarks.mle import Fleet\n"
        "text = 'id,failed\\n' + ''.join(f'{p.id},{int(p.failed)}\\n' for p in Fleet.make(0).test)\n"
    ) + SUBMIT.format(content="text.encode()")
    attempt = attempted(pumps, [code], tmp_path, isolation)
    assert attempt.report.score == (1.0 if isolation == "none" else None)


@contextlib.contextmanager
def serving(content: bytes) -> Iterator[tuple[str, list[str]]]:
    """A web server of this machine that has the answers, and who asked it."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/answers.csv", asked
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("isolation", ["auto", "none"])
def test_answers_on_the_network_cannot_be_fetched(isolation: str, pumps: Competition, tmp_path: Path) -> None:
    assert pumps.answers is not None
    with serving(pumps.answers.read_bytes()) as (url, asked):
        fetch = f"urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open({url!r}, timeout=5).read()"
        code = "import urllib.request\n" + SUBMIT.format(content=fetch)
        attempt = attempted(pumps, [code], tmp_path, isolation)
    assert (attempt.report.score, asked) == ((1.0, ["/answers.csv"]) if isolation == "none" else (None, []))
