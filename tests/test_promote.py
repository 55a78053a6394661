import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gradeflow import adapter, lineage, params, promote, registry, tracking
from gradeflow.adapter import BaseIdentity
from gradeflow.errors import AdapterError, PromotionError
from gradeflow.params import Params
from gradeflow.types import Sample

pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]
PARAMS = params.load(Path(__file__).parents[1] / "params.yaml")
BASE = BaseIdentity("gradeflow-base-0123456789ab", "", "0123456789ab" + "0" * 52)
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
SCORER = "gradeflow-scorer/1+test"


@pytest.fixture
def settings(store: Path, request: pytest.FixtureRequest) -> Params:
    """Settings with a registered model and an experiment of the test's own."""
    name = request.node.name[:60].replace("[", "-").replace("]", "")
    return PARAMS.model_copy(
        update={
            "tracking": params.Tracking(uri="", experiment=name),
            "promote": PARAMS.promote.model_copy(update={"model": name}),
        }
    )


def make_adapter(folder: Path, seed: int, scale: float = 1.0) -> str:
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    tensors = {
        f"{LAYER}.lora_{half}.weight": (random.normal(size=shape) * scale).astype(np.float32)
        for half, shape in (("A", (4, 8)), ("B", (8, 4)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / adapter.CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": BASE.name}))
    return adapter.digest(folder)


def samples(right: int, n: int = 100) -> list[Sample]:
    kinds: list[Any] = ["math", "text", "choice", "code"]
    return [
        Sample(f"e{i}", f"d{i}", "s", kinds[i % 4], "code", "1", float(i < right), "number", True) for i in range(n)
    ]


class World:
    """Training and evaluation runs as their stages leave them."""

    def __init__(self, settings: Params, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        tracking.connect(settings.tracking, Path())

    def evaluation(self, base: int, *adapters: tuple[int, int], scorer: str = SCORER, **changes: Any) -> str:
        """An evaluation run; each adapter is (seed, right answers)."""
        with tracking.start_run("train_grpo", {}) as training:
            training.log_dataset("train_mixed", Path("data/mixed/train_mixed.jsonl"), "a" * 32, "training", 1)
        with tracking.start_run("evaluate", {}) as run:
            entries = {}
            self._log_samples(run, "base", samples(base))
            for seed, right in adapters:
                folder = self.folder / f"{run.id}-{seed}"
                digest = make_adapter(folder, seed, **changes)
                short = digest[:12]
                run.log_artifacts(folder, f"adapters/{short}")
                self._log_samples(run, short, samples(right))
                entries[short] = {"digest": digest, "path": f"adapters/{short}", "training_run": training.id}
            identity = {"name": BASE.name, "revision": "", "digest": BASE.digest}
            results = {"base": identity, "adapters": entries} | ({"scorer": scorer} if scorer else {})
            run.log_text(json.dumps(results), "results.json")
        return run.id

    def _log_samples(self, run: tracking.Run, name: str, found: list[Sample]) -> None:
        run.log_text("".join(json.dumps(one.to_row()) + "\n" for one in found), f"samples/{name}.jsonl")

    def alias(self, alias: str) -> int | None:
        version = registry.get_alias(self.settings.promote.model, alias)
        return version.version if version else None

    def aliases(self) -> dict[str, int | None]:
        return {name: self.alias(name) for name in ("candidate", "challenger", "champion", "previous")}


@pytest.fixture
def world(settings: Params, tmp_path: Path) -> World:
    return World(settings, tmp_path)


def test_an_adapter_that_beats_the_base_becomes_champion_with_its_lineage(
    world: World, settings: Params, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = world.evaluation(30, (1, 80))
    promote.main(settings)
    assert "Promoted over the base: a difference of +50.0% over 100 questions" in capsys.readouterr().out
    assert world.aliases() == {"candidate": 1, "challenger": None, "champion": 1, "previous": None}
    champion = registry.get_alias(settings.promote.model, "champion")
    assert champion
    assert champion.tags[lineage.EVALUATION_RUN] == run_id
    assert champion.tags[lineage.SCORER] == SCORER
    assert champion.tags["gradeflow.data.train_mixed"] == "a" * 32
    assert lineage.base_identity(champion.tags) == BASE


def test_the_decision_is_a_run_with_numbers_report_and_plot(world: World, settings: Params, tmp_path: Path) -> None:
    world.evaluation(30, (1, 80))
    promote.main(settings)
    run_id = tracking.find_stage("promote")
    assert run_id
    metrics = tracking.read_metrics(run_id)
    assert (metrics["promotion/n"], metrics["promotion/promote"], metrics["promotion/wins"]) == (100, 1, 50)
    assert metrics["promotion/difference"] == pytest.approx(0.5)
    report = json.loads(tracking.read_text(run_id, "report.json"))
    assert (report["rival"], len(report["won"]), report["lost"]) == ("base", 50, [])
    assert tracking.download_artifact(run_id, "differences.png", tmp_path).stat().st_size > 1000


def test_a_version_says_what_was_decided_about_it_and_in_which_run(world: World, settings: Params) -> None:
    import mlflow

    world.evaluation(30, (1, 80))
    promote.main(settings)
    first = tracking.find_stage("promote")
    world.evaluation(30, (2, 75))
    promote.main(settings)
    second = tracking.find_stage("promote")
    said = [
        mlflow.MlflowClient().get_model_version(settings.promote.model, str(number)).description for number in (1, 2)
    ]
    assert said[0].startswith("Promoted over the base: a difference of +50.0% over 100 questions, p = ")
    assert said[1].startswith("Not promoted over the champion: a difference of -5.0% is below the least that counts")
    assert [one.rpartition(" Run ")[2] for one in said] == [f"{first}.", f"{second}."]


def test_promoting_the_champion_again_promotes_nothing(
    world: World, settings: Params, capsys: pytest.CaptureFixture[str]
) -> None:
    world.evaluation(30, (1, 80))
    promote.main(settings)
    decided = tracking.find_stage("promote")
    capsys.readouterr()
    promote.main(settings)
    assert "is the champion already; nothing to promote" in capsys.readouterr().out
    assert world.aliases()["champion"] == 1
    assert tracking.find_stage("promote") == decided


def test_an_adapter_no_better_than_the_base_stays_a_challenger_and_is_told_why(
    world: World, settings: Params, capsys: pytest.CaptureFixture[str]
) -> None:
    world.evaluation(30, (1, 31))
    promote.main(settings)
    why = (
        "Not promoted over the base: a difference of +1.0% is below the least that counts, 2.0%; the difference may be"
    )
    assert why in capsys.readouterr().out
    assert world.aliases() == {"candidate": 1, "challenger": 1, "champion": None, "previous": None}
    promote.main(settings)
    assert "Decided before, in run" in capsys.readouterr().out


def test_the_next_champion_has_to_beat_the_champion_and_not_the_base(world: World, settings: Params) -> None:
    world.evaluation(30, (1, 80))
    promote.main(settings)
    world.evaluation(30, (2, 75))
    promote.main(settings)
    assert world.aliases() == {"candidate": 2, "challenger": 2, "champion": 1, "previous": None}
    world.evaluation(30, (3, 95))
    promote.main(settings)
    assert world.aliases() == {"candidate": 3, "challenger": 2, "champion": 3, "previous": 1}


def test_the_champions_samples_are_taken_from_the_same_evaluation_where_it_took_part(
    world: World, settings: Params
) -> None:
    world.evaluation(30, (1, 80))
    promote.main(settings)
    world.evaluation(30, (1, 40), (2, 60))
    promote.main(settings)
    assert world.aliases()["champion"] == 2


def test_a_dry_run_decides_and_changes_nothing(
    world: World, settings: Params, capsys: pytest.CaptureFixture[str]
) -> None:
    world.evaluation(30, (1, 80))
    promote.main(settings, dry_run=True)
    assert "nothing was moved; it would have been: Promoted" in capsys.readouterr().out
    assert set(world.aliases().values()) == {None}
    assert tracking.find_stage("promote") is None


def test_a_named_evaluation_is_taken_instead_of_the_newest(world: World, settings: Params) -> None:
    first = world.evaluation(30, (1, 80))
    world.evaluation(30, (2, 30))
    promote.main(settings, evaluation=first)
    champion = registry.get_alias(settings.promote.model, "champion")
    assert champion
    assert champion.tags[lineage.EVALUATION_RUN] == first


def test_an_adapter_that_does_nothing_is_never_registered(world: World, settings: Params) -> None:
    world.evaluation(30, (1, 80), scale=0.0)
    with pytest.raises(AdapterError, match="does nothing"):
        promote.main(settings)
    assert set(world.aliases().values()) == {None}


def test_a_champion_scored_by_another_scorer_is_not_compared(world: World, settings: Params) -> None:
    world.evaluation(30, (1, 80))
    promote.main(settings)
    world.evaluation(30, (2, 99), scorer="gradeflow-scorer/2+test")
    with pytest.raises(PromotionError, match="scored differently"):
        promote.main(settings)
    assert world.aliases()["champion"] == 1


def test_files_other_than_those_evaluated_are_refused(world: World, settings: Params, store: Path) -> None:
    run_id = world.evaluation(30, (1, 80))
    (file,) = (store / "mlruns").rglob(f"{run_id}/artifacts/adapters/*/{adapter.CONFIG}")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 16}))
    with pytest.raises(PromotionError, match="was evaluated"):
        promote.main(settings)


def test_without_an_evaluation_the_stage_to_run_is_named(world: World, settings: Params) -> None:
    with pytest.raises(PromotionError, match="Run `gradeflow evaluate`"):
        promote.main(settings)


def test_an_evaluation_of_the_base_alone_promotes_nothing(world: World, settings: Params) -> None:
    world.evaluation(30)
    with pytest.raises(PromotionError, match="measured the base alone"):
        promote.main(settings)


def test_an_evaluation_without_graded_workflows_promotes_nothing(world: World, settings: Params) -> None:
    run = world.evaluation(30, (1, 80), scorer="")
    with pytest.raises(PromotionError, match=f"{run} has no graded workflows.*`workflow` among evaluate.tasks"):
        promote.main(settings)


def test_results_that_lack_a_part_are_named(world: World, settings: Params) -> None:
    with tracking.start_run("evaluate", {}) as run:
        run.log_text('{"base": {}}', "results.json")
    with pytest.raises(PromotionError, match=f"evaluation run {run.id}: results.json"):
        promote.main(settings)


def test_an_interrupted_promotion_leaves_the_champion_and_is_completed_by_the_next(
    world: World, settings: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.evaluation(30, (1, 60))
    promote.main(settings)
    world.evaluation(30, (2, 90))
    with monkeypatch.context() as broken:
        broken.setattr(registry, "set_alias", _die_at_champion(registry.set_alias))
        with pytest.raises(KeyboardInterrupt):
            promote.main(settings)
    assert world.aliases()["champion"] == 1
    promote.main(settings)
    assert world.aliases() == {"candidate": 2, "challenger": None, "champion": 2, "previous": 1}


def _die_at_champion(real: Any) -> Any:
    def set_alias(version: registry.Version, alias: str) -> None:
        if alias == "champion":
            raise KeyboardInterrupt
        real(version, alias)

    return set_alias


def test_unscored_samples_do_not_lower_the_mean_that_chooses_the_challenger() -> None:
    unscored = replace(samples(1, 2)[1], score=None, fault="judge_down")
    assert promote.Evaluated("d", "p", "t", 0, (*samples(1, 1), unscored)).mean == 1.0
