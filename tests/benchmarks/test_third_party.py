"""Graders of others: run where they can harm nothing, whatever they import, and never mistaken about a score."""

import asyncio
import os
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gradeflow.benchmarks.catalogue import Benchmark
from gradeflow.benchmarks.report import CompetitionReport, grade_csv
from gradeflow.errors import DataError, GraderError
from gradeflow.sandbox import bubblewrap
from support.competitions import opened, within, write
from support.sandboxes import both

Grade = Callable[..., CompetitionReport]


@pytest.fixture
def grade(tmp_path: Path) -> Iterator[Grade]:
    """Grade an answer by a grader's source, in one benchmark for the whole test."""
    benchmarks: dict[str, Benchmark] = {}

    def graded(
        source: str = "",
        answer: str = "@cost[12.5]",
        *,
        family: str = "engineering",
        content: bytes | None = None,
        name: str = "submission.csv",
        limits: Mapping[str, float] | None = None,
        **task: Any,
    ) -> CompetitionReport:
        data = write(tmp_path, family, grade=source, **task)
        path = tmp_path / name
        path.write_bytes(f"id,answer\n0,{answer}\n".encode() if content is None else content)
        if family not in benchmarks:
            benchmarks[family] = opened(data, family, **(limits or {}))
            benchmarks[family].__enter__()
        return grade_csv(path, benchmarks[family].competition("plant-7"))

    yield graded
    for benchmark in benchmarks.values():
        benchmark.__exit__(None, None, None)


@both
def test_a_task_s_own_grader_gives_the_score(tmp_path: Path, isolation: str) -> None:
    data = write(tmp_path)
    with opened(data, isolation=isolation) as benchmark:
        task = benchmark.competition("plant-7")
        assert task.gold_submission is not None
        for _ in range(3):
            gold, sample = (grade_csv(path, task) for path in (task.gold_submission, task.sample_submission))
            assert (gold.score, gold.gold_medal, gold.above_median) == (1.0, True, True)
            assert (sample.score, sample.any_medal, sample.valid_submission) == (0.0, False, True)


IMPORTS = """
    {imports}
    def grade(submission, answers):
        if {names}:
            return 0.25
"""


@pytest.mark.parametrize(
    ("family", "imports", "names"),
    [
        ("mle", "from mlebench.grade_helpers import InvalidSubmissionError", "InvalidSubmissionError"),
        ("mle", "from mlebench.utils import read_csv, get_logger, extract", "read_csv and get_logger and extract"),
        ("mle", "from mlebench.competitions.utils import prepare_for_auroc_metric as f", "f"),
        ("mle", "from mlebench.metrics import mean_average_precision_at_k as f", "f([{1}], [[1]], 1) == 1"),
        ("mle", "from .grade_helpers import InvalidSubmissionError", "InvalidSubmissionError"),
        ("mle", "from .utils import rle_decode, read_csv", "rle_decode and read_csv"),
        ("mle", "from .metrics import dice_coefficient", "dice_coefficient"),
        ("mle", "from .classes import CLASSES", "CLASSES == ['a', 'b']"),
        ("mle", "from . import classes", "classes.CLASSES"),
        ("mle", "from .. import plant_shared", "plant_shared.SHARED"),
        ("engineering", "from benchmarks.engineeringbench.grade_helpers import InvalidSubmissionError as E", "E"),
        ("science", "from benchmarks.sciencebench.image_eval import THRESHOLD", "THRESHOLD == 60"),
        ("science", "from benchmarks.sciencebench.utils import read_csv", "read_csv"),
    ],
)
def test_graders_import_helpers_that_are_not_installed(grade: Grade, family: str, imports: str, names: str) -> None:
    more = {
        "classes.py": "CLASSES = ['a', 'b']\n",
        "../plant_shared.py": "SHARED = True\n",
        "../../image_eval.py": "THRESHOLD = 60\n",
    }
    assert grade(IMPORTS.format(imports=imports, names=names), family=family, more=more).score == 0.25


def test_a_package_s_own_helpers_come_before_ours_unless_they_cannot_be_imported(grade: Grade) -> None:
    source = "from .utils import WHOSE\nfrom .grade_helpers import InvalidSubmissionError\n"
    source += "def grade(submission, answers):\n    return WHOSE\n"
    more = {
        "../../utils.py": "WHOSE = 0.75\n",
        "../../grade_helpers.py": "import a_module_that_is_nowhere\nclass InvalidSubmissionError(Exception): ...\n",
    }
    assert grade(source, family="mle", more=more).score == 0.75


