"""A tiny base, adapters of random weights, and two small tasks of lm-eval with files of their own."""

import json
from pathlib import Path

from gradeflow import adapter, models, params
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


def save_adapter(folder: Path, settings: params.Params, seed: int) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    base, _ = models.load(settings.base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(seed)
    for name, weights in model.named_parameters():
        if "lora_B" in name:
            weights.data = torch.randn(weights.shape, generator=generator) * 0.3
    model.save_pretrained(folder)
    adapter.stamp(folder, models.identify(settings.base))
