"""A tiny base that can work as an agent: it has been taught some experiments, and which of them it writes is chance."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradeflow import agent, params, prompt
from gradeflow.attempt import task_of
from gradeflow.benchmarks import Competition
from gradeflow.embedded import teach
from gradeflow.embedded.curriculum import Lesson
from gradeflow.handlers import handler_of
from gradeflow.prompt import Message, user

CONCLUSION = "<Conclusion>done</Conclusion>"
HEAD = "import csv, harness\nwith open(harness.inputs['submission'], 'w') as file:\n"
EACH = "    for row in csv.DictReader(open('test.csv')):\n        print(row['id'], VALUE, sep=',', file=file)"


def experiment(code: str) -> str:
    return f"<Experiment>\n{code}\n</Experiment>"


def predict(value: str) -> str:
    return experiment(HEAD + "    print('id,failed', file=file)\n" + EACH.replace("VALUE", value))


EXPERIMENTS = {
    "good": predict("float(row['load']) * int(row['age'])"),
    "constant": predict("0.5"),
    "broken": predict("row['strain']"),
    "none": CONCLUSION,
}
"""For the built-in tasks about pumps."""


def lessons(competitions: Sequence[Competition], settings: params.Solve, count: int) -> list[Lesson]:
    rng = random.Random(0)
    openings = [_opening(one, settings) for one in competitions]
    found = []
    for _ in range(count):
        first, reply = rng.choice(openings), rng.choice(list(EXPERIMENTS.values()))
        found.append(Lesson("policy", "experiment", tuple(first), reply))
        seen = "<Observation>\nExecution succeeded.\n(no output)\n</Observation>\n\n"
        then: list[Message] = [{"role": "assistant", "content": reply}]
        last = user(seen + prompt.load("agent_conclude").text)
        found.append(Lesson("policy", "conclusion", (*first, *then, *last), CONCLUSION))
    return found


def _opening(competition: Competition, settings: params.Solve) -> list[Message]:
    competition.prepare()
    task = task_of(competition, settings)
    with handler_of(task) as handler:
        return agent.opening(handler.prepare_input(task), settings)


def make(folder: Path, found: Sequence[Lesson], settings: params.Base, steps: int) -> None:
    """Teach a model and save it in `folder`."""
    import torch
    from torch.nn.functional import cross_entropy

    words = teach.tokenizer(found, settings.vocabulary)
    model: Any = teach.blank_model(settings, words)
    both = teach._optimizers(model, 2e-3)
    groups = [(group, group["lr"]) for optimizer in both for group in optimizer.param_groups]
    encoded = teach.encode(found, words)
    model.train()
    for step in range(steps):
        for group, peak in groups:
            group["lr"] = peak * min(1.0, (step + 1) / 10, 2 * (steps - step) / steps)
        some = random.Random(step).sample(encoded, 4)
        ids, positions, labels = teach.tensors([[one] for one in some], max(map(len, some)))
        hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        loss = cross_entropy(model.lm_head(hidden[labels != -100]), labels[labels != -100])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    model.save_pretrained(folder)
    words.save_pretrained(folder)
