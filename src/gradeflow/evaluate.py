"""Measure a base model and an adapter with lm-evaluation-harness, on equal terms.

The adapter writes workflows, so the task's prompt is the policy's, and grading runs the workflow and asks the same
scorer as training does. Writes results.json, the samples and the adapter's files into one MLflow run.
"""

import asyncio
import json
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradeflow import adapter as adapters
from gradeflow import dataset, fingerprint, gate, jsonl, lineage, models, registry, tracking
from gradeflow.adapter import BaseIdentity
from gradeflow.dataset import Dataset
from gradeflow.errors import AdapterError, TooManyFaults
from gradeflow.grpo import environment as environments
from gradeflow.grpo.environment import WorkflowEnvironment
from gradeflow.grpo.harness import WorkflowTask, run_harness
from gradeflow.params import Params
from gradeflow.types import KINDS, Sample
from gradeflow.workflow import fixed

SECTIONS = ("evaluate", "base", "models", "workflow", "judge", "scorer", "sandbox")


def main(params: Params, *, adapter: str = "") -> None:
    """Evaluate the adapter in a folder, or that of the newest training run of this chain."""
    tracking.connect(params.tracking, Path())
    folder, training_run = find_adapter(adapter)
    data = dataset.read(params.evaluate.split)
    identity = models.identify(params.base)
    digest = adapters.validate(folder, identity, models.base_folder(params.base)).digest
    mark = fingerprint.of(params, SECTIONS, identity.digest, digest, data.md5)
    if (done := tracking.find_run("evaluate", mark)) is not None:
        tracking.note_reuse("evaluate", done)
        print(f"evaluate: nothing has changed; reused run {done}")
        return
    chain = tracking.read_tags(training_run).get(tracking.CHAIN) if training_run else None
    asyncio.run(environments.require_ready(params))
    with (
        tracking.start_run("evaluate", params.model_dump(mode="json"), fingerprint=mark, chain=chain) as run,
        tempfile.TemporaryDirectory() as scratch,
        models.leaving_room(),
        asyncio.Runner() as runner,
    ):
        registry.record_prompts(run, environments.prompts(params))
        run.log_dataset(data.path.name, data.path, data.md5, data.split, len(data.examples))
        environment = WorkflowEnvironment(params)
        try:
            samples, raw = measure(params, folder, data, environment, runner)
            require_scores(samples, environment.needs)
        finally:
            runner.run(environment.close())
        out = Path(scratch)
        write(out, samples, raw, digest, folder, training_run, environment, identity)
        run.log_artifacts(out)
        run.log_metrics(metrics(samples) | environment.clients.figures())
        run.set_tags({registry.ADAPTER_DIGEST: digest, lineage.TRAINING_RUN: training_run})
    show(samples, digest)


def find_adapter(given: str) -> tuple[Path, str]:
    """The adapter's folder and the training run that made it; a folder of the user's has no run."""
    if given and Path(given).is_dir():
        return Path(given), ""
    run = given or tracking.find_stage("train_grpo")
    if run is None:
        raise AdapterError("no finished training run in this experiment; train one, or give --adapter FOLDER")
    return tracking.download_artifact(run, "adapter", Path(".gradeflow/adapters") / run), run


def measure(
    params: Params, folder: Path, data: Dataset, environment: WorkflowEnvironment, runner: asyncio.Runner
) -> tuple[dict[str, list[Sample]], dict[str, Any]]:
    """Samples of base, adapter and each fixed operator on the same questions, and lm-eval's own results."""
    from peft import PeftModel

    examples = data.examples[: params.evaluate.limit or None]
    base, tokenizer = models.load(params.base, params.train.dtype)
    task = WorkflowTask(examples, params, environment, runner.run)
    raw = {"base": run_harness(base, tokenizer, task, params.evaluate)}
    samples = {"base": task.samples}
    model = PeftModel.from_pretrained(base, folder)
    adapters.prove_alive(model, adapters.default_probes(len(tokenizer)))
    task = WorkflowTask(examples, params, environment, runner.run)
    raw["adapter"] = run_harness(model, tokenizer, task, params.evaluate)
    samples["adapter"] = task.samples
    for operator in fixed.OPERATORS:
        pairs = [(fixed.program(operator), example) for example in examples]
        graded = runner.run(environment.grade_all(pairs))
        samples[f"fixed_{operator}"] = [one.sample for one in graded]
    return samples, raw


