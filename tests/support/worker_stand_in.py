"""A stand-in for the evaluation worker: it writes what lm-eval writes, without a model. Each accuracy is 0.5.

`python worker_stand_in.py PART ARGUMENTS...` acts the part in the entrypoint.
"""

import json
import sys
import time
from collections.abc import Sequence

from gradeflow.errors import TIMED_OUT, EvaluationError, SettingsError
from gradeflow.evaluation import entrypoint, preflight, results
from gradeflow.evaluation.plan import Plan, Subject
from gradeflow.params import Evaluate


class Tasks:
    """A stand-in for lm-eval's tasks: knows `math` by its alias, and no name with a space; none lacks anything."""

    def resolve(self, names: Sequence[str], include: Sequence[str]) -> list[str]:
        for name in names:
            if " " in name:
                raise SettingsError(f"{name!r}: no such task")
        return ["hendrycks_math" if name == "math" else name for name in names]

    def contents(self, names: Sequence[str], settings: Evaluate) -> str:
        return ""

    def known(self, settings: Evaluate) -> preflight.Tasks:
        return preflight.Tasks()


def write(plan: Plan, task: str) -> None:
    for subject in plan.subjects:
        _write(plan, subject, task)


def _write(plan: Plan, subject: Subject, task: str) -> None:
    folder = plan.folder(subject.name, task)
    name = folder.name
    tree = {
        "results": {name: {"alias": name, "acc,none": 0.5}},
        "group_subtasks": {},
        "configs": {name: {"task": name}},
        "versions": {name: 1},
        "n-shot": {name: 0},
        "higher_is_better": {name: {}},
        "n-samples": {name: {"original": 2, "effective": 2}},
        "config": {"model": "stand-in"},
        "lm_eval_version": "0.4.13",
        "total_evaluation_time_seconds": "1.5",
    }
    (folder / "model").mkdir(parents=True)
    (folder / "model" / f"results_{name}_2026.json").write_text(json.dumps(tree))
    (folder / f"samples_{name}.jsonl").write_text('{"doc_id": 0, "acc": 1.0}\n{"doc_id": 1, "acc": 0.0}\n')
    results.write(folder, tree, base=plan.base, base_digest=plan.base_digest, adapter=subject.digest)


class Worker:
    """Writes results for what it is asked, and keeps the plans; in a part it stops after the first task."""

    def __init__(self, part: str = "") -> None:
        self.part = part
        self.plans: list[Plan] = []

    def run(self, plan: Plan) -> None:
        self.plans.append(plan)
        first, *rest = plan.tasks
        write(plan, first)
        match self.part:
            case "time-out":
                raise EvaluationError("time is up", status=TIMED_OUT)
            case "crash":
                raise EvaluationError("the model broke down")
            case "hang":
                print("hanging", flush=True)
                time.sleep(600)
            case "forget":
                return
            case "cut":
                write(plan, rest[0])
                file = plan.folder(plan.subjects[0].name, rest[0]) / results.NAME
                file.write_text(file.read_text()[:-10])
            case _:
                for task in rest:
                    write(plan, task)


if __name__ == "__main__":
    sys.exit(entrypoint.main(sys.argv[2:], catalogue=Tasks(), run=Worker(sys.argv[1]).run))
