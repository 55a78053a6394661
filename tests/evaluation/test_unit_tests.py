import asyncio
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

import evaluate
from gradeflow import params
from gradeflow.errors import SandboxError, SettingsError
from gradeflow.evaluation import tasks, unit_tests
from gradeflow.evaluation.unit_tests import METRIC
from gradeflow.sandbox import Sandbox
from support.references import evaluated

SETTINGS = params.load(Path(__file__).parents[2] / "params.yaml")
ADD = "assert add(2, 3) == 5"
DATA = os.environ.get("GRADEFLOW_DATA", "")
with_data = pytest.mark.skipif(not DATA, reason="GRADEFLOW_DATA names no folder with the real HumanEval")


@pytest.fixture(scope="module", autouse=True)
def in_sandbox() -> Iterator[None]:
    with asyncio.Runner() as runner:
        sandbox = Sandbox(SETTINGS.sandbox)
        with unit_tests.in_sandbox(sandbox, runner.run):
            yield
        runner.run(sandbox.close())


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


def settings(**changes: Any) -> params.Evaluate:
    return SETTINGS.evaluate.model_copy(update={"confirm_run_unsafe_code": True, **changes})


def said(code: str, tests: str = ADD, timeout: float = 5.0) -> str:
    _, results = METRIC.compute(references=[tests], predictions=[[code]], k=[1], timeout=timeout)
    return str(results[0][0][1]["result"])


# The metric


def test_evaluate_loads_our_metric_by_the_published_name() -> None:
    assert evaluate.load("code_eval") is METRIC
    assert evaluate.load(path="code_eval") is METRIC


def test_shares_and_results_have_the_published_form() -> None:
    right, wrong = "def add(a, b):\n    return a + b", "def add(a, b):\n    return a * b"
    shares, results = METRIC.compute(references=[ADD, ADD], predictions=[[right, wrong], [wrong, wrong]], k=[1, 2, 3])
    assert shares == {"pass@1": 0.25, "pass@2": 0.5}
    assert results[0][0] == (0, {"task_id": 0, "passed": True, "result": "passed", "completion_id": 0})
    assert [(number, one["passed"]) for number, one in results[1]] == [(0, False), (1, False)]
    assert results[1][0][1]["result"].startswith("failed: ")


