"""Adapters on one base: an evaluation of all of them beside one `lm_eval` command for each, in one run, reply by reply.

    python perf/evaluate.py --adapters 8
    make vllm && python perf/evaluate.py --adapters 8 --backend vllm
    python perf/evaluate.py --adapters 1 --hidden 800 --layers 12 --rounds 3

Base and adapters have random weights, the base in the shape of the embedded one or another; the task asks the embedded
curriculum's held-out questions. No reply is kept from one run to the next. Ours is timed with its preflight and the
start of its worker; the preflight is also shown alone.
"""

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradeflow import adapter, models, sources
from gradeflow.embedded import curriculum
from gradeflow.evaluation import preflight, process, results, samples, tasks
from gradeflow.evaluation.plan import Backend, Plan, Subject

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import tiny
from support.evaluation import save_adapter

TASK = """\
task: held_out
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{problem}}}}"
doc_to_target: "{{{{ground_truth}}}}"
generation_kwargs: {{until: ["\\n\\n\\n"], max_gen_toks: {tokens}, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1}}
"""


def ours(plan: Plan) -> tuple[float, float]:
    """Seconds in all, and of the preflight."""
    began = time.perf_counter()
    preflight.require(plan, tasks.known(plan.settings))
    looked = time.perf_counter() - began
    process.run(plan)
    return time.perf_counter() - began, looked


def command(plan: Plan, subject: Subject, out: Path) -> float:
    """Seconds of one `lm_eval` command."""
    named = {"pretrained": plan.base, "dtype": plan.dtype}
    if plan.backend == "hf":
        named["peft"] = subject.folder
    else:
        rank = adapter.max_lora_rank(subject.rank)
        named |= {"lora_local_path": subject.folder, "max_lora_rank": str(rank)}
        named["gpu_memory_utilization"] = str(plan.settings.gpu_memory)
    program = process.python(plan.backend).with_name("lm_eval")
    include = plan.settings.include[0]
    argv: list[str] = [str(program), "run", "--model", plan.backend, "--tasks", "held_out", "--include_path", include]
    argv += ["--model_args", ",".join(f"{key}={value}" for key, value in named.items()), "--apply_chat_template"]
    argv += ["--batch_size", str(plan.settings.batch_size or "auto"), "--output_path", str(out), "--log_samples"]
    argv += ["--device", "cpu"] if plan.backend == "hf" and not preflight.gpus() else []
    began = time.perf_counter()
    subprocess.run(argv, check=True, env=process.environment(), stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def replies(folder: Path) -> dict[int, Any]:
    found = results.read(folder, ["held_out"])
    return {row["doc_id"]: row["resps"] for row in samples.read(found.samples["held_out"])}


def same(plan: Plan, subjects: Sequence[Subject], out: Path) -> str:
    pairs = [(replies(plan.folder(one.name, "held_out")), replies(out / one.name)) for one in subjects]
    equal = sum(ours[place] == theirs[place] for ours, theirs in pairs for place in theirs)
    return f"{equal} of {sum(map(len, (theirs for _, theirs in pairs)))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--backend", choices=["hf", "vllm"], default="hf")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1, help="of one command beside ours; the median counts")
    given = parser.parse_args()
    backend: Backend = given.backend
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = tiny.settings(folder, size=(given.hidden, given.layers))
        each = -(-given.questions // len(curriculum.SOURCES))
        made = (sources.made(source, "test", 7) for source in curriculum.SOURCES)
        rows = [example.to_row() for own in made for example in itertools.islice(own, each)][: given.questions]
        file = folder / "rows.jsonl"
        file.write_text(
            "".join(json.dumps({key: row[key] for key in ("problem", "ground_truth")}) + "\n" for row in rows)
        )
        (folder / "held_out.yaml").write_text(TASK.format(file=file, tokens=settings.evaluate.max_gen_tokens))
        changes = {"include": [scratch], "cache": "", "backend": backend, "timeout_s": 0}
        evaluate = settings.evaluate.model_copy(update=changes)
        subjects = [
            save_adapter(folder / f"adapter-{seed}", settings, seed, rank=8, scale=0.05)
            for seed in range(given.adapters)
        ]
        plan = Plan(
            base=str(models.base_folder(settings.base).absolute()),
            revision="",
            base_digest=models.identify(settings.base).digest,
            dtype="float32",
            subjects=subjects,
            tasks=["held_out"],
            backend=backend,
            params=settings.model_copy(update={"evaluate": evaluate}),
            out=str(folder / "all"),
        )
        weights = sum(math.prod(shape) for shape in adapter.base_shapes(Path(plan.base)).values())
        print(
            f"{given.adapters} adapters, {len(rows)} questions, {backend}, {weights / 1e6:.1f}M weights\n", flush=True
        )
        print(f"{'':34}{'seconds':>9}{'ratio':>8}  equal replies", flush=True)
        theirs, own = [], []
        for number in range(given.rounds):
            alone = replace(plan, subjects=subjects[:1], out=str(folder / f"alone-{number}"))
            theirs.append(command(alone, subjects[0], folder / f"lm_eval-{number}" / subjects[0].name))
            own.append(ours(alone))
            said = same(alone, subjects[:1], folder / f"lm_eval-{number}")
        told("one lm_eval command", statistics.median(theirs), statistics.median(theirs))
        seconds, looked = statistics.median(one for one, _ in own), statistics.median(one for _, one in own)
        told(f"ours, preflight {looked:.1f} s of it", seconds, statistics.median(theirs), said)
        if given.adapters > 1:
            rest = sum(command(plan, subject, folder / "lm_eval-0" / subject.name) for subject in subjects[1:])
            told(f"{given.adapters} lm_eval commands", theirs[0] + rest, theirs[0] + rest)
            together, looked = ours(plan)
            said = same(plan, subjects, folder / "lm_eval-0")
            told(f"ours, preflight {looked:.1f} s of it", together, theirs[0] + rest, said)


def told(what: str, seconds: float, theirs: float, said: str = "") -> None:
    print(f"{what:34}{seconds:9.1f}{seconds / theirs:8.2f}  {said}", flush=True)


if __name__ == "__main__":
    main()
