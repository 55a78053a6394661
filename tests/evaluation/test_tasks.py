import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lm_eval.tasks import TaskManager

from gradeflow import params
from gradeflow.errors import DataError, SettingsError, SetupError
from gradeflow.evaluation import tasks, unit_tests
from gradeflow.sandbox import Sandbox
from support.references import evaluated

PARAMS = Path(__file__).parents[2] / "params.yaml"
SETTINGS = params.load(PARAMS).evaluate
DATA = os.environ.get("GRADEFLOW_DATA", "")
with_data = pytest.mark.skipif(not DATA, reason="GRADEFLOW_DATA names no folder with the real GSM8K")
DOCUMENTED = [
    "gsm8k",
    "hellaswag",
    "arc_easy",
    "arc_challenge",
    "mmlu",
    "humaneval",
    "cmmlu",
    "commonsense_qa",
    "drop",
    "mbpp",
    "aime25",
    "ifeval",
    "truthfulqa",
]


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """And no hub, so that nothing waits for one."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def settings(**changes: Any) -> params.Evaluate:
    return SETTINGS.model_copy(update=changes)


def rows(count: int, first: int = 0) -> list[dict[str, str]]:
    numbers = range(first, first + count)
    return [{"question": f"What is {n} + 1?", "answer": f"It is one more.\n#### {n + 1}"} for n in numbers]


def write(file: Path, made: Sequence[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(made)), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(made))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in made))


def own_task(folder: Path, name: str = "sums", more: str = "") -> Path:
    write(folder / "sums.jsonl", rows(4))
    file = folder / f"{name}.yaml"
    file.write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/sums.jsonl}}}}\n"
        "test_split: test\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
        f"generation_kwargs: {{until: ['Q:']}}\nmetric_list: [{{metric: exact_match, aggregation: mean, "
        f"higher_is_better: true}}]\n{more}"
    )
    return file


# Names


def test_documented_names_are_lm_evals_own_but_for_the_alias_of_math() -> None:
    assert tasks.resolve(DOCUMENTED) == DOCUMENTED
    assert tasks.resolve(["math", "workflow", "hendrycks_math"]) == ["hendrycks_math", "workflow"]


def test_a_glob_stands_for_all_that_it_matches() -> None:
    assert tasks.resolve(["humaneval*instruct"]) == ["humaneval_64_instruct", "humaneval_instruct"]


def test_unknown_tasks_are_named_with_the_nearest_ones() -> None:
    with pytest.raises(SettingsError) as raised:
        tasks.resolve(["gsm8kk", "gsm8k", "helaswag", "worklow", "qqqqqqq", "zz*zz"])
    said = str(raised.value)
    assert said.startswith("evaluate.tasks: no such task: 'gsm8kk' (nearest: gsm8k, ")
    assert re.search(r"'helaswag' \(nearest: hellaswag\b", said)
    assert "'worklow' (nearest: workflow" in said
    assert "'qqqqqqq', 'zz*zz';" in said


@pytest.mark.slow
def test_the_index_is_the_one_that_lm_eval_makes_of_all_its_files() -> None:
    own, theirs = tasks._published(), TaskManager().task_index
    assert len(theirs) > 10_000
    assert {name: (e.kind, e.yaml_path, e.tags) for name, e in own.items()} == {
        name: (e.kind, e.yaml_path, e.tags) for name, e in theirs.items()
    }


# YAMLs of one's own


def test_a_yaml_file_is_a_task_by_its_path_and_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_task(tmp_path / "suite")
    monkeypatch.chdir(tmp_path)
    (by_path,) = tasks.resolve(["suite/sums.yaml"])
    assert by_path == str(tmp_path / "suite" / "sums.yaml")
    assert tasks.resolve(["sums"], ["suite"]) == ["sums"]
    for objects in (tasks.load([by_path], settings()), tasks.load(["sums"], settings(include=["suite"]))):
        assert evaluated(objects, lambda row: row["answer"])["sums"]["exact_match,none"] == 1.0


def test_a_task_of_ones_own_stands_over_lm_evals_of_the_same_name(tmp_path: Path) -> None:
    own_task(tmp_path, "gsm8k")
    assert tasks.datasets_of("gsm8k") == [("openai/gsm8k", "main")]
    assert tasks.datasets_of("gsm8k", [str(tmp_path)]) == [("json", "")]


def test_files_that_others_include_are_no_tasks(tmp_path: Path) -> None:
    own_task(tmp_path)
    (tmp_path / "defaults.yaml").write_text("output_type: generate_until\n")
    (tmp_path / "more.yaml").write_text("include: sums.yaml\ntask: more_sums\n")
    assert tasks.resolve(["more_sums"], [str(tmp_path)]) == ["more_sums"]
    with pytest.raises(SettingsError, match="no such task: 'defaults'"):
        tasks.resolve(["defaults"], [str(tmp_path)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("task: sums\nmetric_list: [\n", r"bad\.yaml, line 3: not valid YAML: "),
        ("task: sums\n  more: 1\n", r"bad\.yaml, line 2: not valid YAML: mapping values are not allowed"),
        ("- task\n", r"bad\.yaml: Expected YAML dict"),
        ("include: gone.yaml\ntask: sums\n", r"gone\.yaml: No such file or directory; .* names .*bad\.yaml"),
        ("include: bad.yaml\ntask: sums\n", r"Include cycle"),
    ],
)
def test_a_yaml_that_cannot_be_read_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=said):
        tasks.resolve([str(file)])
    with pytest.raises(SettingsError, match=said):
        tasks.resolve(["gsm8k"], [str(tmp_path)])


def test_a_path_that_holds_no_task_says_so(tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text("output_type: generate_until\n")
    with pytest.raises(SettingsError, match=r"none\.yaml: no task: expected `task: NAME` or `group: NAME`"):
        tasks.resolve([str(tmp_path / "none.yaml")])
    with pytest.raises(SettingsError, match=r"gone\.yaml: No such file"):
        tasks.resolve([str(tmp_path / "gone.yaml")])
    with pytest.raises(SettingsError, match=r"^evaluate\.include: .*gone: no such folder"):
        tasks.resolve(["gsm8k"], [str(tmp_path / "gone")])


# What they need


def test_whether_a_task_runs_generated_code_is_known_for_groups_and_tags_too(tmp_path: Path) -> None:
    assert tasks.needs_code("humaneval_instruct")
    assert tasks.needs_code("mbpp_plus")
    assert not any(map(tasks.needs_code, ("gsm8k", "mmlu", "workflow")))
    (tmp_path / "suite.yaml").write_text("group: suite\ntask:\n- gsm8k\n- group: inner\n  task: [humaneval]\n")
    own_task(tmp_path, more="unsafe_code: true\ntag: coding\n")
    assert tasks.needs_code("suite", [str(tmp_path)])
    assert tasks.needs_code("coding", [str(tmp_path)])


def test_the_datasets_of_a_group_are_those_of_its_leaves(tmp_path: Path) -> None:
    assert tasks.datasets_of("gsm8k") == [("openai/gsm8k", "main")]
    mmlu = tasks.datasets_of("mmlu")
    assert len(mmlu) == 57
    assert {path for path, _ in mmlu} == {"cais/mmlu"}
    (tmp_path / "suite.yaml").write_text("group: suite\ntask:\n- task: gsm8k\n  dataset_name: socratic\n- arc_easy\n")
    assert tasks.datasets_of("suite", [str(tmp_path)]) == [
        ("openai/gsm8k", "socratic"),
        ("allenai/ai2_arc", "ARC-Easy"),
    ]


@pytest.mark.parametrize("name", ["gsm8k", "ai2_arc", "hendrycks_math", "humaneval"])
def test_the_datasets_of_a_task_are_what_lm_eval_asks_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(path: str, name: str | None = None, **_: Any) -> Any:
        asked.append((path, name or ""))
        return datasets.DatasetDict()

    monkeypatch.setattr(datasets, "load_dataset", ask)
    manager = TaskManager(include_defaults=False)
    manager.task_index.update({leaf.task: tasks._published()[leaf.task] for leaf in tasks.leaves(name)})
    with asyncio.Runner() as runner:
        sandbox = Sandbox(params.load(PARAMS).sandbox)
        with unit_tests.in_sandbox(sandbox, runner.run):
            for leaf in tasks.leaves(name):
                with pytest.raises(KeyError):  # there are no rows
                    manager.load([leaf.task])
        runner.run(sandbox.close())
    assert asked == tasks.datasets_of(name)


# Data


def test_what_is_absent_offline_is_told_by_dataset(tmp_path: Path, own_datasets_cache: Path) -> None:
    cached = own_datasets_cache / "openai___gsm8k" / "main" / "0.0.0" / "cc7b047b6e5b"
    names = ["gsm8k", "arc_easy", "workflow"]
    arc = "allenai/ai2_arc (ARC-Easy): not in the datasets cache, and evaluate.data names no folder for it"
    assert tasks.absent(names, settings()) == [arc.replace("allenai/ai2_arc (ARC-Easy)", "openai/gsm8k (main)"), arc]
    write(cached / "dataset_info.json", [])
    assert tasks.absent(names, settings()) == [arc]
    for split in ("train", "validation", "test"):
        write(tmp_path / "arc" / "ARC-Easy" / f"{split}.jsonl", rows(1))
    assert tasks.absent(names, settings(data={"allenai/ai2_arc": str(tmp_path / "arc")})) == []
    (tmp_path / "arc" / "ARC-Easy" / "test.jsonl").unlink()
    (said,) = tasks.absent(names, settings(data={"allenai/ai2_arc": str(tmp_path / "arc")}))
    assert "arc_easy needs test" in said


def test_files_of_a_task_of_ones_own_are_there_or_absent(tmp_path: Path) -> None:
    file = str(own_task(tmp_path))
    assert tasks.absent([file], settings()) == []
    (tmp_path / "sums.jsonl").unlink()
    assert tasks.absent([file], settings()) == [
        "json: not in the datasets cache, and evaluate.data names no folder for it"
    ]


@pytest.mark.parametrize(
    "files",
    [
        ["train.jsonl", "test.jsonl"],
        ["train.json", "test.json"],
        ["main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"],
        ["data/train.parquet", "data/test.parquet"],
    ],
)
def test_lm_evals_definition_reads_local_files_in_its_place(files: list[str], tmp_path: Path) -> None:
    for file in files:
        write(tmp_path / file, rows(6, first=0 if "train" in file else 10))
    (task,) = tasks.load(["gsm8k"], settings(data={"openai/gsm8k": str(tmp_path)}))
    assert [row["answer"][-2:] for row in task.test_docs()] == [str(n) for n in range(11, 17)]
    assert task.config.num_fewshot == 5
    right = evaluated([task], lambda row: row["answer"])["gsm8k"]
    assert right["exact_match,strict-match"] == right["exact_match,flexible-extract"] == 1.0


def test_a_groups_tasks_read_the_folder_of_their_own_name(tmp_path: Path) -> None:
    for leaf in tasks.leaves("hendrycks_math"):
        for split in ("train", "test"):
            made = {"problem": f"Of {leaf.name}?", "solution": r"It is \boxed{" + leaf.name[:3] + "}."}
            write(tmp_path / leaf.name / f"{split}.jsonl", [made] * 3)
    objects = tasks.load(["hendrycks_math"], settings(data={"EleutherAI/hendrycks_math": str(tmp_path)}))
    results = evaluated(objects, lambda row: f"${row['answer']}$")
    assert results["hendrycks_math_algebra"]["exact_match,none"] == results["hendrycks_math"]["exact_match,none"] == 1.0
    assert len(results) == 8


@pytest.mark.parametrize(
    ("files", "place", "said"),
    [
        (["test.jsonl"], "", r"gsm8k needs train, as files of one kind such as train\.jsonl \(.*holds test\.jsonl$"),
        (["all.jsonl"], "", r"gsm8k needs train, test, .* holds all\.jsonl$"),
        (["train.jsonl", "test.parquet"], "", r"gsm8k needs train, test, as files of one kind"),
        (["test.jsonl"], "test.jsonl", r"is one file, and gsm8k needs train beside test"),
        ([], "gone", r"evaluate\.data: openai/gsm8k: .*gone: no such folder or file$"),
    ],
)
def test_a_split_that_the_definition_names_must_be_there(
    files: list[str], place: str, said: str, tmp_path: Path
) -> None:
    for file in files:
        write(tmp_path / file, rows(6))
    given = settings(data={"openai/gsm8k": str(tmp_path / place)})
    with pytest.raises(DataError, match=said):
        tasks.load(["gsm8k"], given)
    (told,) = tasks.absent(["gsm8k"], given)
    assert re.search(said, told)


def test_parts_of_a_dataset_never_share_files(tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        write(tmp_path / f"{split}.jsonl", rows(1))
    given = settings(data={"allenai/ai2_arc": str(tmp_path)})
    assert tasks.absent(["arc_easy"], given) == []
    told = tasks.absent(["arc_easy", "arc_challenge"], given)
    assert [re.search(r"has no folder (\S+);", one)[1] for one in told] == ["ARC-Easy", "ARC-Challenge"]  # type: ignore[index]


CHANGES: dict[str, Callable[[str], str]] = {
    "sums.jsonl": lambda text: text.replace("3", "4"),
    "sums.yaml": lambda text: text.replace("Q:", "A:"),
    "scoring.py": lambda text: text.replace("{}", "{'acc': 1}"),
    "test.jsonl": lambda text: text.replace("3", "4"),
    "world.yaml": lambda text: f"{text}aggregate_metric_list: [{{metric: exact_match}}]\n",
}


@pytest.mark.parametrize("changed", CHANGES)
def test_tasks_with_other_contents_are_other_tasks(changed: str, tmp_path: Path) -> None:
    (tmp_path / "scoring.py").write_text("def process(doc, results): return {}\n")
    own = own_task(tmp_path, more="process_results: !function scoring.process\n")
    (tmp_path / "world.yaml").write_text("group: world\ntask: [sums]\n")
    for split in ("train", "test"):
        write(tmp_path / "gsm8k" / f"{split}.jsonl", rows(6))
    given = settings(include=[str(tmp_path)], data={"openai/gsm8k": str(tmp_path / "gsm8k")})
    names = [str(own), "world", "gsm8k"]
    before = tasks.contents(names, given)
    assert tasks.contents(names, given) == before
    (file,) = tmp_path.rglob(changed)
    file.write_text(CHANGES[changed](file.read_text()))
    assert tasks.contents(names, given) != before


@pytest.mark.parametrize(
    ("name", "path", "said"),
    [
        ("squadv2", "lighteval/squad_v2", "squadv2 reads it by code of its own"),
        ("capitals", "own/cities", "capitals reads it as its group says"),
        ("arc_easy", "own/science", "arc_easy reads it as its group says"),
    ],
)
def test_files_that_would_be_passed_over_are_refused(name: str, path: str, said: str, tmp_path: Path) -> None:
    """Nothing is more deceptive than figures on other questions than those that were given."""
    inline = "{task: capitals, dataset_path: own/cities, test_split: test}"
    (tmp_path / "world.yaml").write_text(
        f"group: world\ntask:\n  - {inline}\n  - {{task: arc_easy, dataset_path: own/science}}\n"
    )
    for split in ("train", "validation", "test"):
        write(tmp_path / "rows" / f"{split}.jsonl", rows(3))
    asked = name if name == "squadv2" else "world"
    given = settings(include=[str(tmp_path)], data={path: str(tmp_path / "rows")})
    (told,) = tasks.absent([asked], given, offline=False)
    assert told.startswith(f"evaluate.data: {path}: {said}, and cannot be given files; leave it out of evaluate.data")


def test_data_that_only_the_hub_has_is_an_error_that_says_where_to_put_it() -> None:
    with pytest.raises(DataError, match=r"^gsm8k: its data cannot be read: .*name a folder in evaluate\.data$"):
        tasks.load(["gsm8k"], settings())


def test_a_task_that_needs_a_package_says_which(tmp_path: Path) -> None:
    (tmp_path / "scoring.py").write_text("import a_package_that_is_not_there\n")
    file = own_task(tmp_path, more="process_results: !function scoring.process\n")
    with pytest.raises(SetupError, match=r"^sums: lm-eval cannot load it: No module named 'a_package_that"):
        tasks.load([str(file)], settings())


@with_data
@pytest.mark.parametrize("limit", [24, pytest.param(None, marks=pytest.mark.slow)])
def test_lm_evals_gsm8k_takes_its_references_for_right_and_others_for_wrong(limit: int | None) -> None:
    objects = tasks.load(["gsm8k"], settings(data={"openai/gsm8k": f"{DATA}/gsm8k"}))
    right = evaluated(objects, lambda row: row["answer"], limit)["gsm8k"]
    wrong = evaluated(objects, lambda row: row["answer"] + "1", limit)["gsm8k"]
    keys = ("exact_match,strict-match", "exact_match,flexible-extract")
    assert [right[key] for key in keys] == [1.0, 1.0]
    assert [wrong[key] for key in keys] == [0.0, 0.0]
    assert right["sample_len"] == (limit or 1319)
