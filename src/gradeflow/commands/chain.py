"""The whole chain, as `mlflow run .` and `make demo` run it: base, train_grpo, evaluate, promote, serve.

Each stage is a process of its own, so that its memory ends with it. What has not changed is found in MLflow and used
again. At the end the champion is served, asked one question through the `openai` client, and stopped.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ruamel.yaml
from rich.console import Console

from gradeflow import dataset, gate, jsonl, lineage, registry, tracking
from gradeflow.errors import GradeflowError, SetupError
from gradeflow.evaluate import accuracy_table
from gradeflow.evaluation.plan import WORKFLOW
from gradeflow.params import Params
from gradeflow.types import Sample
from gradeflow.workflow import fixed
from gradeflow.workflow.program import policy_messages

STAGES = ("base", "train_grpo", "evaluate", "promote")
START_S = 600.0
CONSOLE = Console()


class StageError(GradeflowError):
    """A stage of the chain ended with an error, which it has printed itself; the chain ends with its status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Clock:
    """Seconds of each stage, and the most memory that the chain's processes took together."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0

    @contextlib.contextmanager
    def time(self, stage: str) -> Iterator[None]:
        CONSOLE.rule(stage)
        started = time.monotonic()
        yield
        self.seconds[stage] = time.monotonic() - started


def main(params: Params) -> None:
    """Run the chain with these settings."""
    if not any(Path(name).is_file() for name in lineage.dvc_lock_digests(Path())):
        make_data()  # a clone that `mlflow run URL` has just made
    for split in dataset.NAMES:
        dataset.read(split)  # says what to run if the data is not whole
    tracking.connect(params.tracking, Path())
    with tracking.start_run("chain", params.model_dump(mode="json")) as run:
        folder = Path("runs/chain") / run.id
        folder.mkdir(parents=True)
        settings = folder / "params.yaml"
        with settings.open("w") as file:
            ruamel.yaml.YAML(typ="safe", pure=True).dump(params.model_dump(mode="json"), file)
        environment = tracking.child_environment(run)
        clock = Clock()
        with watch_memory(clock):
            for stage in STAGES:
                with clock.time(stage):
                    call(stage, settings, environment)
            with clock.time("serve"):
                said = ask_champion(params, settings, environment)
        CONSOLE.print(said)
        run.log_metrics({f"chain/seconds_{stage}": seconds for stage, seconds in clock.seconds.items()})
        run.log_metrics({"chain/seconds": sum(clock.seconds.values()), "chain/peak_gib": clock.peak_bytes / 2**30})
        report(params, run.chain, clock)


def make_data() -> None:
    CONSOLE.rule("data")
    if subprocess.run([sys.executable, "-m", "dvc", "repro"], check=False).returncode:
        raise StageError("dvc repro failed; mend what it says above, and the same command goes on from there")


def call(stage: str, settings: Path, environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "gradeflow", stage, "--params", str(settings)]
    if status := subprocess.run(command, env=dict(environment), check=False).returncode:
        said = f"{stage} failed; mend what it says above, and the same command goes on from there"
        raise StageError(said, max(status, 1))


def ask_champion(params: Params, settings: Path, environment: Mapping[str, str]) -> str:
    """Start the server, ask the champion for a workflow as any client would, and stop it."""
    import openai

    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    options = ["--serve.host", "127.0.0.1", "--serve.port", str(port), "--serve.api_key_env", ""]
    command = [sys.executable, "-m", "gradeflow", "serve", "--params", str(settings), *options]
    with subprocess.Popen(command, env=dict(environment)) as server:
        try:
            client = openai.OpenAI(base_url=url, api_key="none", timeout=120)
            name = await_server(server, client)
            example = dataset.read("test").examples[0]
            messages: Any = policy_messages(example, params.workflow)
            reply = client.chat.completions.create(
                model=name,
                messages=messages,
                temperature=0,
                max_tokens=params.train.max_completion_tokens,
            )
        finally:
            server.send_signal(signal.SIGTERM)
    written = (reply.choices[0].message.content or "").strip()
    return f"asked {name}: {example.problem}\nit writes: {written}"


def await_server(server: "subprocess.Popen[bytes]", client: Any) -> str:
    """Wait for a model; returns its name."""
    import openai

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise StageError("serve ended before it answered; mend what it says above")
        with contextlib.suppress(openai.APIConnectionError):
            if found := client.models.list().data:
                return str(found[0].id)
        time.sleep(0.2)
    raise SetupError(f"serve did not answer within {START_S:.0f} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def watch_memory(clock: Clock) -> Iterator[None]:
    """Add up the resident memory of this process and its children, twice a second."""
    import psutil

    done = threading.Event()

    def look() -> None:
        me = psutil.Process(os.getpid())
        while not done.wait(0.5):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.Error:
                    continue
            clock.peak_bytes = max(clock.peak_bytes, total)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def report(params: Params, chain: str, clock: Clock) -> None:
    """What the user came for: before and after, the best fixed operator, the times, the champion."""
    evaluation = tracking.find_stage("evaluate", chain)
    assert evaluation is not None
    cache = Path("runs/chain") / "evaluation"
    results = json.loads(tracking.download_artifact(evaluation, "results.json", cache).read_text())
    (short,) = results["adapters"]
    best = max((f"fixed_{name}" for name in fixed.OPERATORS), key=lambda name: results["fixed"][name]["accuracy"])
    samples = {
        name: read_samples(tracking.download_artifact(evaluation, f"samples/{name}.jsonl", cache))
        for name in ("base", short, best)
    }
    CONSOLE.rule("result")
    operator = best.removeprefix("fixed_")
    rows = {"before": results["base"], operator: results["fixed"][best], "after": results["adapters"][short]}
    CONSOLE.print(accuracy_table("accuracy of workflows on held-out questions", rows))
    CONSOLE.print(f"after training, against before: {compare(samples[short], samples['base'], params)}")
    CONSOLE.print(f"against {operator}, the best single operator: {compare(samples[short], samples[best], params)}")
    times = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in clock.seconds.items())
    CONSOLE.print(f"time: {times}; together {sum(clock.seconds.values()):.0f} s")
    CONSOLE.print(f"memory at its peak: {clock.peak_bytes / 2**30:.1f} GiB")
    champion = registry.resolve(f"{params.promote.model}@champion")
    if champion is None:
        CONSOLE.print(f"{params.promote.model} has no champion; promote says why above")
    else:
        CONSOLE.print(f"champion: {champion.name} version {champion.version}, adapter {champion.digest[:12]}")
    CONSOLE.print("compare runs, read traces, see the registry: make ui")


def read_samples(path: Path) -> list[Sample]:
    return [Sample.from_row(row) for row in jsonl.read(path)]


def compare(trained: list[Sample], other: list[Sample], params: Params) -> str:
    policy = params.promote.model_copy(update={"targets": [WORKFLOW], "guards": {}})
    found = gate.decide([gate.compare(WORKFLOW, gate.pair(trained, other))], policy).first
    return f"{found.difference:+.1%}, p = {found.p_gain:.1g}"
