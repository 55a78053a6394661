"""Saved replies scored again, by the real lm-eval: of an evaluation of a tiny base that is gone by then."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradeflow import adapter, dataset, evaluate, jsonl, models, params
from gradeflow.adapter import BaseIdentity
from gradeflow.errors import AdapterError, EvaluationError
from gradeflow.evaluation import engine, samples, worker, workflow
from gradeflow.evaluation.plan import BASE, WORKFLOW, Plan, Subject
from gradeflow.grpo.environment import Grader
from gradeflow.params import Params
from gradeflow.types import Example, Sample
from support import evaluation, tiny

TASKS = ("sums", "pair")
PAIR = """\
group: pair
task: [choices, others]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
metadata: {version: 1}
"""
FIRST_LETTER = """\
filter_list: [{name: first, filter: [{function: regex, regex_pattern: "([A-Za-z])"}, {function: take_first}]}]
"""


@pytest.fixture(scope="session")
def made(tiny_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation of the base and an adapter in `earlier`, as an MLflow run holds it; the base is `tiny-base`."""
    folder = tmp_path_factory.mktemp("replayed")
    shutil.copytree(tiny_world, folder, dirs_exist_ok=True)
    for file in folder.glob("*.yaml"):
        file.write_text(file.read_text().replace(str(tiny_world), str(folder)))
    choices = (folder / "choices.yaml").read_text()
    (folder / "others.yaml").write_text(choices.replace("task: choices", "task: others").replace("plus", "and"))
    (folder / "pair.yaml").write_text(PAIR)
    asked = {"evaluate__tasks": f"[{','.join(TASKS)}]", "evaluate__include": f"[{folder}]", "evaluate__cache": ""}
    given = tiny.settings(folder, **asked)
    identity = models.identify(given.base)
    found = evaluate.Found(folder / "adapter-0")
    facts = adapter.validate(found.folder)
    plan = Plan(
        base=str(folder / "tiny-base"),
        revision="",
        base_digest=identity.digest,
        dtype="float32",
        subjects=[Subject(BASE), Subject(facts.digest[:12], facts.digest, str(found.folder), facts.rank)],
        tasks=TASKS,
        backend="hf",
        params=given,
        out=str(folder / "measured"),
    )
    worker.run(plan)
    evaluate.write(folder / "earlier", plan, evaluate.read(plan), [found], identity)
    return folder