def require_scores(samples: Mapping[str, Sequence[Sample]], needs: str) -> None:
    """An evaluation in which something has no score at all is none.

    Raises:
        TooManyFaults: saying which, and why.
    """
    for name, found in samples.items():
        if all(sample.score is None for sample in found):
            faults = dict(Counter(sample.fault for sample in found))
            raise TooManyFaults(
                f"{name}: no question has a score ({faults}); when {needs} answer again, the same command "
                "evaluates anew",
                cause="evaluation",
            )


def write(
    out: Path,
    samples: Mapping[str, Sequence[Sample]],
    raw: Mapping[str, Any],
    digest: str,
    folder: Path,
    training_run: str,
    environment: WorkflowEnvironment,
    identity: BaseIdentity,
) -> None:
    """results.json, samples/*.jsonl and adapters/<digest>/: what promotion and a reader start from."""
    short = digest[:12]
    names = {"adapter": short}
    for name, found in samples.items():
        jsonl.write(out / "samples" / f"{names.get(name, name)}.jsonl", (sample.to_row() for sample in found))
    results = {
        "scorer": environment.scorer.version,
        "judge": {"model": judge.model, "prompt": judge.prompt_version} if (judge := environment.judge) else {},
        "base": {
            "name": identity.name,
            "revision": identity.revision,
            "digest": identity.digest,
            **summary(samples["base"]),
        },
        "adapters": {
            short: {
                "digest": digest,
                "path": f"adapters/{short}",
                "training_run": training_run,
                **summary(samples["adapter"]),
            }
        },
        "fixed": {name: summary(found) for name, found in samples.items() if name.startswith("fixed_")},
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    for name, result in raw.items():
        (out / f"lm_eval_{name}.json").write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
    shutil.copytree(folder, out / "adapters" / short)


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    scores = [sample.score for sample in samples if sample.score is not None]
    low, high = gate.interval(scores)
    by_kind = {
        kind: statistics.fmean(own)
        for kind in KINDS
        if (own := [s.score for s in samples if s.kind == kind and s.score is not None])
    }
    return {
        "n": len(scores),
        "unscored": len(samples) - len(scores),
        "accuracy": statistics.fmean(scores) if scores else None,
        "interval": [low, high],
        "by_kind": by_kind,
        "valid_share": sum(sample.valid for sample in samples) / len(samples),
    }


def metrics(samples: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, own in samples.items():
        said = summary(own)
        if said["accuracy"] is not None:
            found[f"workflow/{name}/accuracy"] = said["accuracy"]
        found[f"workflow/{name}/valid_share"] = said["valid_share"]
        found[f"workflow/{name}/unscored"] = float(said["unscored"])
        found |= {f"workflow/{name}/accuracy_{kind}": value for kind, value in said["by_kind"].items()}
    return found


def show(samples: Mapping[str, Sequence[Sample]], digest: str) -> None:
    rows = {name.removeprefix("fixed_"): summary(own) for name, own in samples.items()}
    Console().print(accuracy_table(f"accuracy on the held-out split, adapter {digest[:12]}", rows))


def accuracy_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Summaries by name: accuracy by kind and in all, its interval, the share of valid ones; fits into 80 columns."""
    table = Table(title=title)
    for column in ("", *KINDS, "all", "95 %", "valid"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, said in rows.items():
        table.add_row(name, *_cells(said))
    return table


def _cells(said: Mapping[str, Any]) -> list[str]:
    """What has no score is a dash."""
    shares = [said["by_kind"].get(kind) for kind in KINDS]
    low, high = said["interval"]
    return [
        *("-" if share is None else f"{share:.0%}" for share in shares),
        "-" if said["accuracy"] is None else f"{said['accuracy']:.1%}",
        f"{100 * low:.0f}-{100 * high:.0f}",
        f"{said['valid_share']:.0%}",
    ]
