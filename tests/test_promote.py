import json
import re
from pathlib import Path
from typing import Any

import pytest

from gradeflow import adapter, champions, lineage, params, promote, registry, tracking
from gradeflow.commands import history, rollback
from gradeflow.errors import AdapterError, PromotionError, SettingsError
from gradeflow.params import Params
from gradeflow.promotion import verification
from support.evaluated import BASE, SCORER, SHIPPED, World
from support.tracked import client

pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]


@pytest.fixture
def settings(store: Path, request: pytest.FixtureRequest) -> Params:
    """Settings with a registered model and an experiment of the test's own."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", request.node.name)
    return params.load(SHIPPED, {"tracking.experiment": name, "promote.model": name})


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
    with pytest.raises(PromotionError, match="not measured alike: scorer is"):
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
    interrupted = tracking.newest_run("promote")
    assert interrupted
    assert tracking.read_facts(interrupted).status == "KILLED"
    promote.main(settings)
    assert world.aliases() == {"candidate": 2, "challenger": None, "champion": 2, "previous": 1}
    assert tracking.read_facts(interrupted).status == "FINISHED"
    assert [move.version for move in champions.history(settings.promote.model)] == [1, 2]
    described = registry.get_alias(settings.promote.model, "champion")
    assert described


def _die_at_champion(real: Any) -> Any:
    def set_alias(version: registry.Version, alias: str) -> None:
        if alias == "champion":
            raise KeyboardInterrupt
        real(version, alias)

    return set_alias


@pytest.mark.parametrize(
    ("clean", "why"), [(None, "says nothing of what was removed"), (False, "mix.decontaminate was off")]
)
def test_an_adapter_of_unclean_data_is_not_promoted_unless_the_policy_says_so(
    world: World, settings: Params, capsys: pytest.CaptureFixture[str], clean: bool | None, why: str
) -> None:
    world.evaluation(30, (1, 80), clean=clean)
    promote.main(settings)
    assert why in capsys.readouterr().out.replace("\n", " ")
    assert world.aliases()["champion"] is None
    lax = settings.promote.model_copy(update={"clean_data": False})
    promote.main(settings.model_copy(update={"promote": lax}))
    assert world.aliases()["champion"] == 1


def test_a_champion_that_was_asked_otherwise_is_not_compared(world: World, settings: Params) -> None:
    world.evaluation(30, (1, 80), asked={"limit": 100})
    promote.main(settings)
    world.evaluation(30, (2, 99), asked={"limit": 50})
    with pytest.raises(PromotionError, match=r"not measured alike: evaluate\.limit is 50 for the challenger and 100"):
        promote.main(settings)


def test_an_adapter_from_a_folder_can_be_forced_and_its_chain_says_so(
    world: World, settings: Params, capsys: pytest.CaptureFixture[str]
) -> None:
    world.evaluation(30, (1, 80), trained_here=False)
    promote.main(settings)
    assert "it came from a folder" in " ".join(capsys.readouterr().out.split())
    assert world.aliases()["champion"] is None
    promote.main(settings, force=True, reason="a gift")
    links = list(verification.links(f"models:/{settings.promote.model}@champion", settings))
    assert ("training run", None) in [(link.name, link.holds) for link in links]
    assert not [link for link in links if link.holds is False]


def test_a_forced_promotion_leaves_its_mark(world: World, settings: Params, capsys: pytest.CaptureFixture[str]) -> None:
    world.evaluation(30, (1, 20))
    with pytest.raises(SettingsError, match="--reason"):
        promote.main(settings, force=True)
    promote.main(settings, force=True, reason="the base must go")
    assert "Promoted by force, because: the base must go. Else not promoted over the base" in capsys.readouterr().out
    (move,) = champions.history(settings.promote.model)
    assert (move.kind, move.version) == ("forced", 1)
    assert "the base must go" in move.why
    assert tracking.read_tags(move.run_id)[promote.FORCED] == "the base must go"
    assert world.aliases()["champion"] == 1


def test_the_best_of_many_has_to_be_better_than_one_alone(
    world: World, settings: Params, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = settings.promote.model_copy(update={"minimum_effect": 0.0})
    settings = settings.model_copy(update={"promote": policy})
    world.evaluation(30, (1, 35))
    promote.main(settings, dry_run=True)
    assert "would have been: Promoted" in capsys.readouterr().out
    world.evaluation(30, (1, 35), (2, 34))
    promote.main(settings, dry_run=True)
    said = capsys.readouterr().out
    assert "best of 2" in said
    assert "would have been: Not promoted over the base: the difference may be chance: p = 0.062" in said


def test_a_rollback_puts_the_champion_before_back(
    world: World, settings: Params, capsys: pytest.CaptureFixture[str]
) -> None:
    name = settings.promote.model
    with pytest.raises(PromotionError, match="has no champion"):
        rollback.main(settings)
    world.evaluation(30, (1, 60))
    promote.main(settings)
    with pytest.raises(PromotionError, match="there is none before it"):
        rollback.main(settings)
    world.evaluation(30, (2, 90))
    promote.main(settings)
    rollback.main(settings, reason="answers in French")
    assert world.aliases() == {"candidate": 2, "challenger": None, "champion": 1, "previous": 2}
    rollback.main(settings, to=2)
    assert [(move.version, move.kind) for move in champions.history(name)] == [
        (1, "promotion"),
        (2, "promotion"),
        (1, "rollback"),
        (2, "rollback"),
    ]
    capsys.readouterr()
    history.main(settings)
    said = capsys.readouterr().out
    assert "answers in" in said
    assert said.count(" rollback ") == 2
    with pytest.raises(PromotionError, match="no version 9"):
        rollback.main(settings, to=9)
    with pytest.raises(PromotionError, match="is the champion already"):
        rollback.main(settings, to=2)


def promote_all(world: World, settings: Params, *adapters: tuple[int, int]) -> None:
    """Evaluate each (seed, right answers) beside a base of 30, and let promotion decide on it."""
    for one in adapters:
        world.evaluation(30, one)
        promote.main(settings)


def test_an_alias_that_was_set_by_hand_is_entered_into_the_history(world: World, settings: Params) -> None:
    name = settings.promote.model
    promote_all(world, settings, (1, 60), (2, 55))
    second = registry.get_version(name, 2)
    assert second
    registry.set_alias(second, "champion")
    world.evaluation(30, (3, 90))
    promote.main(settings)
    kinds = [(move.version, move.kind) for move in champions.history(name)]
    assert kinds == [(1, "promotion"), (2, "by hand"), (3, "promotion")]
    assert world.aliases()["previous"] == 2


def test_an_alias_of_a_former_champion_is_set_back_to_what_the_log_says(world: World, settings: Params) -> None:
    name = settings.promote.model
    promote_all(world, settings, (1, 60), (2, 90))
    first = registry.get_version(name, 1)
    assert first
    registry.set_alias(first, "champion")  # as a process would that is killed while it completes the first move
    champion, number = champions.current(name)
    assert champion
    assert (champion.version, number) == (2, 2)
    assert [move.kind for move in champions.history(name)] == ["promotion", "promotion"]


def test_a_champion_that_was_deleted_is_said_and_another_can_be_put_there(world: World, settings: Params) -> None:
    name = settings.promote.model
    promote_all(world, settings, (1, 60), (2, 90))
    client().delete_model_version(name, "2")
    world.evaluation(30, (3, 95))
    with pytest.raises(PromotionError, match=r"version 2 is champion by the history, .* deleted"):
        promote.main(settings)
    rollback.main(settings, to=1)
    promote.main(settings)
    assert [move.version for move in champions.history(name)] == [1, 2, 1, 3]


def test_going_back_twice_goes_back_two_champions(world: World, settings: Params) -> None:
    promote_all(world, settings, (1, 50), (2, 70), (3, 90))
    rollback.main(settings, reason="not [/good] enough")
    rollback.main(settings)
    assert [move.version for move in champions.history(settings.promote.model)] == [1, 2, 3, 2, 1]
    with pytest.raises(PromotionError, match="there is none before it"):
        rollback.main(settings)
    history.main(settings)


def test_a_former_champion_that_is_refused_later_rests_on_what_it_did(world: World, settings: Params) -> None:
    name = settings.promote.model
    promote_all(world, settings, (1, 60), (2, 90), (1, 60))
    assert world.aliases()["challenger"] == 1
    links = list(verification.links(f"models:/{name}/1", settings))
    assert not [link for link in links if link.holds is False]


def test_a_description_keeps_to_what_stores_take(world: World, settings: Params) -> None:
    world.evaluation(30, (1, 60))
    promote.main(settings)
    version = registry.get_alias(settings.promote.model, "champion")
    assert version
    for number in range(60):
        registry.describe(version, f"line {number} " + "x" * 100)
    said = client().get_model_version(version.name, "1").description
    assert len(said) <= registry.LONGEST
    assert "line 59 " in said
    assert "line 0 " not in said


def test_of_two_promotions_at_once_one_wins_and_the_other_is_judged_against_it(
    world: World, settings: Params, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another promotion comes between the decision and the move."""
    first = world.evaluation(30, (1, 60))
    second = world.evaluation(30, (2, 90))
    real, others = champions.move, [second]

    def overtaken(*arguments: Any, **named: Any) -> champions.Move:
        if others:
            promote.main(settings, evaluation=others.pop())
        return real(*arguments, **named)

    monkeypatch.setattr(champions, "move", overtaken)
    promote.main(settings, evaluation=first)
    said = " ".join(capsys.readouterr().out.split())
    assert "another champion came first. Judging against it." in said
    assert "Not promoted over the champion: a difference of -30.0%" in said
    assert world.aliases()["champion"] == 2
    assert [move.version for move in champions.history(settings.promote.model)] == [2]