@pytest.fixture
def world(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all but the models, and nothing that could load one."""

    def refuse(_: Plan) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setitem(engine.LOADERS, "hf", refuse)
    for name in ("earlier", "sums.jsonl", "sums.yaml", "choices.yaml", "others.yaml", "pair.yaml"):
        (shutil.copytree if (made / name).is_dir() else shutil.copy)(made / name, tmp_path / name)
    for file in tmp_path.glob("*.yaml"):
        file.write_text(file.read_text().replace(str(made), str(tmp_path)))
    return tmp_path


def without_models(folder: Path, **overrides: object) -> Params:
    """Settings whose base is not there, so that nothing which needs it can go on."""
    given = {"base__model": folder / "gone", "scorer__judge": "never", "evaluate__tasks": "[workflow]"} | overrides
    return params.load(tiny.ROOT / "params.yaml", tiny.changes(folder, **given))


def score_again(world: Path, *tasks: str) -> evaluate.Measured:
    settings = without_models(world, evaluate__include=f"[{world}]")
    plan = evaluate.replayed(settings, str(world / "earlier"), ",".join(tasks), world / "scratch").plan
    worker.run(plan)
    return evaluate.read(plan)


def before(world: Path) -> dict[str, Any]:
    return json.loads((world / "earlier" / "results.json").read_text())


def saved(world: Path, task: str, leaf: str = "") -> Path:
    (file,) = (world / "earlier" / "tasks" / BASE / task).glob(f"samples_{leaf or task}_*.jsonl")
    return file


def lines(file: Path, change: Callable[[list[str]], list[str]]) -> None:
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))


def without_an_answer(world: Path) -> None:
    lines(saved(world, "sums"), lambda rows: rows[:7] + rows[8:])


def cut_off(world: Path) -> None:
    lines(saved(world, "sums"), lambda rows: [*rows[:-1], rows[-1][:40]])


def with_two_replies(world: Path) -> None:
    lines(saved(world, "sums"), lambda rows: [*rows, re.sub(r'"resps": \[\[".*?"', '"resps": [["?"', rows[2])])


def without_samples(world: Path) -> None:
    saved(world, "sums").unlink()


def with_another_answer(world: Path) -> None:
    lines(world / "sums.jsonl", lambda rows: [rows[0], rows[1].replace('"4"', '"5"'), *rows[2:]])


def with_fewer_questions(world: Path) -> None:
    lines(world / "sums.jsonl", lambda rows: rows[:-1])


def with_another_prompt(world: Path) -> None:
    file = world / "sums.yaml"
    file.write_text(file.read_text().replace("{{question}}", "Say: {{question}}"))


def with_longer_replies(world: Path) -> None:
    file = world / "sums.yaml"
    file.write_text(file.read_text().replace("max_gen_toks: 8", "max_gen_toks: 9"))


def with_examples(world: Path) -> None:
    file = world / "sums.yaml"
    file.write_text(file.read_text() + "num_fewshot: 2\nfewshot_split: test\n")


def of_another_base(world: Path) -> None:
    file = next((world / "earlier" / "tasks" / BASE / "sums").glob("results.json"))
    file.write_text(file.read_text().replace(before(world)["base"]["digest"], "0" * 64))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (without_an_answer, "sums of base: document 7 has no saved sample"),
        (cut_off, "samples_sums_.*, line 12: not JSON.*cut off"),
        (with_two_replies, "samples_sums_.*: two different replies in document 2"),
        (without_samples, "the samples of sums are missing"),
        (with_another_answer, "sums of base: document 1 has changed since it was asked"),
        (with_fewer_questions, "sums of base: 12 documents were asked with 0 examples.*now there are 11 with 0"),
        (with_another_prompt, "sums of base: document 0 was asked otherwise"),
        (with_longer_replies, "sums of base: document 0 was asked otherwise"),
        (with_examples, "sums of base: document 0 was asked otherwise"),
        (of_another_base, "these are results of .*, not of"),
    ],
)
def test_what_is_not_a_reply_to_what_is_asked_now_is_refused(
    world: Path, broken: Callable[[Path], None], said: str
) -> None:
    broken(world)
    with pytest.raises(EvaluationError, match=said):
        score_again(world, "sums")


def test_a_number_that_is_none_is_refused(world: Path) -> None:
    file = saved(world, "pair", "choices")
    file.write_text(re.sub(r'"resps": \[\[\[".*?"', '"resps": [[["?"', file.read_text(), count=1))
    with pytest.raises(EvaluationError, match=r"choices of base: document 0 has a reply that is none: \['\?', "):
        score_again(world, "pair")


def test_what_is_no_whole_evaluation_is_refused_before_anything_is_scored(world: Path) -> None:
    with pytest.raises(EvaluationError, match="base was not asked choices; there are pair, sums"):
        score_again(world, "choices")
    weights = next((world / "earlier" / "adapters").glob("*/adapter_model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + b"1234")
    with pytest.raises(AdapterError, match=r"its files have digest .* was evaluated"):
        score_again(world)
    (world / "earlier" / "results.json").write_text('{"results": {}}')
    with pytest.raises(EvaluationError, match=r"not of an evaluation that can be scored again: KeyError\('base'\)"):
        score_again(world)
    (world / "earlier" / "results.json").unlink()
    with pytest.raises(EvaluationError, match="No such file or directory; expected an evaluation"):
        score_again(world)


def test_what_has_not_changed_scores_the_same_sample_by_sample(world: Path) -> None:
    measured = score_again(world)
    for subject, evaluations in measured.evaluations.items():
        told = before(world)["adapters"].get(subject, before(world)["base"])["tasks"]
        for task, found in evaluations.items():
            (one,) = found.tasks
            assert told[task] == {"metric": one.metric, "value": one.value, "stderr": one.stderr, "n": one.n}
            for leaf, file in found.samples.items():
                (earlier,) = (world / "earlier" / "tasks" / subject / task).glob(f"samples_{leaf}_*.jsonl")
                assert samples.read(file) == samples.read(earlier)
                assert len(samples.read(file)) == evaluation.QUESTIONS
    assert len({evaluations["pair"].tasks[0].value for evaluations in measured.evaluations.values()}) == 2


def test_another_filter_scores_the_same_replies_otherwise(world: Path) -> None:
    replies = [row["resps"][0][0] for row in samples.read(saved(world, "sums"))]
    letters = [re.search("[A-Za-z]", reply) for reply in replies]
    wanted = next(letter[0] for letter in letters if letter)
    definition = (world / "sums.yaml").read_text().replace('"{{answer}}"', f'"{wanted}"')
    (world / "sums.yaml").write_text(definition + FIRST_LETTER)
    (one,) = score_again(world, "sums").evaluations[BASE]["sums"].tasks
    assert one.metric == "exact_match,first"
    assert one.value == sum(letter is not None and letter[0] == wanted for letter in letters) / len(replies) > 0
    assert before(world)["base"]["tasks"]["sums"]["value"] == 0


@pytest.fixture
def graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An evaluation on the workflow task: answers made up here, and what the scorer says of them."""
    monkeypatch.chdir(tmp_path)
    tiny.project(tmp_path, rows=2)
    plan = Plan("", "", "of-the-base", "", [Subject(BASE)], [WORKFLOW], "hf", without_models(tmp_path), "measured")
    examples = dataset.read("test").examples
    asyncio.run(write_samples(plan, examples))
    (tmp_path / "measured" / workflow.FACTS).write_text('{"scorer": "as it was", "judge": {}}')
    evaluate.write(tmp_path / "earlier", plan, evaluate.read(plan), [], BaseIdentity("base", "", "of-the-base"))
    return tmp_path


async def write_samples(plan: Plan, examples: Sequence[Example]) -> None:
    """Every second answer is right; another is off by a thousandth, one failed, and one met a fault."""
    grader = Grader(plan.params)
    for name in workflow.writers(plan):
        told = [
            Sample(
                example.id, dataset.digest_of(example), example.source, example.kind, "a workflow",
                example.ground_truth if number % 2 else off(example), None, "", valid=True,
            )
            for number, example in enumerate(examples)
        ]  # fmt: skip
        told[-1] = replace(told[-1], answer=None, score=0.0, by="failure", failure="timeout")
        told[-2] = replace(told[-2], answer=None, fault="unreachable")
        scored = [await grader.score_again(one, example) for one, example in zip(told, examples, strict=True)]
        jsonl.write(plan.folder(name, WORKFLOW) / workflow.SAMPLES, (one.to_row() for one in scored))
    await grader.close()


def off(example: Example) -> str:
    return f"{float(example.ground_truth) * 1.001}" if example.kind == "math" else "none of these"


def grade_again(folder: Path, **overrides: object) -> evaluate.Measured:
    scratch = folder / f"scratch-{len(list(folder.iterdir()))}"
    plan = evaluate.replayed(without_models(folder, **overrides), str(folder / "earlier"), "", scratch).plan
    worker.run(plan)
    return evaluate.read(plan)


def test_answers_that_are_scored_again_have_the_same_scores(graded: Path) -> None:
    measured = grade_again(graded)
    rows = {name: list(jsonl.read(graded / "earlier" / "samples" / f"{name}.jsonl")) for name in measured.samples}
    assert {name: [one.to_row() for one in own] for name, own in measured.samples.items()} == rows
    assert {row["score"] for row in rows[BASE]} == {None, 0.0, 1.0}
    assert {row["by"] for row in rows[BASE]} >= {"number", "choice", "failure", ""}
    assert measured.facts["scorer"].startswith("gradeflow-scorer/")


def test_another_tolerance_scores_the_same_answers_otherwise(graded: Path) -> None:
    def right(measured: evaluate.Measured) -> int:
        return sum(one.score == 1 for one in measured.samples[BASE] if one.by == "number")

    strict, lenient = grade_again(graded), grade_again(graded, scorer__number_tolerance=0.01)
    assert right(strict) < right(lenient) == sum(one.by == "number" for one in lenient.samples[BASE])
    assert strict.facts["scorer"] != lenient.facts["scorer"]


def test_questions_and_samples_that_are_not_those_of_the_evaluation_are_refused(graded: Path) -> None:
    file = graded / "earlier" / "samples" / "base.jsonl"
    whole = file.read_text()
    lines(file, lambda rows: rows[:-1])
    with pytest.raises(EvaluationError, match=r"workflow: .*base.jsonl: has \d+ samples; \d+ were graded"):
        grade_again(graded)
    file.write_text(whole[:-9])
    with pytest.raises(EvaluationError, match=r"workflow: .*base.jsonl, line \d+: not JSON.*cut off"):
        grade_again(graded)
    digest = json.loads(whole.splitlines()[0])["example_digest"]
    file.write_text(whole.replace(digest, "0" * 16))
    with pytest.raises(EvaluationError, match=r"workflow: question .* has changed since it was asked"):
        grade_again(graded)
    asked = json.loads(whole.splitlines()[0])["example_id"]
    file.write_text(whole.replace(asked, "unknown-1"))
    with pytest.raises(EvaluationError, match=r"workflow: question unknown-1 .* is no longer among the held-out ones"):
        grade_again(graded)