@pytest.mark.parametrize("seen", [True, False], ids=["among the packages", "as an editable installation"])
def test_an_installed_mlebench_has_the_tasks_and_the_helpers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    source = "from mlebench.grade_helpers import HALF\ndef grade(submission, answers):\n    return HALF\n"
    data = write(tmp_path / "made", "mle", grade=source)
    site = (tmp_path / "made" / "benchmarks").rename(tmp_path / "site")
    (site / "mlebench" / "__init__.py").write_text("")
    (site / "mlebench" / "grade_helpers.py").write_text("HALF = 0.5\n")
    monkeypatch.syspath_prepend(site)
    packages = (*bubblewrap.packages(), *([str(site)] if seen else []))
    monkeypatch.setattr(bubblewrap, "packages", lambda: packages)
    bubblewrap.shown.cache_clear()
    try:
        with opened(data, "mle") as benchmark:
            task = benchmark.competition("plant-7")
            assert grade_csv(task.sample_submission, task).score == 0.5
    finally:
        bubblewrap.shown.cache_clear()


def test_a_grader_may_be_named_by_its_file(grade: Grade) -> None:
    config = "grader: {name: mine, grade_fn: 'score.py:points'}"
    more = {"score.py": "from .classes import HALF\ndef points(submission, answers):\n    return HALF\n"}
    assert grade(config=config, more=more | {"classes.py": "HALF = 0.5\n"}).score == 0.5


INVALID = """
    from {module} import InvalidSubmissionError

    class WorseError(InvalidSubmissionError): ...

    def grade(submission, answers):
        raise {raised}("no such answer")
"""


@pytest.mark.parametrize("module", [".grade_helpers", "mlebench.grade_helpers", ".utils"])
@pytest.mark.parametrize("raised", ["InvalidSubmissionError", "WorseError"])
@pytest.mark.parametrize("board", ["score\n0.9\n0.1\n", "score\n0.1\n0.9\n"])
def test_what_a_grader_calls_invalid_has_no_score_and_no_medal_in_either_direction(
    grade: Grade, module: str, raised: str, board: str
) -> None:
    report = grade(INVALID.format(module=module, raised=raised), family="mle", leaderboard=board)
    assert (report.score, report.valid_submission, report.submission_exists) == (None, False, True)
    assert not any((report.any_medal, report.gold_medal, report.above_median))