@pytest.mark.parametrize(("k", "total", "right"), [(1, 4, 1), (2, 4, 2), (3, 5, 1), (2, 3, 0), (2, 3, 3), (4, 4, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(k: int, total: int, right: int) -> None:
    draws = list(itertools.combinations([True] * right + [False] * (total - right), k))
    assert unit_tests.pass_at(k, total, right) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_a_program_may_import_what_is_installed() -> None:
    assert said("import numpy as np\ndef add(a, b):\n    return int(np.add(a, b))") == "passed"


def test_tests_see_the_helpers_of_the_program() -> None:
    assert (
        said("def twice(a):\n    return 2 * a\ndef add(a, b):\n    return a + b", "assert twice(add(1, 1)) == 4")
        == "passed"
    )


HOSTILE = {
    "reads a file of the host": "def add(a, b):\n    return open('HOST').read()",
    "forks without end": "import os\nwhile True:\n    os.fork()",
    "forks, and goes on in the child": "import os\nif os.fork():\n    os._exit(0)\ndef add(a, b):\n    return 6",
    "ends the process": "import os\nos._exit(0)",
    "ends the process in its tests": "import os\ndef add(a, b):\n    os._exit(0)",
    "exits": "import sys\nsys.exit()",
    "exits in its tests": "def add(a, b):\n    raise SystemExit",
    "prints the verdict": "print('passed')\nraise SystemExit",
    "reports a verdict": "import harness\nharness.result('passed')\nraise SystemExit",
    "reports what it was given": "import harness\nharness.result(harness.inputs)\nraise SystemExit",
    "puts a stub for exec": "import builtins\nbuiltins.exec = print\ndef add(a, b):\n    return 6",
    "leaves a string open": "def add(a, b):\n    return 6\n'''",
    "does not parse": "def add(a, b:",
    "takes all memory": "def add(a, b):\n    return ' ' * 10**11",
}


@pytest.mark.parametrize("code", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_program_gains_nothing(code: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("5")
    assert said(code.replace("HOST", str(secret))) != "passed"


def test_a_program_that_never_ends_is_timed_out() -> None:
    assert said("import time\ntime.sleep(1e9)", timeout=0.5) == "timed out"
    assert said("while True: pass", timeout=0.5) == "timed out"


def test_the_published_metric_is_not_allowed_to_run_code_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    with asyncio.Runner() as runner:
        with unit_tests.in_sandbox(Sandbox(SETTINGS.sandbox), runner.run):
            assert "HF_ALLOW_CODE_EVAL" not in os.environ
        assert os.environ["HF_ALLOW_CODE_EVAL"] == "1"


def test_without_a_sandbox_nothing_runs() -> None:
    with pytest.raises(SandboxError, match="outside of the sandbox"):
        unit_tests.CodeEval().compute(references=[ADD], predictions=[["add = sum"]], k=[1])


# Tasks of lm-eval


def mbpp(folder: Path, rows: int = 3) -> params.Evaluate:
    """Rows in MBPP's published form, in a folder of the dataset's name `full`."""
    (folder / "full").mkdir()
    made = [
        {
            "task_id": 11 + number,
            "text": f"Write a python function to add {number}.",
            "code": f"import math\r\ndef plus(a):\r\n  return (math.floor(a) + {number}) ",
            "test_list": [f"assert plus({a}) == {a + number}" for a in (1, 5, 9)],
            "test_setup_code": "",
            "challenge_test_list": [],
        }
        for number in range(rows)
    ]
    (folder / "full" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return settings(data={"google-research-datasets/mbpp": str(folder)})


def test_lm_evals_mbpp_takes_its_references_for_right_and_others_for_wrong(tmp_path: Path) -> None:
    objects = tasks.load(["mbpp", "mbpp_instruct"], mbpp(tmp_path))
    right = evaluated(objects, lambda row: row["code"] + "\n[DONE]")
    assert right["mbpp"]["pass_at_1,none"] == 1.0
    fenced = evaluated(objects, lambda row: f"\n{row['code']}\n```")  # without the first \n, its regex eats a word
    assert fenced["mbpp_instruct"]["pass_at_1,extract_code"] == 1.0
    wrong = evaluated(objects, lambda row: row["code"].replace("floor(a)", "floor(-a)"))
    assert wrong["mbpp"]["pass_at_1,none"] == wrong["mbpp_instruct"]["pass_at_1,extract_code"] == 0.0


def test_all_programs_of_a_task_run_side_by_side(tmp_path: Path) -> None:
    """Each waits until the others have come: one after the other, they would all be timed out."""
    loaded = tasks.load(["mbpp"], mbpp(tmp_path, rows=3))
    waiting = asyncio.Barrier(3)

    class Meeting(Sandbox):
        async def run(self, code: str, **arguments: Any) -> Any:
            async with asyncio.timeout(20):
                await waiting.wait()
            return await super().run(code, **arguments)

    with asyncio.Runner() as runner:
        sandbox = Meeting(SETTINGS.sandbox)
        with unit_tests.in_sandbox(sandbox, runner.run):
            assert evaluated(loaded, lambda row: row["code"])["mbpp"]["pass_at_1,none"] == 1.0
        runner.run(sandbox.close())


class StandInForABrokenSandbox(Sandbox):
    async def run(self, code: str, **arguments: Any) -> Any:
        raise SandboxError("bwrap: out of namespaces", cause="sandbox")


def test_a_broken_sandbox_ends_the_evaluation_and_is_no_zero(tmp_path: Path) -> None:
    objects = tasks.load(["mbpp"], mbpp(tmp_path))
    with (
        asyncio.Runner() as runner,
        unit_tests.in_sandbox(StandInForABrokenSandbox(SETTINGS.sandbox), runner.run),
        pytest.raises(SandboxError, match="out of namespaces"),
    ):
        evaluated(objects, lambda row: row["code"])


def test_a_task_that_runs_code_needs_consent() -> None:
    with pytest.raises(
        SettingsError, match=r"^evaluate.confirm_run_unsafe_code is false, and humaneval would run code"
    ):
        tasks.load(["gsm8k", "humaneval"], settings(confirm_run_unsafe_code=False))


def test_a_task_that_would_run_code_outside_of_the_sandbox_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"cruxeval_input would run generated code in lm-eval's own process"):
        tasks.require_consent(["humaneval", "mbpp", "humaneval_64", "cruxeval_input"], settings())


def humaneval() -> list[Any]:
    data = {"openai/openai_humaneval": f"{DATA}/humaneval/HumanEval.jsonl.gz"}
    return tasks.load(["humaneval", "humaneval_instruct"], settings(data=data))


@with_data
@pytest.mark.parametrize("limit", [12, pytest.param(None, marks=pytest.mark.slow)])
def test_lm_evals_humaneval_takes_its_references_for_right_and_others_for_wrong(limit: int | None) -> None:
    objects = humaneval()
    right = evaluated(objects, lambda row: row["canonical_solution"], limit)
    wrong = evaluated(objects, lambda row: "    return None\n", limit)
    assert {name: own["pass@1,create_test"] for name, own in right.items()} == {
        "humaneval": 1.0,
        "humaneval_instruct": 1.0,
    }
    assert {own["pass@1,create_test"] for own in wrong.values()} == {0.0}
    assert {own["sample_len"] for own in right.values()} == {limit or 164}


@with_data
def test_hostile_completions_of_humaneval_gain_nothing() -> None:
    completions = [
        "    import os\n    os._exit(0)\n",
        "    raise SystemExit\n",
        "    import time\n    time.sleep(1e9)\n",
        "    return open('/etc/passwd').read()\n",
        "    import os\n    while True:\n        os.fork()\n",
        "    print('passed')\n    import harness\n    harness.result('passed')\n    raise SystemExit\n",
    ]
    asked = itertools.cycle(completions)
    results = evaluated(humaneval()[:1], lambda _: next(asked), limit=len(completions))
    assert results["humaneval"]["pass@1,create_test"] == 0.0
