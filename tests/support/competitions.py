"""Small competitions in folders, in the formats of DeepModeling and MLE-bench."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

from gradeflow import params
from gradeflow.benchmarks.catalogue import Benchmark

SHIPPED = params.load(Path(__file__).parents[2] / "params.yaml")
PACKAGES = {
    "engineering": "engineeringbench",
    "mathmodeling": "mathmodelingbench",
    "mle": "mlebench",
    "science": "sciencebench",
}
TWO_TEAMS = """\
scoreNullable,teamId,hasTeamName,submissionDate,score,hasScore
1.0000,1,True,2024-01-01 00:00:00,1.0000,True
0.0000,2,True,2024-01-01 00:00:00,0.0000,True
"""
WITHIN = """
    import re

    NUMBER = re.compile(r"@cost\\[(-?\\d+(?:\\.\\d+)?)\\]", re.IGNORECASE)

    def grade(submission, answers):
        found = [NUMBER.search(str(table.iloc[0]["answer"])) for table in (submission, answers)]
        if not all(found):
            return 0.0
        given, right = (float(match[1]) for match in found)
        return float(abs(given - right) <= TOLERANCE)
"""
COPIES_ITS_PROBLEM = """
    import shutil

    def prepare(raw, public, private):
        shutil.copy(raw / "problem.json", public / "problem.json")
        (public / "sample_submission.csv").write_text("id,answer\\n0,@cost[0.00]\\n")
        (private / "answer.csv").write_text("id,answer\\n0,@cost[12.5]\\n")
"""


def within(tolerance: float) -> str:
    """A grader of one number, in the manner of DeepModeling's."""
    return dedent(WITHIN).replace("TOLERANCE", str(tolerance))


def write(
    root: Path,
    family: str = "engineering",
    task: str = "plant-7",
    *,
    grade: str = "",
    prepare: str = COPIES_ITS_PROBLEM,
    answers: Mapping[str, str | bytes] | None = None,
    sample: Mapping[str, str | bytes] | None = None,
    leaderboard: str = TWO_TEAMS,
    config: str = "",
    more: Mapping[str, str] | None = None,
) -> Path:
    """A task and its prepared data below `root`; returns the data folder.

    `config` has lines of config.yaml that take the place of the usual ones; `more` are files beside grade.py, or, with
    a path, anywhere below the package's folder.
    """
    package = PACKAGES[family]
    module = f"{'' if package == 'mlebench' else 'benchmarks.'}{package}.competitions.{task}"
    answers = answers or {"answer.csv": "id,answer\n0,@cost[12.5]\n"}
    sample = sample or {"sample_submission.csv": "id,answer\n0,@cost[0.00]\n"}
    lines = {
        "id": task,
        "name": f"The task {task}",
        "competition_type": "modeling",
        "description": f"benchmarks/{package}/competitions/{task}/description.md",
        "dataset": f"{{answers: {task}/prepared/private/{next(iter(answers))}, "
        f"sample_submission: {task}/prepared/public/{next(iter(sample))}}}",
        "grader": f"{{name: within, grade_fn: '{module}.grade:grade'}}",
        "preparer": f"{module}.prepare:prepare",
    }
    lines |= dict(line.split(": ", 1) for line in dedent(config).splitlines() if line.strip())
    tasks = root / "benchmarks" / package / "competitions" / task
    data = root / "data" / "competitions" / task
    files: dict[Path, str | bytes] = {
        tasks / "config.yaml": "\n".join(f"{name}: {value}" for name, value in lines.items()),
        tasks / "grade.py": dedent(grade) or within(0.05),
        tasks / "prepare.py": dedent(prepare),
        tasks / "description.md": f"What is the lowest cost of {task}?\n",
        tasks / "leaderboard.csv": leaderboard,
        tasks / "checksums.yaml": 'zip: ""\n',
        data / "raw" / "problem.json": '{"id": 7, "en_question": "What is the cost?", "expected_answer": "12.5"}',
    }
    files |= {tasks / name: dedent(text) for name, text in (more or {}).items()}
    files |= {data / "prepared" / "private" / name: content for name, content in answers.items()}
    files |= {data / "prepared" / "public" / name: content for name, content in sample.items()}
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root / "data"


def opened(
    data: Path | None, family: str = "engineering", *, mode: str = "test", isolation: str = "auto", **limits: float
) -> Benchmark:
    solve = SHIPPED.solve.model_copy(update={"benchmark": family, "data_dir": str(data or "")})
    sandbox = SHIPPED.sandbox.model_copy(update={"isolation": isolation})
    return Benchmark(solve, sandbox, SHIPPED.grade.model_copy(update=limits), mode=mode)
