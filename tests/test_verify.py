"""The chain of a champion, and whatever is changed in it by one byte."""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gradeflow import champions, digest, lineage, params, promote, registry, tracking
from gradeflow.commands import verify
from gradeflow.errors import PromotionError
from gradeflow.params import Params
from gradeflow.promotion import verification
from support import evaluated
from support.evaluated import SHIPPED, World
from support.tracked import artifact_path, client, model_path

pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]
DATA = Path("data/mixed/train_mixed.jsonl")
RECIPE = {"made": "from this"}


@pytest.fixture
def project(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A repository with mixed data, a base and a champion."""
    monkeypatch.chdir(tmp_path)
    DATA.parent.mkdir(parents=True)
    DATA.write_text("{}\n")
    md5 = hashlib.md5(DATA.read_bytes(), usedforsecurity=False).hexdigest()
    Path("dvc.lock").write_text(
        f"schema: '2.0'\nstages:\n  mix:\n    cmd: mix\n    outs:\n    - path: {DATA}\n      md5: {md5}\n"
    )
    Path(".gitignore").write_text("models/\nmlruns/\nadapters/\n.gradeflow/\n*.db\n")
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], check=True)
    base = replace(evaluated.BASE, digest=digest.of_json(RECIPE))
    monkeypatch.setattr(evaluated, "BASE", base)
    recipe = Path("models") / base.name / "recipe.json"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(json.dumps(RECIPE))
    return tmp_path


def settings(name: str) -> Params:
    return params.load(SHIPPED, {"tracking.experiment": name, "promote.model": name})


def broken(champion: Params) -> set[str]:
    reference = f"models:/{champion.promote.model}@champion"
    return {link.name for link in verification.links(reference, champion) if link.holds is False}


@contextmanager
def flipped(file: Path) -> Iterator[None]:
    """One byte in the middle of a file is another."""
    whole = file.read_bytes()
    middle = len(whole) // 2
    try:
        file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        yield
    finally:
        file.write_bytes(whole)


@contextmanager
def tagged(version: registry.Version, name: str) -> Iterator[None]:
    """The last character of a version's tag is another."""
    before = version.tags[name]
    after = before[:-1] + chr(ord(before[-1]) ^ 1)
    try:
        client().set_model_version_tag(version.name, str(version.version), name, after)
        yield
    finally:
        client().set_model_version_tag(version.name, str(version.version), name, before)


@contextmanager
def run_tagged(run_id: str, name: str) -> Iterator[None]:
    before = tracking.read_tags(run_id)[name]
    try:
        client().set_tag(run_id, name, before[:-1] + chr(ord(before[-1]) ^ 1))
        yield
    finally:
        client().set_tag(run_id, name, before)


@contextmanager
def aliased(name: str, version: int) -> Iterator[None]:
    before = registry.get_alias(name, "champion")
    other = registry.get_version(name, version)
    assert before
    assert other
    try:
        registry.set_alias(other, "champion")
        yield
    finally:
        registry.set_alias(before, "champion")


def test_a_champion_s_chain_holds_and_each_byte_that_is_changed_is_named(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings("chain")
    name = given.promote.model
    world = World(given, project / "adapters")
    world.evaluation(30, (1, 50))
    promote.main(given)
    evaluation = world.evaluation(30, (2, 80))
    promote.main(given)
    champion = registry.get_alias(name, "champion")
    assert champion
    assert champion.version == 2
    capsys.readouterr()
    verify.main(given)
    said = capsys.readouterr().out
    assert "BAD" not in said
    assert "made again, it is the same: a difference of +30.0%" in said
    assert said.count("ok ") >= 20

    entry = registry.versions(name + champions.SUFFIX)[-1]
    training, decision = champion.tags[lineage.TRAINING_RUN], champions.history(name)[-1].run_id
    before = registry.get_version(name, 1)
    assert before
    short = champion.digest[:12]
    rival = artifact_path(before.tags[lineage.EVALUATION_RUN], f"samples/{before.digest[:12]}.jsonl")
    held = model_path(champion.model_id)
    changes: list[tuple[Callable[[], object], str]] = [
        (lambda: flipped(held / "adapter_model.safetensors"), "adapter"),
        (lambda: flipped(held / "adapter_config.json"), "adapter"),
        (lambda: tagged(champion, lineage.SCORER), "scorer.version"),
        (lambda: tagged(champion, registry.FILES), "adapter"),
        (lambda: tagged(champion, registry.ADAPTER_DIGEST), "version"),
        (lambda: tagged(champion, f"{lineage.BASE}.digest"), "base"),
        (lambda: tagged(champion, lineage.DATA + "train_mixed"), "data that was read: train_mixed"),
        (lambda: tagged(champion, lineage.DVC + str(DATA)), "version"),
        (lambda: tagged(entry, champions.EVIDENCE), "decision's evidence"),
        (lambda: flipped(artifact_path(training, "dataset/dataset_stats.json")), "report on the data"),
        (lambda: tagged(champion, tracking.GIT_COMMIT), "code"),
        (lambda: aliased(name, 1), "alias"),
        (lambda: tagged(entry, registry.ADAPTER_DIGEST), "history"),
        (lambda: tagged(entry, champions.SEAL), "version"),
        (lambda: flipped(artifact_path(training, "adapter/adapter_model.safetensors")), "training run's files"),
        (lambda: run_tagged(training, registry.ADAPTER_DIGEST), "training run's adapter"),
        (lambda: run_tagged(training, tracking.GIT_COMMIT), "code"),
        (lambda: flipped(artifact_path(evaluation, f"samples/{short}.jsonl")), "samples"),
        (lambda: flipped(artifact_path(evaluation, f"adapters/{short}/adapter_model.safetensors")), "samples"),
        (
            lambda: flipped(rival),
            "samples",
        ),
        (lambda: flipped(artifact_path(decision, "report.json")), "decision's report"),
        (lambda: flipped(artifact_path(decision, "evidence.json")), "decision's evidence"),
        (lambda: flipped(DATA), f"data: {DATA}"),
        (lambda: flipped(project / "models" / evaluated.BASE.name / "recipe.json"), "base"),
    ]
    for number, (change, link) in enumerate(changes):
        with change():  # type: ignore[attr-defined]
            assert link in broken(given), (number, link)
        assert not broken(given), number
    lock = Path("dvc.lock").read_text()
    Path("dvc.lock").write_text(lock.replace("md5: ", "md5: f"))
    assert f"data: {DATA}" in broken(given)
    with pytest.raises(PromotionError, match=r"1 links do not hold: data: data/mixed/train_mixed\.jsonl"):
        verify.main(given)
    Path("dvc.lock").write_text(lock)
    results = artifact_path(evaluation, "results.json")
    with flipped(results):
        assert broken(given) & {"samples", "evaluation", "decision"}
    shutil.rmtree(results.parent)
    assert broken(given) >= {"evaluation", "decision"}


def test_data_that_was_mixed_anew_since_is_no_broken_link(project: Path) -> None:
    given = settings("anew")
    World(given, project / "adapters").evaluation(30, (1, 80))
    promote.main(given)
    DATA.write_text('{"new": 1}\n')
    md5 = hashlib.md5(DATA.read_bytes(), usedforsecurity=False).hexdigest()
    lock = Path("dvc.lock")
    lock.write_text(lock.read_text().replace(lineage.dvc_lock_digests(project)[str(DATA)], md5))
    found = {link.name: link.holds for link in verification.links("models:/anew@champion", given)}
    assert found[f"data: {DATA}"] is None
    assert False not in found.values()


def test_what_is_not_there_is_named(project: Path) -> None:
    given = settings("nothing")
    tracking.connect(given.tracking, project)
    with pytest.raises(PromotionError, match="links do not hold: version"):
        verify.main(given)
