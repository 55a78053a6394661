"""Where somebody was born, lives or works: made here, in HotpotQA's format. The answer stands in the context."""

import random
from collections.abc import Mapping
from typing import Any

from gradeflow.sources import Row, hotpotqa
from gradeflow.sources.word_problems import NAMES
from gradeflow.types import Example

TOWNS = ("Arden", "Bergen", "Corvo", "Delmar", "Elsin", "Farrow", "Garda", "Holm")
# A paragraph's title, its sentence, and the question about it.
FACTS = (
    ("Birth", "{x} was born in {p}.", "Where was {x} born?"),
    ("Home", "{x} lives near {p}.", "Where does {x} live?"),
    ("Office", "{x} works at {p}.", "Where does {x} work?"),
    ("School", "{x} studied by {p}.", "Where did {x} study?"),
    ("Holiday", "{x} rests outside {p}.", "Where does {x} rest?"),
)
PARAGRAPHS = 3


def make(rng: random.Random) -> Row:
    person = rng.choice(NAMES)
    towns = rng.sample(TOWNS, PARAGRAPHS)
    told = rng.sample(FACTS, PARAGRAPHS)
    title, _, question = told[index := rng.randrange(PARAGRAPHS)]
    context = [
        [name, [sentence.format(x=person, p=town)]] for (name, sentence, _), town in zip(told, towns, strict=True)
    ]
    return {
        "_id": f"{rng.getrandbits(64):016x}",
        "question": question.format(x=person),
        "answer": towns[index],
        "supporting_facts": [[title, 0]],
        "context": context,
        "type": "comparison",
        "level": "easy",
    }


def sentence_of(example: Example) -> str:
    """The sentence of the context that holds the answer."""
    (title, _), *_ = example.extra["supporting_facts"]
    paragraph = next(line for line in example.problem.split("\n") if line.startswith(f"{title}: "))
    return str(paragraph.partition(": ")[2])


def example(row: Mapping[str, Any]) -> Example:
    return hotpotqa.question(row, source="places")
