"""The records that travel between parts. They hold plain values: no models, no clients, nothing of MLflow."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

ProblemType = Literal["math", "code", "qa", "mixed"]
Kind = Literal["math", "choice", "text", "code", "task"]
Split = Literal["train", "validation", "test"]
KINDS: tuple[Kind, ...] = ("math", "choice", "text", "code")
"""Those of the mixed datasets; a `task` is a benchmark's."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its reference answer: a row of data/mixed/*.jsonl.

    `problem` is what a policy or an executor reads, choices and context included. `extra` holds what a grader
    needs and a policy must not see: `test` and `entry_point`, `choices`, the reference `solution`.
    """

    id: str
    source: str
    problem_type: ProblemType
    problem: str
    ground_truth: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """How the answer is graded: a number, a choice letter, free text, by unit tests, or by a benchmark's grader."""
        if "competition" in self.extra:
            return "task"
        if "test" in self.extra:
            return "code"
        if "choices" in self.extra:
            return "choice"
        return "math" if self.problem_type == "math" else "text"

    @property
    def question(self) -> str:
        """What is asked, without the paragraphs that it is about: those are the same for many questions."""
        return str(self.extra.get("question", self.problem))

    def to_row(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "source": self.source,
            "problem_type": self.problem_type,
            "problem": self.problem,
            "ground_truth": self.ground_truth,
            **self.extra,
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Example":
        extra = dict(row)
        known = {name: extra.pop(name) for name in ("id", "source", "problem_type", "problem", "ground_truth")}
        return cls(**known, extra=extra)


@dataclass(frozen=True, slots=True)
class Score:
    """A grade between 0 and 1, given by `by` (`number`, `choice`, `unit_tests`, `judge`, ...)."""

    value: float
    by: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Abstained:
    """No grade: a fault stood between the answer and its score. `cause` is the fault's short name."""

    cause: str
    reason: str = ""


Outcome = Score | Abstained


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened inside a rollout: an operator call, a chat call, a sandbox run, a verdict.

    `started` is seconds since the epoch, `parent` the index of the enclosing event in the same list.
    """

    kind: Literal["policy", "workflow", "operator", "chat", "sandbox", "score", "turn"]
    name: str
    started: float
    seconds: float
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy read and wrote once: token ids as sampled, and a mask of 1 where a token is its own.

    `log_probs` are those of the completion's tokens when they were sampled, at the rollout's temperature; empty where
    nobody needs them.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    text: str
    log_probs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One graded answer to one example: the record that validation, evaluation, the gate and lineage share.

    `score` is None when the scorer abstained, and then `fault` names the cause. `failure` is the policy's own
    failure (`syntax`, `contract`, `runtime`, `timeout`, `budget`, ...) and goes with a score of 0. `valid` says
    that the program was right as written: mended ones are not. `judged` is the judge's verdict where it was asked,
    be it to score the answer or to be checked itself.
    """

    example_id: str
    example_digest: str
    source: str
    kind: Kind
    completion: str
    answer: str | None
    score: float | None
    by: str
    valid: bool
    operators: tuple[str, ...] = ()
    failure: str | None = None
    fault: str | None = None
    repeat: int = 0
    judged: bool | None = None

    def to_row(self) -> dict[str, Any]:
        return asdict(self) | {"operators": list(self.operators)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Sample":
        return cls(**{**row, "operators": tuple(row["operators"])})


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode of the policy on one example: what it wrote, what that did, what it was worth, and why.

    `version` counts the updates of the policy that wrote it; `cost` is what the executor took, in USD.
    """

    example: Example
    turns: tuple[Turn, ...]
    sample: Sample
    events: tuple[Event, ...]
    reason: str = ""
    version: int = 0
    temperature: float = 1.0
    cost: float = 0.0
