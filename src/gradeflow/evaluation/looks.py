"""An evaluation of workflows that is looked at while it goes on: where the gate can decide, the rest is not asked."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gradeflow import gate
from gradeflow.gate import Look
from gradeflow.params import Promote
from gradeflow.types import Example, Sample

FIXED = frozenset({"alpha", "power", "minimum_effect", "minimum_n", "looks"})
"""What of a policy has to be fixed before the first look."""


def terms(policy: Promote) -> dict[str, Any]:
    return policy.model_dump(mode="json", include=set(FIXED))


@dataclass(frozen=True, slots=True)
class Looked:
    """How it ended: what the gate `said` at look number `at`, from 0, after `asked` of `planned` questions.

    `challenger` and `rival` are the names of those that were compared, `shares` of the questions those of all looks
    that were planned, and `terms` the policy's.
    """

    challenger: str
    rival: str
    shares: tuple[float, ...]
    at: int
    asked: int
    planned: int
    said: Literal["for", "against"]
    terms: Mapping[str, Any]

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "Looked":
        """From what `to_dict` gives, after a way through JSON."""
        return cls(**{**told, "shares": tuple(told["shares"])})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def look(self) -> Look:
        return Look(self.shares, self.at)

    @property
    def saved(self) -> int:
        return self.planned - self.asked

    def __str__(self) -> str:
        shown = "a gain is shown" if self.said == "for" else "a gain that counts is ruled out"
        if self.look.is_last:
            shown = "all were asked" if self.said == "for" else "all were asked, and no gain is shown"
        return (
            f"look {self.at + 1} of {len(self.shares)}, {self.challenger} against {self.rival}: {shown} after "
            f"{self.asked} of {self.planned} questions"
        )


def shuffled(examples: Sequence[Example]) -> list[Example]:
    """In an order that has nothing to do with what they are, so that the first are a sample of all."""
    found = sorted(examples, key=lambda one: one.id)
    random.Random(0).shuffle(found)
    return found


def blocks(examples: Sequence[Example], shares: Sequence[float]) -> Iterator[Sequence[Example]]:
    """The questions between one look and the next."""
    ends = [round(share * len(examples)) for share in shares]
    for start, end in zip([0, *ends], ends, strict=False):
        yield examples[start:end]


def look(
    names: tuple[str, str], ours: Sequence[Sample], theirs: Sequence[Sample], policy: Promote, at: Look, planned: int
) -> Looked | None:
    """What the gate says of the samples so far; None where it needs more."""
    compared = gate.compare("workflow", gate.pair(ours, theirs))
    said = gate.decided(compared, policy, at)
    return said and Looked(*names, at.shares, at.at, len(ours), planned, said, terms(policy))
