"""A tiny base with the embedded base's tokenizer: everything real but what it has learnt."""

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

from gradeflow import dataset, jsonl, params, sources
from gradeflow.embedded import curriculum, teach

ROOT = Path(__file__).parents[2]
# Two steps of training with a validation after each, and a stand-in for executor and judge.
TWO_STEPS = {
    "train__max_steps": 2,
    "train__eval_every": 1,
    "train__prompts_per_step": 4,
    "train__group_size": 4,
    "train__warmup_steps": 0,
    "models__base__model": "stand-in",
}


def changes(folder: Path, **overrides: object) -> dict[str, str]:
    """What differs from the repository's settings, by dotted name; keys are dotted with `__`."""
    return {
        "base.model": str(folder / "tiny-base"),
        "sandbox.parallel": "2",
        "models.base.cache": "",
        **{name.replace("__", "."): str(value) for name, value in overrides.items()},
    }


def settings(
    folder: Path, *, taught: bool = False, size: tuple[int, int] = (64, 2), **overrides: object
) -> params.Params:
    """The repository's settings on a tiny base in `folder`, made at the first call; `size` is hidden size and layers.

    Random weights, or, `taught`, some seconds of lessons in writing workflows.
    """
    found = params.load(ROOT / "params.yaml", changes(folder, **overrides))
    base = folder / "tiny-base"
    if not base.exists():
        small = found.base.model_copy(update=dict(zip(("hidden_size", "layers"), size, strict=True)))
        lessons = list(itertools.islice(curriculum.lessons(0), 8000 if taught else 400))
        words = teach.tokenizer(lessons, small.vocabulary)
        model = teach.blank_model(small, words)
        if taught:
            workflows = [lesson for lesson in lessons if lesson.role == "policy"]
            for _ in teach.teach(
                model, teach.encode(workflows, words), small.model_copy(update={"batch_tokens": 1024})
            ):
                pass
        model.save_pretrained(base)
        words.save_pretrained(base)
    return found


def project(folder: Path, rows: int = 8) -> None:
    """Mixed data of `rows` questions a kind and split, and the dvc.lock that `dvc repro` would leave."""
    outs = []
    for split, name in dataset.NAMES.items():
        examples = [
            one for source in curriculum.SOURCES for one in itertools.islice(sources.made(source, split, 7), rows)
        ]
        path = folder / "data" / "mixed" / name
        jsonl.write(path, (example.to_row() for example in examples))
        md5 = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        outs.append({"path": f"data/mixed/{name}", "md5": md5})
    (folder / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": {"mix": {"cmd": "", "outs": outs}}}))


def executor(project: Path) -> Callable[[list[dict[str, str]]], str]:
    """A stand-in for executor and judge: right for plain questions, nonsense for code; as a judge it says no."""
    splits = [dataset.read(split, project).examples for split in dataset.NAMES]
    truths = {example.problem: example.ground_truth for examples in splits for example in examples}

    def answer(messages: list[dict[str, str]]) -> str:
        asked = messages[-1]["content"]
        if "Candidate: <<<" in asked:
            return "<true_false>False</true_false>"
        truth = next((truth for problem, truth in truths.items() if problem in asked), None)
        if truth is None or "solve()" in asked or "complete Python function" in asked:
            return "nonsense"
        return f"<answer>{truth}</answer>" if "<answer>" in asked else truth

    return answer
