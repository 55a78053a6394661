"""The chain that a registered adapter hangs on, link by link: each is looked at again, and says whether it holds."""

import hashlib
import json
import math
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gradeflow import adapter, champions, digest, gate, lineage, params, registry, tracking
from gradeflow.errors import GradeflowError, PromotionError
from gradeflow.promotion import evidence
from gradeflow.promotion.evaluated import Evaluation, Subject, compare, look
from gradeflow.registry import Version

SHORT = 12
TOLERANCE = 1e-9
"""Between figures of one decision on two machines."""


@dataclass(frozen=True, slots=True)
class Link:
    """`holds` is None where there is nothing here to look at."""

    name: str
    holds: bool | None
    said: str


def links(reference: str, settings: params.Params, root: Path = Path()) -> Iterator[Link]:
    """Every link of a version, as far as it can be followed."""
    version = registry.resolve(reference)
    if version is None:
        yield Link("version", holds=False, said=f"the registry has no {reference}")
        return
    with TemporaryDirectory() as scratch:
        place = Path(scratch)
        chain = _Chain(version, reference, settings, root, place)
        for name, follow in chain.steps().items():
            try:
                yield from follow()
            except (GradeflowError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                yield Link(name, holds=False, said=" ".join(str(error).split()) or type(error).__name__)


class _Chain:
    def __init__(self, version: Version, reference: str, settings: params.Params, root: Path, scratch: Path) -> None:
        self.version = version
        self.tags = version.tags
        self.reference = reference.removeprefix("models:/")
        self.settings = settings
        self.root = root
        self.scratch = scratch
        self._evaluations: dict[str, Evaluation] = {}

    def _read(self, run_id: str) -> Evaluation:
        """An evaluation's files, fetched once."""
        if run_id not in self._evaluations:
            self._evaluations[run_id] = Evaluation.read(run_id, self.scratch / "evaluations")
        return self._evaluations[run_id]

    def steps(self) -> Mapping[str, Callable[[], Iterator[Link]]]:
        return {
            "alias": self._alias,
            "history": self._history,
            "version": self._sealed,
            "adapter": self._adapter,
            "base": self._base,
            "training run": self._training,
            "code": self._code,
            "data": self._data,
            "evaluation": self._evaluation,
            "decision": self._decision,
        }

    def _alias(self) -> Iterator[Link]:
        said = f"{self.reference} is {self.version}"
        if self.reference.endswith(f"@{champions.CHAMPION}"):
            moves = self._moves
            if not moves:
                yield Link("alias", holds=False, said=f"{said}; no promotion made it champion")
                return
            agreed = moves[-1].version == self.version.version
            yield Link("alias", agreed, said if agreed else f"{said}; by the history it is version {moves[-1].version}")
        else:
            yield Link("alias", holds=None, said=said)

    @cached_property
    def _moves(self) -> list[champions.Move]:
        return champions.history(self.version.name)

    def _move(self) -> champions.Move | None:
        moves = [one for one in self._moves if one.version == self.version.version]
        return moves[-1] if moves else None

    def _history(self) -> Iterator[Link]:
        move = self._move()
        if move is None:
            yield Link("history", holds=None, said="it was never champion")
            return
        agreed = move.digest == self.version.digest
        since = f"champion since {move.at:%Y-%m-%d %H:%M:%S} UTC by {move.kind}"
        yield Link("history", agreed, since if agreed else f"{since}, as {move.digest[:SHORT]}, another adapter")

    def _sealed(self) -> Iterator[Link]:
        """The tags are those that it became champion with."""
        move = self._move()
        if move is None or not move.seal:
            yield Link("version", holds=None, said="its tags are not sealed: it was never champion")
            return
        agreed = champions.seal(self.version) == move.seal
        yield Link(
            "version", agreed, "its tags are sealed" if agreed else "its tags were changed after it was promoted"
        )

    def _adapter(self) -> Iterator[Link]:
        folder = registry.download(self.version, self.scratch / "adapter")
        if wrong := registry.changed_files(self.version, folder):
            yield Link("adapter", holds=False, said=f"changed or missing in the store: {', '.join(wrong)}")
            return
        found = adapter.digest(folder)
        agreed = found == self.version.digest
        yield Link("adapter", agreed, f"its files have digest {found[:SHORT]}" + ("" if agreed else ", not its tag's"))
        named = adapter.read_config(folder).get("base_model_name_or_path")
        base = lineage.base_identity(self.tags)
        yield Link("adapter's base", named == base.name, f"its configuration names {named}, its tags {base.name}")

    def _base(self) -> Iterator[Link]:
        base = lineage.base_identity(self.tags)
        file = self.root / self.settings.base.folder / base.name / "recipe.json"
        if not file.is_file():
            yield Link("base", holds=None, said=f"{base.name} is not here")
            return
        found = digest.of_json(json.loads(file.read_text(encoding="utf-8")))
        yield Link("base", found == base.digest, f"{base.name}, recipe {found[:SHORT]}")

    def _training(self) -> Iterator[Link]:
        run_id = self.tags.get(lineage.TRAINING_RUN)
        if run_id is None:
            yield Link("training run", holds=None, said="the adapter came from a folder")
            return
        facts = tracking.read_facts(run_id)
        yield Link("training run", facts.status == "FINISHED", f"{facts.name} ({run_id}) is {facts.status}")
        noted = facts.tags.get(registry.ADAPTER_DIGEST, "")
        agreed = noted == self.version.digest
        yield Link("training run's adapter", agreed, f"it made {noted[:SHORT] or 'none'}")
        kept = adapter.digest(tracking.download_artifact(run_id, "adapter", self.scratch / "trained"))
        yield Link("training run's files", kept == self.version.digest, f"its files have digest {kept[:SHORT]}")
        for name, read in tracking.read_datasets(run_id).items():
            said = self.tags.get(lineage.DATA + name)
            yield Link(
                f"data that was read: {name}", said == read, f"MD5 {read}" + ("" if said == read else f", not {said}")
            )

    def _code(self) -> Iterator[Link]:
        commit, dirty = self.tags.get(tracking.GIT_COMMIT), self.tags.get(tracking.GIT_DIRTY)
        if commit is None:
            yield Link("code", holds=None, said="the training run was not in a git repository")
            return
        noted = tracking.read_tags(self.tags[lineage.TRAINING_RUN]).get(tracking.GIT_COMMIT)
        if noted != commit:
            yield Link("code", holds=False, said=f"commit {commit[:SHORT]}; the training run says {noted}")
            return
        known = self._git("cat-file", "-e", f"{commit}^{{commit}}")
        if dirty == "true":
            yield Link("code", holds=None, said=f"commit {commit[:SHORT]} with changes that were not committed")
        elif known is None:
            yield Link("code", holds=None, said=f"commit {commit[:SHORT]} is not in a repository here")
        else:
            yield Link("code", holds=True, said=f"commit {commit[:SHORT]}")

    def _git(self, *arguments: str) -> bytes | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout

    def _data(self) -> Iterator[Link]:
        """What dvc.lock said of the mixed files; their content, from the working folder or DVC's cache."""
        noted = {name.removeprefix(lineage.DVC): md5 for name, md5 in self.tags.items() if name.startswith(lineage.DVC)}
        locked = lineage.dvc_lock_digests(self.root)
        for path, md5 in noted.items():
            if md5.endswith(".dir"):
                continue
            here, cached = self.root / path, self.root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
            found = _md5(here) if here.is_file() else ""
            if md5 in {found, locked.get(path)}:
                agreed = found == locked.get(path)
                said = (
                    f"MD5 {md5}"
                    if agreed
                    else f"MD5 is {found or 'none'}, dvc.lock says {locked.get(path)}, it was {md5}"
                )
                yield Link(f"data: {path}", agreed, said)
            elif cached.is_file():
                yield Link(f"data: {path}", _md5(cached) == md5, f"MD5 {_md5(cached)}, in DVC's cache")
            else:
                yield Link(f"data: {path}", holds=None, said=f"MD5 {md5} is not here: the data has changed since")

    def _evaluation(self) -> Iterator[Link]:
        run_id = self.tags[lineage.EVALUATION_RUN]
        facts = tracking.read_facts(run_id)
        yield Link("evaluation", facts.status == "FINISHED", f"{facts.name} ({run_id}) is {facts.status}")
        found = self._read(run_id)
        told = {
            lineage.SCORER: found.scorer,
            lineage.JUDGE_MODEL: found.judge.get("model", ""),
            lineage.JUDGE_PROMPT: found.judge.get("prompt", ""),
            f"{lineage.BASE}.digest": found.base.digest,
        }
        for name, value in told.items():
            agreed = self.tags.get(name, "") == value
            yield Link(
                name.removeprefix("gradeflow."), agreed, f"{value}" if agreed else f"{value}, not {self.tags.get(name)}"
            )

    def _decision(self) -> Iterator[Link]:
        move = champions.promotion(self.version.name, self.version.version)
        if move is None:
            yield Link("decision", holds=None, said="it was not promoted")
            return
        run_id = move.run_id
        report = tracking.read_text(run_id, evidence.REPORT)
        noted = tracking.read_text(run_id, evidence.NAME)
        yield Link("decision's evidence", digest.of_bytes(noted.encode()) == move.evidence, f"of run {run_id}")
        written = json.loads(noted)
        yield Link("decision's report", digest.of_bytes(report.encode()) == written["report"], f"of run {run_id}")
        for training_run, told in written["data"].items():
            agreed = evidence.about_data(training_run) == told
            yield Link("report on the data", agreed, f"of run {training_run}" if told else "there was none")
        evaluations = {}
        for evaluation, files in written["evaluations"].items():
            evaluations[evaluation] = self._read(evaluation)
            found = evidence.files(evaluations[evaluation].folder)
            wrong = sorted(name for name in found.keys() | files.keys() if found.get(name) != files.get(name))
            said = (
                f"{len(files)} files of run {evaluation}"
                if not wrong
                else f"changed, missing or new: {', '.join(wrong[:5])}"
            )
            yield Link("samples", not wrong, said)
        yield self._repeated(json.loads(report), evaluations)

    def _repeated(self, told: Mapping[str, Any], evaluations: Mapping[str, Evaluation]) -> Link:
        """The gate's own decision, made again from the samples."""
        policy = params.Promote.model_validate({"looks": 1, **told["policy"]})  # decisions from before there were looks
        challenger = _subject(evaluations[told["evaluation_run"]], told["challenger"])
        rival = _subject(evaluations[told["rival_evaluation_run"]], told["champion"])
        tasks = [*policy.targets, *policy.guards]
        compared = [compare(task, challenger, rival) for task in tasks]
        again = gate.decide(compared, policy, among=told["among"], look=look(challenger, rival, policy))
        before = {name: told[name] for name in asdict(again)}
        agreed = _alike(json.loads(json.dumps(asdict(again))), before)
        if not agreed:
            return Link("decision", holds=False, said=f"made again, the samples say: {'; '.join(again.reasons)}")
        if challenger.digest != self.version.digest:
            return Link("decision", holds=False, said=f"it was about {challenger.digest[:SHORT]}")
        if not again.promote or told["objections"]:
            return Link("decision", bool(told["forced"]) or None, told["verdict"])
        return Link("decision", holds=True, said=f"made again, it is the same: {'; '.join(again.reasons)}")


def _md5(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, partial(hashlib.md5, usedforsecurity=False)).hexdigest()


def _subject(evaluation: Evaluation, of: str | None) -> Subject:
    if of is None:
        return Subject(evaluation)
    found = next((one for one in evaluation.subjects() if one.digest == of), None)
    if found is None:
        raise PromotionError(f"evaluation run {evaluation.run_id} has no adapter {of[:SHORT]}")
    return found


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)
