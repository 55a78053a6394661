"""The champions of a model, one after the other: a log that decides, and the alias that follows it.

An alias can be set by whoever comes last, whatever it was judged against. So each move is first written to a log: a
version of the model `NAME.champions`, whose numbers the store gives out once. An entry says which entry it follows, and
counts only if that is the last that counts; of two that follow the same one, the first counts and the other was
overtaken. The aliases `champion` and `previous` are then set to what the log says, by whoever sees that they are not.
"""

import contextlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from gradeflow import digest, registry
from gradeflow.errors import PromotionError
from gradeflow.registry import Version

Kind = Literal["promotion", "forced", "rollback", "by hand"]

CHAMPION, PREVIOUS = "champion", "previous"
SUFFIX = ".champions"
AFTER = "gradeflow.champions.after"
VERSION = "gradeflow.champions.version"
KIND = "gradeflow.champions.kind"
RUN = "gradeflow.champions.run"
WHY = "gradeflow.champions.why"
EVALUATION = "gradeflow.champions.evaluation"
EVIDENCE = "gradeflow.champions.evidence"
"""SHA-256 of the list of files that a promotion rested on, which its run has."""
DONE = "gradeflow.champions.done"
SEAL = "gradeflow.champions.seal"
"""Digest of the tags that a version became champion with."""
ABOUT = """The champions of {name}, in their order: a version for each, with why and by which run.

Written by `gradeflow promote` and `gradeflow rollback`, read by `gradeflow history`. Do not set aliases here, and do
not delete versions: what is champion follows from them.
"""


class Overtaken(PromotionError):  # noqa: N818 - says what there is
    """Another move came first."""


@dataclass(frozen=True, slots=True)
class Move:
    """Version `version` of the model became champion. `done` says that the alias was set.

    `evaluation` and `evidence` are what a promotion, also a forced one, rested on.
    """

    number: int
    after: int
    version: int
    digest: str
    kind: Kind
    why: str
    run_id: str
    at: datetime
    done: bool
    seal: str
    evaluation: str
    evidence: str


def history(name: str) -> list[Move]:
    """The moves that count, the oldest first."""
    found: list[Move] = []
    for entry in registry.versions(name + SUFFIX):
        if VERSION in entry.tags and int(entry.tags[AFTER]) == (found[-1].number if found else 0):
            found.append(_move(entry))
    return found


def _move(entry: Version) -> Move:
    tags = entry.tags
    return Move(
        entry.version,
        int(tags[AFTER]),
        int(tags[VERSION]),
        entry.digest,
        tags[KIND],  # type: ignore[arg-type]
        tags[WHY],
        tags.get(RUN, ""),
        datetime.fromtimestamp(entry.made_ms / 1000, UTC),
        DONE in tags,
        tags.get(SEAL, ""),
        tags.get(EVALUATION, ""),
        tags.get(EVIDENCE, ""),
    )


def promotion(name: str, version: int) -> Move | None:
    """The last move that made a version champion by an evaluation."""
    found = [one for one in history(name) if one.version == version and one.kind in {"promotion", "forced"}]
    return found[-1] if found else None


def now(name: str) -> tuple[Version | None, int]:
    """As `current`, changing nothing."""
    moves = history(name)
    if moves and not moves[-1].done:
        return _version(name, moves[-1].version), moves[-1].number
    return registry.get_alias(name, CHAMPION), moves[-1].number if moves else 0


def current(name: str) -> tuple[Version | None, int]:
    """The champion, and the number of the move that made it, 0 without one.

    A move that was cut off before the alias was set is completed. An alias that was set by hand, or before there was a
    log, is entered into it; but where it is a former champion's, what the log says is restored: that may as well be
    what is left of a process that was killed while it completed an earlier move.

    Raises:
        PromotionError: the champion or its alias was deleted.
    """
    while True:
        moves = settle(name)
        champion = registry.get_alias(name, CHAMPION)
        if not moves and champion is None:
            return None, 0
        if moves and champion is None:
            raise PromotionError(
                f"{name} version {moves[-1].version} is champion by the history, and it or its alias was deleted. "
                f"`gradeflow rollback --to VERSION` makes another version champion"
            )
        if moves and champion and champion.version == moves[-1].version:
            return champion, moves[-1].number
        if champion and champion.version in {one.version for one in moves}:
            registry.set_alias(_version(name, moves[-1].version), CHAMPION)
        elif champion:
            with contextlib.suppress(Overtaken):
                after = moves[-1].number if moves else 0
                move(name, champion, after=after, kind="by hand", why="the alias was set outside of Gradeflow")


def move(
    name: str,
    to: Version,
    *,
    after: int,
    kind: Kind,
    why: str,
    run_id: str = "",
    evaluation: str = "",
    evidence: str = "",
) -> Move:
    """Make a version champion, if the move `after` is still the last.

    Raises:
        Overtaken: it is not; nothing has changed.
    """
    line = f"{to.name} version {to.version}: {kind}. {why}"
    tags = {
        AFTER: str(after),
        VERSION: str(to.version),
        KIND: kind,
        WHY: why,
        RUN: run_id,
        EVALUATION: evaluation,
        EVIDENCE: evidence,
        SEAL: seal(_version(name, to.version)),
        registry.ADAPTER_DIGEST: to.digest,
    }
    tags = {key: value for key, value in tags.items() if value}
    entry = registry.append(name + SUFFIX, to, tags, line=line, run_id=run_id or None, about=ABOUT.format(name=name))
    moves = settle(name)
    if found := next((one for one in moves if one.number == entry.version), None):
        return found
    registry.describe(entry, "Overtaken: another move after the same one came first, and this one does not count.")
    raise Overtaken(f"{to}: another champion came first")


def seal(version: Version) -> str:
    """The digest of a version's tags, but for those that MLflow writes."""
    return digest.of_json({key: value for key, value in version.tags.items() if not key.startswith("mlflow.")})


def settle(name: str) -> list[Move]:
    """Complete the last move where that was cut off; returns the history."""
    moves = history(name)
    if not moves or moves[-1].done:
        return moves
    while True:
        last = moves[-1]
        if len(moves) > 1 and (former := registry.get_version(name, moves[-2].version)):
            registry.set_alias(former, PREVIOUS)
        registry.set_alias(_version(name, last.version), CHAMPION)
        moves = history(name)
        if moves[-1].number == last.number:  # if not, this may have set back what a later move has set
            registry.set_tags(_version(name + SUFFIX, last.number), {DONE: "true"})
            return history(name)


def _version(name: str, number: int) -> Version:
    if (found := registry.get_version(name, number)) is None:
        raise PromotionError(f"{name} version {number}, which the history of champions names, is not in the registry")
    return found
