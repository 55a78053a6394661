"""MLflow read as its users read it: by tags and names, and in a browser.

Two chains run through the stages' own code on a tiny base; the first adapter is promoted, the second refused.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mlflow
import pytest
from mlflow.entities import Run, Span, SpanType, Trace

from gradeflow import dataset, evaluate, promote, registry, tracking, train_grpo
from gradeflow.params import Params
from support import pages, tiny
from support.chat_server import ChatServer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch, TRL and lm-eval warn in many ways, none of them ours
]
SMALL = {**tiny.TWO_STEPS, "train__val_samples": 12, "train__trace_rollouts": 2, "promote__alpha": 0.9}
SMALL["promote__clean_data"] = False  # the tiny project has no report on its data
FIRST = {"train__learning_rate": 3e-3, "promote__minimum_n": 1}
SECOND = {"train__learning_rate": 1e-3, "promote__minimum_n": 1000}
STAGES = {"chain", "train_grpo", "evaluate", "promote"}


@dataclass
class SlowLearner:
    """An executor that knows an answer only when it is asked again: what is measured after the base is better."""

    asked: set[str] = field(default_factory=set)

    def answer(self, messages: list[dict[str, str]]) -> str:
        asked = messages[-1]["content"]
        if "Candidate: <<<" in asked:
            return "<true_false>False</true_false>"
        if asked not in self.asked:
            self.asked.add(asked)
            return "unsure"
        examples = (example for split in dataset.NAMES for example in dataset.read(split).examples)
        example = next((example for example in examples if example.problem in asked), None)
        if example is None:
            return "ready"
        if "solve()" in asked:
            return f"def solve():\n    return {example.ground_truth!r}"
        return f"<answer>{example.ground_truth}</answer>" if "<answer>" in asked else example.ground_truth


@dataclass(frozen=True)
class Store:
    """A project folder whose MLflow store holds two chains."""

    folder: Path
    model: str
    chains: tuple[str, str]

    def training(self) -> tuple[Run, Run]:
        first, second = (tracking.find_stage("train_grpo", chain) for chain in self.chains)
        assert first
        assert second
        return mlflow.get_run(first), mlflow.get_run(second)


def run_chain(settings: Params) -> str:
    """What `gradeflow chain` does between base and serve, in this process."""
    with (
        tracking.start_run("chain", settings.model_dump(mode="json")) as run,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in tracking.child_environment(run).items():
            patch.setenv(name, value)
        for stage in (train_grpo, evaluate, promote):
            stage.main(settings)
    return run.chain


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("project")
    tiny.project(folder, rows=3)
    with pytest.MonkeyPatch.context() as patch, ChatServer() as server:
        patch.chdir(folder)
        changes = SMALL | {"models__base__url": server.url}
        chains = []
        for own in (FIRST, SECOND):
            server.reply = SlowLearner().answer
            uri = f"sqlite:///{folder / 'mlflow.db'}"
            settings = tiny.settings(folder, taught=True, tracking__uri=uri, **changes, **own)
            tracking.connect(settings.tracking, folder)
            chains.append(run_chain(settings))
        first, second = chains
        yield Store(folder, settings.promote.model, (first, second))


def traces_of(run: Run) -> list[Trace]:
    found = mlflow.search_traces(locations=[run.info.experiment_id], run_id=run.info.run_id, return_type="list")
    return list(found)


def test_one_tag_finds_all_stages_of_a_chain_and_no_others(store: Store) -> None:
    for chain in store.chains:
        query = f"tags.`gradeflow.chain` = '{chain}' and attributes.status = 'FINISHED'"
        found = mlflow.search_runs(search_all_experiments=True, filter_string=query).set_index("tags.gradeflow.stage")
        assert sorted(found.index) == sorted(STAGES)
        assert found.pop("run_id")["chain"] == chain
        assert set(found["tags.mlflow.parentRunId"].drop("chain")) == {chain}
    assert len(mlflow.search_runs(search_all_experiments=True)) == 2 * len(STAGES)


def test_training_runs_are_compared_under_the_same_names(store: Store) -> None:
    first, second = store.training()
    assert first.data.metrics.keys() == second.data.metrics.keys()
    assert {"train/accuracy", "train/loss", "val_accuracy", "failures/syntax"} <= first.data.metrics.keys()
    assert first.data.tags.keys() == second.data.tags.keys()
    assert first.data.params.keys() == second.data.params.keys()
    differing = {name for name, value in first.data.params.items() if second.data.params[name] != value}
    assert differing == {"train.learning_rate", "promote.minimum_n"}
    assert first.info.run_name != second.info.run_name


def test_training_runs_name_the_same_datasets(store: Store) -> None:
    first, second = ({describe(used) for used in run.inputs.dataset_inputs} for run in store.training())
    data = [dataset.read("train"), dataset.read("validation")]
    assert first == second == {(one.path.name, one.md5, one.split) for one in data}


def describe(used: Any) -> tuple[str, str, str]:
    context = next(tag.value for tag in used.tags if tag.key == "mlflow.data.context")
    return used.dataset.name, used.dataset.digest, context


def test_each_training_run_has_its_own_traces(store: Store) -> None:
    for run in store.training():
        found = traces_of(run)
        assert sorted(trace.info.tags["step"] for trace in found) == ["1", "1", "2", "2"]
        assert [len(trace.info.assessments) for trace in found] == [1] * 4


@dataclass(frozen=True)
class Reader:
    """Someone in front of MLflow's pages."""

    page: Any
    address: str

    def open(self, path: str) -> None:
        self.page.goto(f"{self.address}/#/{path}")

    def sees(self, text: str, within: str = "body") -> None:
        self.page.locator(within).get_by_text(text).first.wait_for()

    def row(self, label: str) -> list[str]:
        """The cells of the table's row that has one with this label."""
        row = self.page.get_by_role("row").filter(has=self.page.get_by_text(label, exact=True))
        row.wait_for()
        return [" ".join(text.split()) for text in row.get_by_role("cell").all_inner_texts()]

    def metric(self, name: str) -> list[str]:
        """The same of the comparison's metrics: names and values, beside each other, that show what is scrolled to."""
        grids = self.page.locator(".ReactVirtualized__Grid")
        label, values = grids.first.get_by_text(name, exact=True), grids.last
        values.hover()
        for _ in range(100):
            if label.count():
                break
            self.page.mouse.wheel(0, 100)
            self.page.evaluate("() => new Promise(requestAnimationFrame)")
        top = label.locator("..").evaluate("cell => cell.style.top")
        cells = values.locator(f"div[style*='top: {top};']")
        cells.first.wait_for()
        return [text.strip() for text in cells.all_inner_texts()]


