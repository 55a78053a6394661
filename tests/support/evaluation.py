"""A tiny base, adapters of random weights, and two small tasks of lm-eval with files of their own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradeflow import adapter, models, params
from gradeflow.evaluation import results, samples
from gradeflow.evaluation.plan import BASE, Backend, Plan, Subject
from support import tiny

QUESTIONS = 12
GENERATED = """\
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
metadata: {{version: 1}}
"""
CHOSEN = """\
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: 0
doc_to_choice: "{{{{[answer, wrong]}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 1}}
"""


def make(folder: Path) -> None:
    """tiny-base, adapter-0 to adapter-2, and the tasks sums.yaml and choices.yaml."""
    settings = tiny.settings(folder)
    rows = [
        {"question": f"What is {number} plus 3?", "answer": f"{number + 3}", "wrong": f"{number + 4}"}
        for number in range(QUESTIONS)
    ]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(GENERATED.format(file=data))
    (folder / "choices.yaml").write_text(CHOSEN.format(file=data))
    for seed in range(3):
        save_adapter(folder / f"adapter-{seed}", settings, seed)


def save_adapter(folder: Path, settings: params.Params, seed: int, *, rank: int = 4, scale: float = 0.3) -> Subject:
    """An adapter of random weights; `scale` says how much it changes."""
    import torch
    from peft import LoraConfig, get_peft_model

    base, _ = models.load(settings.base)
    targets = list(settings.train.lora.target_modules)
    model = get_peft_model(base, LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(seed)
    for name, weights in model.named_parameters():
        if "lora_B" in name:
            weights.data = torch.randn(weights.shape, generator=generator) * scale
    model.save_pretrained(folder)
    adapter.stamp(folder, models.identify(settings.base))
    return subject(folder)


def subject(folder: Path) -> Subject:
    facts = adapter.validate(folder)
    return Subject(facts.digest[:12], facts.digest, str(folder), facts.rank)


def plan(
    world: Path,
    out: Path,
    *numbers: int,
    backend: Backend = "hf",
    tasks: Sequence[str] = ("sums", "choices"),
    **changes: Any,
) -> Plan:
    """A plan for the base and some of the adapters that `make` left in `world`, by their number."""
    settings = tiny.settings(world)
    evaluate = settings.evaluate.model_copy(update={"backend": backend, "batch_size": 4, "cache": "", **changes})
    return Plan(
        base=str(world / "tiny-base"),
        revision="",
        base_digest=models.identify(settings.base).digest,
        dtype="float32",
        subjects=[Subject(BASE), *(subject(world / f"adapter-{number}") for number in numbers)],
        tasks=[str(world / f"{task}.yaml") for task in tasks],
        backend=backend,
        params=settings.model_copy(update={"evaluate": evaluate}),
        out=str(out),
    )


def replies(plan: Plan, subject: Subject, task: str) -> list[Any]:
    """What a subject has answered to each question."""
    found = results.read(plan.folder(subject.name, task), [task], base=plan.base_digest, adapter=subject.digest)
    return [row["resps"] for row in sorted(samples.read(found.samples[task]), key=lambda row: row["doc_id"])]
