"""Which way somebody faces after some turns: made here, in CommonsenseQA's flat format. Needs step after step."""

import random
import re
from collections.abc import Mapping
from typing import Any

from gradeflow.sources import Row, commonsenseqa
from gradeflow.sources.word_problems import NAMES
from gradeflow.types import Example

LABELS = "ABCD"
DIRECTIONS = ("north", "east", "south", "west")
TURNS = {"right": 1, "around": 2, "left": 3}
ORDER = ("first", "second", "third")


def make(rng: random.Random) -> Row:
    turns = rng.choices(list(TURNS), k=len(ORDER))
    start, name = rng.choice(DIRECTIONS), rng.choice(NAMES)
    listed = ", ".join(f"{place} {turn}" for place, turn in zip(ORDER, turns, strict=True))
    choices = rng.sample(DIRECTIONS, len(DIRECTIONS))
    return {
        "id": f"{rng.getrandbits(64):016x}",
        "question": f"{name} faces {start} and turns: {listed}. Which way does {name} face now?",
        "question_concept": "direction",
        "choices": {"label": list(LABELS), "text": choices},
        "answerKey": LABELS[choices.index(faced(start, turns)[-1])],
    }


def faced(start: str, turns: list[str]) -> list[str]:
    """The direction after each turn."""
    now, found = DIRECTIONS.index(start), []
    for turn in turns:
        now = (now + TURNS[turn]) % len(DIRECTIONS)
        found.append(DIRECTIONS[now])
    return found


def listed_in(example: Example) -> str:
    """The turns as the question lists them, which is no answer to it."""
    return example.problem.partition(" turns: ")[2].partition(".")[0]


def steps_of(example: Example) -> str:
    """Each turn with the direction after it."""
    start = re.search(r"faces (\w+)", example.problem)
    turns = [turn.split()[1] for turn in listed_in(example).split(", ")]
    assert start is not None
    told = zip(ORDER, turns, faced(start[1], turns), strict=True)
    return f"faces {start[1]} " + " ".join(f"{place} {turn} {way}" for place, turn, way in told)


def example(row: Mapping[str, Any]) -> Example:
    return commonsenseqa.question(row, source="turns")