@pytest.mark.parametrize(
    ("body", "cause", "message"),
    [
        ("raise ValueError('no column cost')", "grader_crashed", r"ValueError: no column cost \(grade\.py, line 2\)"),
        ("assert len(submission) == 9", "grader_crashed", "AssertionError"),
        ("return submission['price'].sum()", "grader_crashed", "KeyError: 'price'"),
        ("raise SystemExit(0)", "grader_crashed", "SystemExit"),
        ("import os; os._exit(0)", "grader_crashed", "ended with status 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "grader_crashed", "ended with status -9"),
        ("import not_installed_anywhere", "grader_crashed", "ModuleNotFoundError"),
        ("return None", "grader_crashed", "TypeError"),
        ("return float('nan')", "grader_no_number", "nan"),
        ("return float('inf')", "grader_no_number", "inf"),
        ("bytearray(1 << 31)\n    return 1.0", "grader_crashed", "MemoryError"),
        ("import time; time.sleep(60)", "grader_timed_out", r"more than 2 s; grade\.wall_s"),
    ],
)
def test_a_grader_that_breaks_is_a_fault_and_the_next_submission_is_graded(
    grade: Grade, body: str, cause: str, message: str
) -> None:
    limits = {"wall_s": 2.0, "memory_mb": 1024}
    with pytest.raises(GraderError, match=message) as caught:
        grade(f"def grade(submission, answers):\n    {body}\n", limits=limits)
    assert caught.value.cause == cause
    assert grade(within(0.05)).score == 1.0


def test_a_grader_that_takes_the_gold_submission_may_refuse_another_by_assert(grade: Grade) -> None:
    checking = (
        "def grade(submission, answers):\n    assert list(submission) == ['id', 'answer'], 'columns'\n    return 1.0\n"
    )
    assert grade(checking).score == 1.0
    report = grade(checking, content=b"id,price\n0,1\n")
    assert (report.score, report.submission_exists, report.valid_submission) == (None, True, False)


def test_a_grader_that_cannot_be_imported_is_a_fault(grade: Grade) -> None:
    with pytest.raises(GraderError, match="SyntaxError"):
        grade("def grade(:\n")
    with pytest.raises(GraderError, match="AttributeError"):
        grade("x = 1\n")


@pytest.mark.parametrize(
    "content", [b'"', b"\xff\xfe\xff", b"a,b\n1\n2,3,4,5\n", b'a\n"open'], ids=["quote", "bytes", "ragged", "open"]
)
def test_what_is_no_table_is_invalid_before_a_grader_sees_it(grade: Grade, content: bytes) -> None:
    report = grade("def grade(submission, answers):\n    return 1.0\n", content=content)
    assert (report.score, report.valid_submission) == (None, False)


def test_an_empty_file_is_no_table_except_to_mle_bench(grade: Grade) -> None:
    source = "def grade(submission, answers):\n    return float(len(submission) + len(submission.columns))\n"
    assert grade(source, content=b"").valid_submission is False
    assert grade(source, content=b"", family="mle").score == 0.0


def test_answers_in_json_lines_are_a_list(grade: Grade) -> None:
    source = "def grade(submission, answers):\n    return float(answers[1]['x'])\n"
    assert grade(source, answers={"test.jsonl": '{"x": 1}\n{"x": 2}\n'}).score == 2.0


def test_numbers_are_read_exactly_where_the_family_does(grade: Grade) -> None:
    source = "def grade(submission, answers):\n    return float(submission['answer'][0] == 0.1 + 0.2)\n"
    assert grade(source, "0.30000000000000004", family="mle").score == 1.0


def test_answers_that_are_missing_are_named_with_what_makes_them(tmp_path: Path) -> None:
    data = write(tmp_path)
    (data / "competitions/plant-7/prepared/private/answer.csv").unlink()
    with opened(data) as benchmark:
        task = benchmark.competition("plant-7")
        with pytest.raises(DataError, match=r"answer\.csv: no such file\. `gradeflow prepare`, with .*--task plant-7"):
            grade_csv(task.sample_submission, task)


def test_a_file_of_another_kind_than_the_task_asks_for_is_invalid(grade: Grade) -> None:
    assert grade(within(0.05), name="submission.npy").valid_submission is False


@pytest.mark.parametrize(("family", "wins"), [("mle", True), ("science", False)])
def test_a_leaderboard_of_baselines_gives_no_medals(grade: Grade, family: str, wins: bool) -> None:
    report = grade(within(0.05), family=family, leaderboard="submission_id,score,username,date\nrandom,0.0,a,b\n")
    assert (report.score, report.gold_threshold) == (1.0, 0.0)
    assert (report.any_medal, report.gold_medal, report.above_median) == (wins, wins, wins)


TABLES = """
    def grade(submission, answers):
        return float(submission.round(3).equals(answers.round(3)))
"""
TABLE = pd.DataFrame(
    {
        "id": range(3),
        "name": ["a", "b", None],
        "value": [0.5, 1e-9, float("nan")],
        "flag": [True, False, True],
        "when": pd.to_datetime(["2024-01-01", "2024-01-02", None]),
        "kind": pd.Categorical(["x", "y", "x"]),
    }
)


@pytest.mark.parametrize(
    "table",
    [TABLE, TABLE.set_index(["id", "name"]), TABLE.set_index("when"), TABLE["value"]],
    ids=["table", "levels", "times", "series"],
)
def test_a_pickled_table_is_read_as_data(grade: Grade, table: Any) -> None:
    content = pickle.dumps(table)
    task: Any = {"answers": {"answer.pkl": content}, "sample": {"sample.pkl": pickle.dumps(table.head(1))}}
    report = grade(TABLES, family="science", content=content, name="submission.pkl", **task)
    assert report.score == 1.0
    report = grade(TABLES, family="science", content=pickle.dumps(table.head(2)), name="submission.pkl", **task)
    assert report.score == 0.0


def test_a_task_s_own_pickled_answers_may_be_anything(grade: Grade) -> None:
    source = "def grade(submission, answers):\n    return answers.total()\n"
    answers = {"answer.pkl": pickle.dumps(Counter(a=2, b=1))}
    assert grade(source, family="science", answers=answers, name="submission.csv").score == 3.0


class Program:
    """What a pickle runs when it is loaded by the usual means."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "program",
    [
        Program(os.system, "true"),
        Program(eval, "1"),
        Program(pd.read_csv, "answers/answer.csv"),
        Program(pd.eval, "1"),
        Program(getattr, "a", "upper"),
        Program(open, "/etc/passwd"),
    ],
)
def test_a_pickle_that_would_run_something_is_invalid(grade: Grade, program: Program) -> None:
    content = pickle.dumps(TABLE)
    report = grade(
        "def grade(submission, answers):\n    return 1.0\n",
        family="science",
        content=pickle.dumps(program),
        name="submission.pkl",
        answers={"answer.pkl": content},
        sample={"sample.pkl": content},
    )
    assert (report.score, report.valid_submission) == (None, False)


LOOKS_AROUND = """
    import os, socket

    def opens(act, *arguments):
        try:
            act(*arguments)
        except OSError:
            return False
        return True

    def grade(submission, answers):
        secret, package = {secret!r}, {package!r}
        ways = [
            opens(open, secret),
            opens(socket.create_connection, ("127.0.0.1", {port}), 2),
            opens(open, package + "/new.py", "w"),
            opens(os.listdir, os.path.dirname(secret)),
            {name!r} in os.environ,
        ]
        return float(sum(2 ** place for place, way in enumerate(ways) if way))
"""


def test_a_grader_sees_its_package_and_the_submission_and_no_more(
    grade: Grade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_HOST", "x")
    (tmp_path / "secrets").mkdir()
    secret = tmp_path / "secrets" / "key"
    secret.write_text("x")

    async def with_server() -> CompetitionReport:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        package = str(tmp_path / "benchmarks" / "engineeringbench")
        source = LOOKS_AROUND.format(secret=str(secret), port=port, package=package, name="A_SECRET_OF_THE_HOST")
        report = await asyncio.to_thread(grade, source)
        server.close()
        await server.wait_closed()
        return report

    assert asyncio.run(with_server()).score == 0.0
    assert not (tmp_path / "benchmarks" / "engineeringbench" / "new.py").exists()


def test_nothing_of_one_grading_is_left_for_the_next(grade: Grade) -> None:
    source = """
        import builtins, os, pathlib
        import pandas as pd

        def grade(submission, answers):
            left = hasattr(builtins, "left") or hasattr(pd, "left")
            builtins.left = pd.left = True
            return float(left)
    """
    assert [grade(source).score for _ in range(3)] == [0.0, 0.0, 0.0]


def test_what_a_grader_writes_cannot_be_taken_for_its_score(grade: Grade) -> None:
    source = """
        import os

        def grade(submission, answers):
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, b'{"kind": "result", "value": 1}\\n')
                except OSError:
                    pass
            print("score", 1.0)
            return 0.5
    """
    with pytest.raises(GraderError):  # its own answer is no longer to be told from what it wrote
        grade(source)
    assert grade(within(0.05)).score == 1.0


def test_many_gradings_share_what_takes_long_to_import(tmp_path: Path) -> None:
    with opened(write(tmp_path)) as benchmark:
        task = benchmark.competition("plant-7")
        grade_csv(task.sample_submission, task)
        started = time.monotonic()
        for _ in range(20):
            grade_csv(task.sample_submission, task)
        assert time.monotonic() - started < 20 * 0.5


def test_inputs_of_a_grading_do_not_stay_behind(grade: Grade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "made"))
    (tmp_path / "made").mkdir()
    data = write(tmp_path / "other")
    with opened(data) as benchmark:
        task = benchmark.competition("plant-7")
        grade_csv(task.sample_submission, task)
        assert not [path for path in (tmp_path / "made").rglob("*submission*") if path.is_file()]
    assert list((tmp_path / "made").iterdir()) == []


def test_the_host_never_imports_a_grader(grade: Grade) -> None:
    grade(within(0.05))
    assert not {name for name in sys.modules if name.split(".")[0] in {"benchmarks", "mlebench", "task"}}


@pytest.mark.parametrize(
    ("tolerance", "answer", "submitted", "score"),
    [
        pytest.param(0.05, "12.5", "12.54", 1.0, id="the grader allows more than the description says"),
        pytest.param(0.01, "0.0", "0.00", 1.0, id="the untouched sample is right"),
        pytest.param(0.01, "No Best Solution", "No Best Solution", 0.0, id="the answer is no number"),
        pytest.param(0.01, "1.2e-5", "1.2e-5", 0.0, id="the grader cannot read the answer"),
        pytest.param(0.01, "0.005", "0.00", 1.0, id="the tolerance is larger than the answer"),
    ],
)
def test_a_task_s_own_defects_are_graded_as_they_are_and_left_to_the_audit(
    grade: Grade, tolerance: float, answer: str, submitted: str, score: float
) -> None:
    answers = {"answer.csv": f"id,answer\n0,@cost[{answer}]\n"}
    assert grade(within(tolerance), f"@cost[{submitted}]", answers=answers).score == score