@pytest.fixture(scope="module")
def reader(store: Store) -> Iterator[Reader]:
    executable = pages.chromium()
    if executable is None:
        pytest.skip("no Chromium here, so nobody looks at MLflow's pages; install it: apt-get install chromium")
    with pages.server(store.folder) as address, pages.browser(executable) as browser:
        page = browser.new_page(viewport={"width": 1600, "height": 1100})
        page.set_default_timeout(60_000)
        yield Reader(page, address)


def test_the_comparison_of_two_runs_shows_their_names_settings_and_accuracy(store: Store, reader: Reader) -> None:
    runs = store.training()
    ids, experiments = [run.info.run_id for run in runs], [runs[0].info.experiment_id]
    reader.open(f"compare-runs?runs={quote(json.dumps(ids))}&experiments={quote(json.dumps(experiments))}")
    reader.sees("Comparing 2 Runs from 1 Experiment")
    for run in runs:
        reader.sees(run.info.run_name)
    assert reader.row("train.learning_rate")[-2:] == ["0.003", "0.001"]
    for name in ("train/accuracy", "val_accuracy"):
        shown = [float(text) for text in reader.metric(name)]
        assert shown == pytest.approx([run.data.metrics[name] for run in runs], abs=0.0006)


def test_a_trace_shows_problem_workflow_operators_and_score(store: Store, reader: Reader) -> None:
    traces = [trace for run in store.training() for trace in traces_of(run)]
    trace = next(trace for trace in traces if trace.search_spans(span_type=SpanType.CHAT_MODEL))
    reader.open(f"experiments/{trace.info.experiment_id}/traces?selectedEvaluationId={trace.info.trace_id}")
    for span in trace.data.spans:
        reader.sees(span.name, within=line_of(span))
    root, workflow, chat, score = (
        trace.search_spans(span_type=kind)[0]
        for kind in (SpanType.AGENT, SpanType.CHAIN, SpanType.CHAT_MODEL, SpanType.EVALUATOR)
    )
    for span, text in (
        (root, root.inputs["problem"]),
        (workflow, workflow.inputs["completion"]),
        (chat, chat.inputs["messages"][0]["content"]),
        (score, score.inputs["reference"]),
    ):
        reader.page.locator(line_of(span)).click()
        reader.sees(first_line(text), within="[role=dialog]")


def line_of(span: Span) -> str:
    return f"[data-testid=timeline-tree-node-{span.span_id}]"


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def test_the_registered_model_shows_versions_aliases_and_decisions(store: Store, reader: Reader) -> None:
    reader.open(f"models/{store.model}")
    reader.sees(first_line(registry.ABOUT))
    promoted, refused = reader.row("Version 1"), reader.row("Version 2")
    assert "@ champion" in promoted
    assert "@ candidate @ challenger" in refused
    assert promoted[-1].startswith("Promoted over the base:")
    assert refused[-1].startswith("Not promoted over the")


def test_the_page_of_a_version_shows_the_decision_and_what_it_rests_on(store: Store, reader: Reader) -> None:
    champion = registry.resolve(f"{store.model}@champion")
    assert champion
    reader.open(f"models/{store.model}/versions/{champion.version}")
    reader.sees("@ champion")
    reader.sees(mlflow.MlflowClient().get_model_version(store.model, str(champion.version)).description)
    for name, value in champion.tags.items():
        assert reader.row(name)[:2] == [name, value]
