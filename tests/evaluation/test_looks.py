"""Evaluations that stop where the gate can decide, and promotion on what they leave."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.model import LM

from gradeflow import adapter, evaluate, promote, tracking
from gradeflow.errors import PromotionError, SettingsError
from gradeflow.evaluation import looks, process, worker, workflow
from gradeflow.evaluation.plan import BASE, WORKFLOW, Plan, Subject
from gradeflow.params import Params
from gradeflow.promotion import verification
from gradeflow.types import Example
from gradeflow.workflow import fixed
from support import tiny
from support.chat_server import ChatServer

GOOD, BAD = fixed.program("Custom"), "no workflow"


class Writers(LM):  # type: ignore[misc]
    """A stand-in for a base with adapters: each subject writes one program, whatever it is asked."""

    def __init__(self, programs: Mapping[str, str]) -> None:
        super().__init__()
        self.programs = programs
        self.asked: dict[str, int] = {}

    def of(self, subject: Subject) -> dict[str, Any]:
        self._subject = subject.name
        return {"model": self}

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        self.asked[self._subject] = self.asked.get(self._subject, 0) + len(requests)
        return [self.programs[self._subject]] * len(requests)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        raise NotImplementedError

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return chat_history[-1]["content"]

    @property
    def tokenizer_name(self) -> str:
        return "stand-in"


class Project:
    """A project whose evaluations ask `Writers`."""

    def __init__(self, world: Path, folder: Path, url: str) -> None:
        self.names = [adapter.digest(world / f"adapter-{number}")[:12] for number in range(3)]
        self.writers = Writers({})
        self.world = world
        self.url = url
        self.model = f"looked-at-{folder.name}"
        tiny.project(folder, rows=10)

    def settings(self, **changes: object) -> Params:
        asked = {
            "evaluate__tasks": "[workflow]",
            "scorer__judge": "never",
            "models__base__url": self.url,
            "models__base__model": "stand-in",
            "promote__looks": 4,
            "promote__minimum_n": 10,
            "promote__model": self.model,
            "promote__clean_data": "false",
            "tracking__experiment": "looked-at",
        }
        return tiny.settings(self.world, **(asked | changes))

    def evaluate(self, *good: int, adapters: tuple[int, ...] = (0,), **changes: object) -> str:
        """An evaluation in which these adapters, -1 for the base, write a workflow that is right where one can be."""
        programs = {name: GOOD if number in good else BAD for number, name in enumerate(self.names)}
        self.writers = Writers({BASE: GOOD if -1 in good else BAD, **programs})
        evaluate.main(
            self.settings(**changes), adapter=",".join(str(self.world / f"adapter-{one}") for one in adapters)
        )
        found = tracking.find_stage("evaluate")
        assert found is not None
        return found

    def run(self, plan: Plan) -> None:
        workflow.measure(plan, self.writers, partial(worker._whole, plan, WORKFLOW))  # type: ignore[arg-type]


@pytest.fixture
def project(tiny_world: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}/mlflow.db")
    with ChatServer() as server:
        found = Project(tiny_world, tmp_path, server.url)
        server.reply = tiny.executor(tmp_path)
        monkeypatch.setattr(process, "run", found.run)
        yield found


def test_an_evaluation_stops_when_the_gate_can_decide_and_promotion_decides_the_same(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = project.names[:2]
    run = project.evaluate(0)
    told = json.loads(tracking.read_text(run, "results.json"))
    asked, planned = told["looked"]["asked"], told["looked"]["planned"]
    assert (told["looked"]["challenger"], told["looked"]["rival"], told["looked"]["said"]) == (first, BASE, "for")
    assert asked < planned / 2
    assert project.writers.asked == {BASE: asked, first: asked}
    assert told["adapters"][first]["n"] == told["base"]["n"] == told["fixed"]["fixed_Custom"]["n"] == asked
    assert tracking.read_metrics(run)["workflow/saved"] == planned - asked
    assert f"a gain is shown after {asked} of {planned} questions" in " ".join(capsys.readouterr().out.split())
    promote.main(project.settings())
    report = json.loads(tracking.read_text(tracking.find_stage("promote") or "", "report.json"))
    assert report["promote"]
    assert report["findings"][0]["n"] == asked
    assert report["level"] < 0.05 / 2
    wrong = [
        one for one in verification.links(f"models:/{project.model}@champion", project.settings()) if one.holds is False
    ]
    assert not wrong

    run = project.evaluate(0, adapters=(1,))
    told = json.loads(tracking.read_text(run, "results.json"))
    assert (told["looked"]["challenger"], told["looked"]["rival"], told["looked"]["said"]) == (second, first, "against")
    asked = told["looked"]["asked"]
    assert project.writers.asked == {BASE: asked, second: asked, first: asked}
    assert asked < planned
    promote.main(project.settings())
    assert "Not promoted over the champion" in " ".join(capsys.readouterr().out.split())


def test_what_stopped_early_decides_nothing_else(project: Project) -> None:
    first = project.evaluate(0)
    with pytest.raises(PromotionError, match=r"by another policy.*before the first look: promote.alpha: 0.05"):
        promote.main(project.settings(promote__alpha=0.2))
    project.evaluate(1, adapters=(1,))
    promote.main(project.settings())
    with pytest.raises(PromotionError, match=rf"looked at to decide on {project.names[0]} against base, and nothing"):
        promote.main(project.settings(), evaluation=first)


def test_of_several_adapters_all_questions_are_asked(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    run = project.evaluate(0, adapters=(0, 1))
    assert "looked" not in json.loads(tracking.read_text(run, "results.json"))
    assert "only one adapter can be judged, and there are 2" in capsys.readouterr().out


def test_in_doubt_all_questions_are_asked_and_what_was_broken_off_goes_on_where_it_was(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, left = workflow.run_harness, 3
    unsure: dict[str, object] = {"promote__minimum_effect": 0.0, "promote__power": 0.999}

    def break_off(model: Mapping[str, Any], task: Any) -> dict[str, Any]:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        return ask(model, task)

    monkeypatch.setattr(workflow, "run_harness", break_off)
    with pytest.raises(KeyboardInterrupt):
        project.evaluate(-1, 0, **unsure)
    monkeypatch.setattr(workflow, "run_harness", ask)
    assert project.writers.asked == {BASE: 20, project.names[0]: 10}
    told = json.loads(tracking.read_text(project.evaluate(-1, 0, **unsure), "results.json"))["looked"]
    assert project.writers.asked == {BASE: 20, project.names[0]: 30}
    assert (told["said"], told["asked"], told["planned"], told["at"]) == ("against", 40, 40, 3)


def test_only_workflows_can_be_looked_at(project: Project) -> None:
    with pytest.raises(SettingsError, match=r"(?s)promote.*leave `workflow` alone in targets"):
        project.settings(promote__targets="[workflow, gsm8k]")


def test_the_first_questions_are_of_all_kinds_and_each_look_has_its_share() -> None:
    examples = [Example(f"{kind}-{at}", "s", kind, "", "", "") for kind in ("code", "math") for at in range(50)]  # type: ignore[arg-type]
    found = looks.shuffled(examples)
    assert found == looks.shuffled(examples[::-1])
    assert 5 <= sum(one.id.startswith("code") for one in found[:20]) <= 15
    cut = list(looks.blocks(found, (0.125, 0.25, 1.0)))
    assert [len(one) for one in cut] == [12, 13, 75]
    assert [one for block in cut for one in block] == found
