"""What `gradeflow solve` costs beside the experiments themselves: many tasks at once, and one after the other.

    python perf/solve.py

Replies come from a script. An experiment sleeps, writes the sample submission again, and that is graded; workspace,
sandbox, grader, MLflow run and trace are real, in a store that is there already. `ideal` is the experiments' time
alone, shared by so many at once.
"""

import argparse
import contextlib
import io
import json
import os
import tempfile
import time
from pathlib import Path

from gradeflow import params, solve, tracking

SHIPPED = Path(__file__).parents[1] / "params.yaml"
EXPERIMENT = """<Experiment>
import harness, shutil, time
time.sleep({seconds})
shutil.copy("sample_submission.csv", harness.inputs["submission"])
</Experiment>"""
TASKS = 20  # built-in ones of a family


def run(count: int, parallel: int, seconds: float) -> float:
    """Seconds of the command, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        replies = Path("replies.json")
        replies.write_text(json.dumps([EXPERIMENT.format(seconds=seconds), "<Conclusion>done</Conclusion>"]))
        settings = params.load(
            SHIPPED,
            {
                "solve.seeds": str(max(1, count // TASKS)),
                "solve.parallel": str(parallel),
                "solve.review": "false",
                "solve.memory_mb": "512",
                "tracking.uri": f"sqlite:///{Path(folder) / 'mlflow.db'}",
            },
        )
        for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
            del os.environ[name]
        tracking.connect(settings.tracking, Path.cwd())
        started = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            solve.main(settings, scripted=str(replies))
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="tasks, a multiple of 20")
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.0, help="that an experiment sleeps")
    given = parser.parse_args()
    run(TASKS, 1, 0)  # what is imported once takes no part of the time
    begun = run(TASKS, 1, 0)
    rest = run(2 * TASKS, 1, 0) - begun
    print(f"one after the other, without sleep: {rest / TASKS * 1000:.0f} ms a task")
    ideal = given.count / given.parallel * given.seconds
    seconds = run(given.count, given.parallel, given.seconds)
    print(f"{given.count} tasks of {given.seconds:g} s, {given.parallel} at once: {seconds:.1f} s, ", end="")
    print(f"{seconds / ideal:.2f} of the ideal {ideal:.1f} s")


if __name__ == "__main__":
    main()
