"""Files in `written/` are what lm-eval wrote, one folder a version, but for pretty_env_info: its dummy model on a task
`sums` and on a group `world`, of the task `cities` and the group `nature` of `birds` and `trees`."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradeflow.errors import DataError, EvaluationError
from gradeflow.evaluation import report, results, samples
from gradeflow.evaluation.report import Metric

WRITTEN = Path(__file__).parent / "written"
VERSIONS = sorted(
    (folder.name for folder in WRITTEN.iterdir()), key=lambda name: [int(part) for part in name.split(".")]
)
STRICT, FLEXIBLE = "exact_match,strict-match", "exact_match,flexible-extract"

Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What lm-eval 0.4.13 wrote, to be spoilt."""
    return Path(shutil.copytree(WRITTEN / "0.4.13", tmp_path / "results"))


def file_of(folder: Path, start: str) -> Path:
    (found,) = folder.glob(f"{start}_*.json*")
    return found


def raw(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(file_of(folder, "results").read_text())
    return tree


def changed(change: Callable[[dict[str, Any]], object]) -> Change:
    def spoil(folder: Path) -> None:
        tree = raw(folder)
        change(tree)
        file_of(folder, "results").write_text(json.dumps(tree))

    return spoil


def lines(task: str, change: Callable[[list[str]], list[str]]) -> Change:
    def spoil(folder: Path) -> None:
        file = file_of(folder, f"samples_{task}")
        file.write_text("".join(change(file.read_text().splitlines(keepends=True))))

    return spoil


def one_task(task: str, row: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Results of one task in the form of lm-eval 0.4.13."""
    return {
        "results": {task: {"name": task, "alias": task, "sample_len": 7, **row}},
        "group_subtasks": {},
        "configs": {task: {"task": task, **config}},
        "versions": {task: 1.0},
        "n-shot": {task: 0},
        "higher_is_better": {task: {}},
        "n-samples": {task: {"original": 7, "effective": 7}},
        "config": {"model": "hf", "model_args": {"pretrained": "example/tiny"}},
        "lm_eval_version": "0.4.13",
    }


def read_one(folder: Path, tree: dict[str, Any], **options: Any) -> report.TaskResult:
    (folder / "results_2026-01-01T00-00-00.json").write_text(json.dumps(tree))
    (found,) = results.read(folder, with_samples=False, **options).tasks
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_of_lm_eval_is_read_alike(version: str) -> None:
    found = results.read(WRITTEN / version, ["sums", "world"], base="example/tiny", adapter="")
    sums, world = found.tasks
    assert found.versions == (version,)
    assert found.notes == ()
    assert (sums.metric, sums.value, sums.stderr) == (STRICT, 0.0, 0.0)
    assert sums.metrics == {STRICT: Metric(0.0, 0.0), FLEXIBLE: Metric(0.25, 0.25)}
    assert (sums.n, sums.num_fewshot, sums.version, sums.higher_is_better) == (4, 1, "3.0", True)
    assert len(sums.hash) == len(world.hash) == 64
    assert (world.metric, world.n, world.num_fewshot, world.version) == ("acc,none", 9, 0, "2")
    assert [one.task for one in world.walk()] == ["world", "nature", "birds", "trees", "cities"]
    assert [(leaf.task, leaf.n) for leaf in world.leaves()] == [("birds", 3), ("trees", 2), ("cities", 4)]
    assert world.value == pytest.approx(sum(leaf.value * leaf.n for leaf in world.leaves()) / 9)
    assert set(found.samples) == {"sums", "birds", "trees", "cities"}


@pytest.mark.parametrize("version", VERSIONS)
def test_neither_a_count_nor_a_standard_error_is_taken_for_a_metric(version: str) -> None:
    keys = {key for one in results.read(WRITTEN / version).walk() for key in one.metrics}
    assert keys == {"acc,none", "acc_norm,none", STRICT, FLEXIBLE}


def test_a_group_counts_once_and_its_tasks_not_at_all() -> None:
    everything = results.read(WRITTEN / "0.4.13")
    assert [task.task for task in everything.tasks] == ["sums", "world"]
    assert everything.average == pytest.approx((0.0 + 4 / 9) / 2)
    asked = results.read(WRITTEN / "0.4.13", ["world", "cities", "sums"])
    assert [task.task for task in asked.tasks] == ["world", "cities", "sums"]
    assert asked.average == everything.average


BROKEN: list[tuple[str, Change, str, list[str]]] = [
    ("no file", lambda folder: file_of(folder, "results").unlink(), r"no results of lm-eval \(results.json or", []),
    ("empty", lambda folder: file_of(folder, "results").write_text(""), "empty; the evaluation has not written", []),
    (
        "half-written",
        lambda folder: file_of(folder, "results").write_text(file_of(folder, "results").read_text()[:3000]),
        "half-written, or no JSON: Unterminated string",
        [],
    ),
    (
        "bytes",
        lambda folder: file_of(folder, "results").write_bytes(b"\xff\xfe"),
        "half-written, or no JSON: 'utf-8'",
        [],
    ),
    (
        "a list",
        lambda folder: file_of(folder, "results").write_text("[]"),
        "not a file of lm-eval's: it has no `res",
        [],
    ),
    (
        "another tool's",
        lambda folder: file_of(folder, "results").write_text('{"accuracy": 0.0}'),
        "not a file of lm-eval's: it has no `results`",
        [],
    ),
    (
        "another shape",
        changed(lambda tree: tree.pop("n-shot")),
        "of lm-eval 0.4.13, but not as that writes it; expected 0.4.9 to 0.4.13: n-shot: Field required",
        [],
    ),
    (
        "another version",
        changed(lambda tree: tree.update({"lm_eval_version": "0.5.0", "results": [1]})),
        "of lm-eval 0.5.0, which cannot be read; expected 0.4.9 to 0.4.13: results: Input should be a valid dict",
        [],
    ),
    (
        "a task missing",
        changed(lambda tree: [tree[part].pop("sums") for part in ("results", "configs", "n-samples")]),
        "no results of task sums; there are birds, cities, nature, trees, world",
        ["world"],
    ),
    (
        "a task of a group missing",
        changed(lambda tree: tree["results"].pop("birds")),
        "no results of task birds, though a group here consists of it",
        ["sums"],
    ),
    (
        "NaN",
        changed(lambda tree: tree["results"]["sums"].update({STRICT: math.nan})),
        "sums: exact_match,strict-match is nan; expected a number",
        ["world"],
    ),
    (
        "NaN below",
        changed(lambda tree: tree["results"]["birds"].update({"acc_norm,none": math.nan})),
        "birds: acc_norm,none is nan",
        ["sums"],
    ),
    (
        "nothing scored",
        changed(lambda tree: tree["results"].update({"sums": {"alias": "sums", "bypass,none": 999}})),
        "sums has no metric; was it run with predict_only",
        ["world"],
    ),
    (
        "no questions",
        changed(lambda tree: tree["n-samples"].update({"sums": {"original": 4, "effective": 0}})),
        "sums has no questions",
        ["world"],
    ),
    (
        "no samples",
        lambda folder: file_of(folder, "samples_sums").unlink(),
        "the samples of sums are missing",
        ["world"],
    ),
    (
        "cut samples",
        lines("sums", lambda own: [*own[:-1], own[-1][:50]]),
        r"line 8: .* \(the file seems cut off",
        ["world"],
    ),
    (
        "too few samples",
        lines("sums", lambda own: own[:-1]),
        "has 3 samples with filter flexible-extract, but sums was measured on 4",
        ["world"],
    ),
    ("samples twice", lines("cities", lambda own: own * 2), "holds doc_id 0 more than once", ["sums"]),
    (
        "other lines",
        lines("cities", lambda own: ["{}\n"]),
        "line 1: not a sample of lm-eval's: it has no doc_id",
        ["sums"],
    ),
]


@pytest.mark.parametrize(("spoil", "message", "done"), [one[1:] for one in BROKEN], ids=[one[0] for one in BROKEN])
def test_broken_results_are_an_error_that_says_what_is_done(
    folder: Path, spoil: Change, message: str, done: list[str]
) -> None:
    spoil(folder)
    with pytest.raises(EvaluationError, match=message) as caught:
        results.read(folder, ["sums", "world"])
    assert caught.value.done == tuple(done)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"base": "example/large"}, "these are results of example/tiny, not of example/large"),
        ({"adapter": "abc"}, "these are results of the base alone, not of adapter abc"),
        ({"since": 2e9}, "left by an earlier evaluation; this one has written no results"),
    ],
)
def test_results_of_another_model_or_run_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        results.read(WRITTEN / "0.4.9.1", **asked)


@pytest.mark.parametrize("args", [{"peft": "out"}, "pretrained=example/tiny,lora_local_path=/workspace/output"])
def test_an_adapters_results_are_not_taken_for_the_bases(folder: Path, args: object) -> None:
    changed(lambda tree: tree["config"].update({"model_args": args}))(folder)
    assert results.read(folder, adapter="any digest").tasks
    with pytest.raises(EvaluationError, match=r"these are results of adapter .*out.*, not of the base alone"):
        results.read(folder, adapter="")


def test_a_version_that_is_not_known_is_read_with_a_note_where_its_shape_fits(folder: Path) -> None:
    changed(lambda tree: tree.update({"lm_eval_version": "0.6.1"}))(folder)
    (note,) = results.read(folder).notes
    assert note.endswith("lm-eval 0.6.1 is not 0.4.9 to 0.4.13, but its file has their shape")


def test_of_several_results_the_newest_is_taken(folder: Path) -> None:
    later = raw(folder) | {"date": 2e9}
    later["results"]["sums"][FLEXIBLE] = 1.0
    (folder / "results_2033-05-18T03-33-20.json").write_text(json.dumps(later))
    found = results.read(folder, ["sums"])
    assert found.tasks[0].metrics[FLEXIBLE].value == 1.0


def test_tasks_in_folders_of_their_own_are_one_evaluation(tmp_path: Path) -> None:
    for task in ("sums", "cities"):
        own = Path(shutil.copytree(WRITTEN / "0.4.13", tmp_path / "base" / task))
        changed(lambda tree, task=task: tree.update({"results": {task: tree["results"][task]}, "group_subtasks": {}}))(
            own
        )  # type: ignore[misc]
    found = results.read(tmp_path, ["cities", "sums"])
    assert [task.task for task in found.tasks] == ["cities", "sums"]
    assert found.samples["sums"].parent.name == "sums"


def test_one_broken_file_is_enough_even_beside_whole_ones(folder: Path) -> None:
    (folder / "results_2033-05-18T03-33-20.json").write_text('{"results": {"su')
    with pytest.raises(EvaluationError, match=r"03-33-20.json: half-written.*Delete it and evaluate again") as caught:
        results.read(folder, ["sums"])
    assert caught.value.done == ("sums",)


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        ("gsm8k", {STRICT: 0.1, FLEXIBLE: 0.6}, FLEXIBLE),
        ("gsm8k_cot", {STRICT: 0.1, FLEXIBLE: 0.6}, FLEXIBLE),
        ("arc_challenge", {"acc,none": 0.1, "acc_norm,none": 0.2}, "acc_norm,none"),
        ("hellaswag", {"acc,none": 0.1, "acc_norm,none": 0.2}, "acc_norm,none"),
        ("mmlu_anatomy", {"acc,none": 0.1}, "acc,none"),
        ("mmlu_pro", {"exact_match,custom-extract": 0.1}, "exact_match,custom-extract"),
        ("cmmlu", {"acc_norm,none": 0.1, "acc,none": 0.2}, "acc,none"),
        ("hendrycks_math500", {"exact_match,none": 0.1}, "exact_match,none"),
        ("minerva_math_algebra", {"exact_match,none": 0.1, "math_verify,none": 0.2}, "math_verify,none"),
        ("humaneval_instruct", {"pass@1,create_test": 0.1}, "pass@1,create_test"),
        ("mbpp_instruct", {"pass_at_1,extract_code": 0.1}, "pass_at_1,extract_code"),
        ("drop", {"em,none": 0.1, "f1,none": 0.2}, "f1,none"),
        ("commonsense_qa", {"acc,none": 0.1}, "acc,none"),
        ("aime25", {"exact_match,none": 0.1}, "exact_match,none"),
    ],
)
def test_the_documented_tasks_have_one_metric_that_stands_for_them(
    tmp_path: Path, task: str, row: dict[str, float], expected: str
) -> None:
    found = read_one(tmp_path, one_task(task, row))
    assert found.metric == expected
    assert found.is_share


def test_any_other_task_is_stood_for_by_the_first_metric_that_it_lists(tmp_path: Path) -> None:
    row = {"bleu,none": 20.0, "rougeL_stderr,none": 0.3, "rougeL,none": 0.4}
    metric_list = [{"metric": "rougeL"}, {"metric": "bleu"}]
    assert read_one(tmp_path, one_task("summaries", row, metric_list=metric_list)).metric == "rougeL,none"
    assert read_one(tmp_path, one_task("summaries", row)).metric == "bleu,none"


@pytest.mark.parametrize("chosen", ["exact_match", STRICT])
def test_another_metric_can_be_asked_for(tmp_path: Path, chosen: str) -> None:
    tree = one_task("gsm8k", {STRICT: 0.1, FLEXIBLE: 0.6})
    assert read_one(tmp_path, tree, primary={"gsm8k": chosen}).metric == STRICT
    with pytest.raises(EvaluationError, match=f"gsm8k has no metric f1; it has {STRICT} {FLEXIBLE}"):
        read_one(tmp_path, tree, primary={"gsm8k": "f1"})


def test_a_metric_asked_for_of_a_group_is_meant_for_its_tasks_too(folder: Path) -> None:
    changed(lambda tree: [tree["results"][one].update({"acc_norm,none": 0.5}) for one in ("world", "nature")])(folder)
    (world,) = results.read(folder, ["world"], primary={"world": "acc_norm"}).tasks
    assert {one.metric for one in world.walk()} == {"acc_norm,none"}


@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("wikitext", {"byte_perplexity,none": 0.9}),
        ("arithmetic", {"solved,none": 1}),
        ("squadv2", {"f1,none": 0.4}),
        ("qa", {"acc,none": 45.0}),
    ],
)
def test_a_value_between_0_and_1_is_no_share_for_that_alone(tmp_path: Path, task: str, row: dict[str, float]) -> None:
    read_one(tmp_path, one_task(task, row))
    found = results.read(tmp_path, with_samples=False)
    assert not found.tasks[0].is_share
    assert found.average is None


@pytest.mark.parametrize("stderr", ["N/A", None, math.nan])
def test_a_standard_error_that_is_not_known_is_none(tmp_path: Path, stderr: object) -> None:
    found = read_one(tmp_path, one_task("qa", {"acc,none": 1.0, "acc_stderr,none": stderr}))
    assert found.stderr is None
    assert results.metrics(results.read(tmp_path, with_samples=False)) == {"qa/acc": 1.0}


def test_a_metric_that_goes_by_its_functions_name_has_that_ones_direction(tmp_path: Path) -> None:
    tree = one_task("humaneval", {"pass@1,create_test": 0.5})
    tree["higher_is_better"]["humaneval"] = {"pass_at_k": True}
    assert read_one(tmp_path, tree).higher_is_better


def test_a_tag_and_a_group_without_a_metric_are_the_tasks_that_belong_to_them(folder: Path) -> None:
    def loosen(tree: dict[str, Any]) -> None:
        tree["results"]["world"] = {"alias": "world", " ": " "}
        tree["configs"]["sums"]["tag"] = "math_word_problems"
        tree["configs"]["cities"]["tag"] = ["places", "math_word_problems"]

    changed(loosen)(folder)
    assert [one.task for one in results.read(folder, ["world"]).tasks] == ["nature", "cities"]
    assert [one.task for one in results.read(folder, ["math_word_problems"]).tasks] == ["cities", "sums"]


@pytest.mark.parametrize("text", ["task: sums\n", "group: world\ntask:\n  - cities\n", 'task: "cities"\n'])
def test_a_yaml_file_is_known_by_what_it_defines(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "own.yaml").write_text(text)
    (found,) = results.read(WRITTEN / "0.4.13", [str(file)]).tasks
    assert found.task in text


def write(folder: Path, tree: dict[str, Any], **options: Any) -> Path:
    return results.write(folder, tree, base="example/tiny", base_digest="b" * 12, adapter="a" * 64, **options)


def test_results_have_the_documented_name_and_say_whose_they_are(folder: Path) -> None:
    tree = raw(folder)
    file = write(folder, tree | {"samples": {"sums": [{}]}}, primary={"sums": FLEXIBLE}, scorer="1.0")
    assert file == folder / "results.json"
    written = json.loads(file.read_text())
    assert written.pop("gradeflow") == {
        "base": {"name": "example/tiny", "digest": "b" * 12},
        "adapter": "a" * 64,
        "primary": {"sums": FLEXIBLE} | dict.fromkeys(["world", "nature", "birds", "trees", "cities"], "acc,none"),
        "scorer": "1.0",
    }
    assert written == tree
    assert results.read(folder, base="b" * 12, adapter="a" * 64).tasks
    with pytest.raises(EvaluationError, match=r"these are results of adapter aaa.*, not of adapter other"):
        results.read(folder, adapter="other")
    with pytest.raises(EvaluationError, match=r"these are results of example/tiny bbb.*, not of other"):
        results.read(folder, base="other")


def test_results_json_stands_for_all_beside_and_below_it(folder: Path) -> None:
    write(folder, raw(folder))
    (folder / "results_2033-05-18T03-33-20.json").write_text("{")
    shutil.copytree(WRITTEN / "0.4.9", folder / "earlier")
    assert results.read(folder).versions == ("0.4.13",)


def test_what_the_harness_returns_in_memory_can_be_written(tmp_path: Path) -> None:
    tree = one_task("qa", {"acc,none": np.float32(0.5), "acc_stderr,none": "N/A"}, process=len)
    write(tmp_path, tree)
    assert results.read(tmp_path, with_samples=False).tasks[0].value == 0.5


def test_broken_results_are_not_written(folder: Path) -> None:
    tree = raw(folder)
    before = write(folder, tree).read_text()
    tree["results"]["sums"][STRICT] = math.nan
    with pytest.raises(EvaluationError, match="is nan"):
        write(folder, tree)
    assert (folder / "results.json").read_text() == before


def test_a_full_disk_leaves_the_results_that_were_there(small_disk: Path) -> None:
    tree = raw(WRITTEN / "0.4.13")
    before = write(small_disk, tree).read_text()
    with pytest.raises(DataError, match=r"cannot be written, and is as it was: .*free some space"):
        write(small_disk, tree, filling="x" * 2_000_000)
    assert (small_disk / "results.json").read_text() == before


def test_the_questions_that_one_has_right_and_the_other_wrong_are_rows_of_a_table() -> None:
    old, new = (results.read(WRITTEN / version).samples for version in ("0.4.11", "0.4.13"))
    (row,) = samples.differences(old["trees"], new["trees"], "acc,none", ("older", "newer"))
    assert row["right"] == "newer"
    assert {row["older"], row["newer"]} <= {"a kernel", "an acorn", "needles", "roots"}
    assert row["older"] != row["newer"]
    assert samples.differences(new["trees"], old["trees"], "acc,none")[0]["right"] == "base"
    assert samples.differences(old["cities"], old["cities"], "acc,none") == []


def test_a_table_of_written_answers_has_question_target_and_both_replies(folder: Path) -> None:
    lines("sums", lambda own: [line.replace('"exact_match": 0.0', '"exact_match": 1.0') for line in own])(folder)
    rows = samples.differences(file_of(WRITTEN / "0.4.13", "samples_sums"), file_of(folder, "samples_sums"), FLEXIBLE)
    assert [row["doc_id"] for row in rows] == [0, 2, 3]
    assert rows[0] == {
        "doc_id": 0,
        "right": "adapter",
        "question": "What is 1 + 2?",
        "target": "3",
        "base": "lol",
        "adapter": "lol",
    }


@pytest.mark.parametrize(("metric", "likeliest"), [("acc", "no"), ("acc_norm", "certainly")])
def test_the_reply_to_a_choice_is_the_likeliest_one_as_the_metric_counts(
    tmp_path: Path, metric: str, likeliest: str
) -> None:
    row = {
        "doc_id": 0,
        "doc": "water",
        "arguments": {"gen_args_0": {"arg_0": "Wet?", "arg_1": " no"}, "gen_args_1": {"arg_1": " certainly"}},
        "resps": [[["-2.0", "False"]], [["-4.5", "False"]]],
    }
    for name, score in (("one", 0.0), ("other", 1.0)):
        (tmp_path / name).write_text(json.dumps(row | {metric: score}))
    (found,) = samples.differences(tmp_path / "one", tmp_path / "other", metric)
    assert (found["question"], found["base"]) == ("Wet?", likeliest)


@pytest.mark.parametrize(
    ("spoil", "key", "message"),
    [
        (lines("cities", lambda own: own[:-1]), "acc,none", "not the same questions: 4 and 3, 1 in one alone"),
        (
            lines("cities", lambda own: [own[0].replace('"doc_hash": "', '"doc_hash": "0'), *own[1:]]),
            "acc,none",
            "not the same questions: 4 and 4, 2 in one alone, such as doc_id 0",
        ),
        (lambda folder: None, "acc,strict-match", "no samples with filter strict-match"),
        (lambda folder: None, "f1,none", "f1 of doc_id 0 is None; expected a number"),
    ],
)
def test_only_answers_to_the_same_questions_are_compared(folder: Path, spoil: Change, key: str, message: str) -> None:
    spoil(folder)
    with pytest.raises(EvaluationError, match=message):
        samples.differences(file_of(WRITTEN / "0.4.13", "samples_cities"), file_of(folder, "samples_cities"), key)


def test_metrics_and_facts_go_by_names_that_mlflow_takes(tmp_path: Path) -> None:
    from mlflow.utils.validation import validate_param_and_metric_name

    found = results.read(WRITTEN / "0.4.13")
    numbers, said = results.metrics(found), results.facts(found)
    assert numbers["cities/acc"] == 0.75
    assert numbers["cities/acc_stderr"] == 0.25
    assert numbers["sums/exact_match_flexible-extract"] == 0.25
    assert len(numbers) == 2 * sum(len(one.metrics) for one in found.walk())
    assert said["sums/metric"] == STRICT
    assert (said["world/n"], said["sums/num_fewshot"], said["sums/version"]) == ("9", "1", "3.0")
    assert said["sums/hash"] == raw(WRITTEN / "0.4.13")["task_hashes"]["sums"]
    assert said["lm_eval_version"] == "0.4.13"
    code = results.metric_name("human,eval", "pass@1,create_test")
    assert code == "human_eval/pass_at_1_create_test"
    assert all(validate_param_and_metric_name(name) for name in (*numbers, *said, code))


@pytest.mark.slow
def test_what_the_installed_lm_eval_writes_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"q": "Is water wet?", "a": 0}\n{"q": "Is fire cold?", "a": 1}\n')
    (tmp_path / "wetness.yaml").write_text(
        "task: wetness\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: ['yes', 'no']\ndoc_to_target: a\n"
        "metric_list: [{metric: acc}]\n"
    )
    command = [sys.executable, "-m", "lm_eval", "--model", "dummy", "--model_args", "pretrained=example/tiny"]
    command += ["--tasks", "wetness", "--include_path", ".", "--output_path", "out/results.json", "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    subprocess.run(command, check=True, cwd=tmp_path, env=os.environ | offline, capture_output=True)
    (found,) = results.read(tmp_path / "out", ["wetness"], base="example/tiny", adapter="").tasks
    assert (found.metric, found.n) == ("acc,none", 2)
