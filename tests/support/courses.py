"""Small training courses over a tiny base; a named stand-in gives the scores, and abstains where told to."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from gradeflow import digest, models, params, sources
from gradeflow.background import Background
from gradeflow.grpo import loop
from gradeflow.grpo.environment import Graded, Writer
from gradeflow.judge import Judge
from gradeflow.params import Params
from gradeflow.prompt import Message
from gradeflow.types import Example, Sample
from gradeflow.workflow.program import policy_messages
from support import tiny

GROUP = 4
WORKFLOW = params.load(tiny.ROOT / "params.yaml").workflow
QUESTIONS = tuple(itertools.islice(sources.made("word_problems", "train", 0), 6))

Scores = Callable[[Example], Sequence[float | None]]


class Grader:
    """A stand-in for the environment: the n-th answer to a question gets the n-th of its scores, None for a fault."""

    needs = "judge (http://127.0.0.1:9/v1)"
    judge = Judge([], params.load(tiny.ROOT / "params.yaml").judge)

    def __init__(self, scores: Scores, seconds: float = 0.0) -> None:
        self._scores = scores
        self._seconds = seconds
        self._places: dict[str, Iterator[int]] = {}
        self.asked: list[str] = []

    def opening(self, example: Example) -> list[Message]:
        return policy_messages(example, WORKFLOW)

    async def episode(self, example: Example, writer: Writer) -> Graded:
        text = await writer.write(self.opening(example))
        writer.done()
        return await self.grade(text, example)

    async def grade(self, text: str, example: Example) -> Graded:
        if example.id not in self._places:
            self._places[example.id] = itertools.count()
            self.asked.append(example.id)
        score = self.score(text, example)
        await asyncio.sleep(self._seconds)
        fault = "no_verdict" if score is None else None
        sample = Sample(example.id, "", "", "math", text, text, score, "number", valid=True, fault=fault)
        return Graded(sample, (), 0.0)

    def score(self, text: str, example: Example) -> float | None:
        scores = self._scores(example)
        return scores[next(self._places[example.id]) % len(scores)]


class Reader(Grader):
    """A stand-in whose score follows from the text alone, whenever it is asked."""

    def __init__(self) -> None:
        super().__init__(lambda _: [])

    def score(self, text: str, example: Example) -> float:
        return int(digest.of_bytes(f"{example.id} {text}".encode())[0], 16) / 15


def by_order(scores: Sequence[Sequence[float | None]]) -> Scores:
    """Scores for the questions in the order in which they are first asked."""
    waiting = iter(scores)
    given: dict[str, Sequence[float | None]] = {}

    def of(example: Example) -> Sequence[float | None]:
        if example.id not in given:
            given[example.id] = next(waiting)
        return given[example.id]

    return of


@dataclass(frozen=True)
class Small:
    course: loop.Course
    settings: Params


@contextmanager
def course(
    folder: Path, grader: Grader, *, examples: Sequence[Example] = QUESTIONS, run: str = "run", **changes: object
) -> Iterator[Small]:
    """A course whose adapter is no longer the base, so that there is a KL to pull it back."""
    small = {"train__group_size": GROUP, "train__max_completion_tokens": 12, "train__max_fault_share": 1.0}
    settings = tiny.settings(folder, **{**small, **changes})
    torch.manual_seed(0)
    base, tokenizer = models.load(settings.base)
    model = loop.attach_adapter(base, settings.train.lora)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    identity = models.identify(settings.base)
    with Background() as background:
        made = loop.Course(model, tokenizer, identity, examples, grader, background, folder / run)  # type: ignore[arg-type]
        yield Small(made, settings)
