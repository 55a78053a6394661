"""GRPO beside stock TRL: steps a second in one run, with the learning curves, and what each part is worth.

    gradeflow base && python perf/grpo.py
    python perf/grpo.py --only latency --prompts 1 --group 4 --tokens 24    # a step computes for half a second

Both train the same policy on the same questions with the same settings and the same reward function, which is async and
asks for one completion at a time; stock TRL is `trl.GRPOTrainer` with that function. Arms take turns, round by round;
figures are medians over the rounds. The reward follows from the text alone. Where it has latency, `asyncio.sleep`
stands in for the executor and the judge.
"""

import argparse
import asyncio
import copy
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from gradeflow import decode, digest, models, params, sources
from gradeflow.adapter import BaseIdentity
from gradeflow.background import Background
from gradeflow.embedded import curriculum, teach
from gradeflow.grpo import loop, policy, trainer, vllm_policy
from gradeflow.grpo.environment import Graded, Writer
from gradeflow.grpo.rollouts import Batch
from gradeflow.types import Example, Sample
from gradeflow.workflow.program import ProgramError, parse, policy_messages

QUESTIONS = 256
VOWELS = frozenset("aeiou")
UNTAUGHT = BaseIdentity("perf", "", digest.of_json("perf"))

Reward = Callable[[str], float]


def share_of_vowels(text: str) -> float:
    return sum(letter in VOWELS for letter in text) / max(1, len(text))


def valid_and_asks_programmer(text: str) -> float:
    """1 for a workflow that passes every check and asks the operator Programmer."""
    try:
        return float("self.programmer(" in parse(text).source)
    except ProgramError:
        return 0.0


@dataclass(frozen=True)
class Task:
    """What both arms do."""

    name: str
    base: Any
    tokenizer: Any
    examples: Sequence[Example]
    settings: params.Params
    reward: Reward
    latency: float = 0.0
    identity: BaseIdentity = UNTAUGHT

    async def score(self, text: str) -> float:
        await asyncio.sleep(self.latency / 2)  # stands in for the executor
        await asyncio.sleep(self.latency / 2)  # stands in for the judge
        return self.reward(text)

    def at(self, **changes: object) -> "Task":
        train = self.settings.train.model_copy(update=changes)
        return replace(self, settings=self.settings.model_copy(update={"train": train}))


@dataclass
class Run:
    """When each step ended, in seconds from the start and in seconds of CPU, and its mean reward."""

    ends: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Steps a second over the whole run: the first waits for its verdicts, the last have nothing left to write."""
        return len(self.ends) / self.ends[-1]

    @property
    def work(self) -> float:
        """CPU seconds of a step, which say more than the clock does on a machine that others use too."""
        return statistics.median(end - start for start, end in itertools.pairwise(self.cpu))

    @property
    def wall(self) -> float:
        return self.ends[-1]


class TextEnvironment:
    """A stand-in for the environment, whose score follows from the text."""

    judge = None
    needs = "nothing"

    def __init__(self, task: Task) -> None:
        self._task = task

    async def episode(self, example: Example, writer: Writer) -> Graded:
        text = await writer.write(policy_messages(example, self._task.settings.workflow))
        writer.done()
        score = await self._task.score(text)
        sample = Sample(example.id, "", example.source, example.kind, text, text, score, "number", valid=True)
        return Graded(sample, (), 0.0)


class Clock:
    """The loop's watcher."""

    def __init__(self) -> None:
        self.run = Run()
        self._began = time.perf_counter()

    def step(self, number: int, logs: Mapping[str, float], batch: Batch) -> None:  # noqa: ARG002
        self.add(statistics.fmean(one.sample.score or 0.0 for one in batch.rollouts))

    def add(self, reward: float) -> None:
        self.run.ends.append(time.perf_counter() - self._began)
        self.run.cpu.append(time.process_time())
        self.run.rewards.append(reward)

    def checkpoint(self, number: int, adapter: Path) -> None:
        pass


def ours(task: Task) -> Run:
    clock, settings = Clock(), task.settings
    model = loop.attach_adapter(copy.deepcopy(task.base), settings.train.lora)
    environment: Any = TextEnvironment(task)
    with tempfile.TemporaryDirectory() as folder, Background() as background:
        course = loop.Course(model, task.tokenizer, task.identity, task.examples, environment, background, Path(folder))
        loop.train(course, settings.train, clock)
    return clock.run


def stock(task: Task) -> Run:
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    clock, settings = Clock(), task.settings

    async def reward(completions: Sequence[Any], **_: Any) -> list[float]:
        return list(await asyncio.gather(*(task.score(said[-1]["content"]) for said in completions)))

    class Report(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
            if "reward" in logs:
                clock.add(logs["reward"])

    with tempfile.TemporaryDirectory() as folder:
        made = GRPOTrainer(
            model=copy.deepcopy(task.base),
            reward_funcs=[reward],
            args=trainer.configure(settings.train, Path(folder)),
            train_dataset=Dataset.from_list(
                [{"prompt": policy_messages(one, settings.workflow)} for one in task.examples]
            ),
            processing_class=task.tokenizer,
            peft_config=loop.lora_config(settings.train.lora),
        )
        made.remove_callback(PrinterCallback)
        made.add_callback(Report())
        made.train()
    return clock.run


@contextmanager
def generate() -> Iterator[None]:
    """A stand-in for our decoding: transformers' `generate`, which reads a prompt once for each of its completions."""
    import torch

    @torch.inference_mode()
    def written(model: Any, prompts: Any, rooms: Any, ends: Any, _choose: Any, copies: Any, ended: Any) -> None:
        rows = [prompt for prompt, count in zip(prompts, copies, strict=True) for _ in range(count)]
        width = max(map(len, rows))
        found = model.generate(
            input_ids=torch.tensor([[0] * (width - len(row)) + list(row) for row in rows]),
            attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
            max_new_tokens=max(rooms),
            do_sample=True,
            top_k=0,
            eos_token_id=ends,
        )
        for row, ids in enumerate(found[:, width:].tolist()):
            stop = next((place + 1 for place, one in enumerate(ids) if one in ends), len(ids))
            ended(row, ids[:stop])

    with mock.patch.object(policy, "decode", written):
        yield


@contextmanager
def a_prompt_for_each_completion() -> Iterator[None]:
    """A stand-in that samples as we do, but reads a prompt once for each of its completions."""

    def written(model: Any, prompts: Any, rooms: Any, ends: Any, choose: Any, copies: Any, ended: Any) -> Any:
        rows = [prompt for prompt, count in zip(prompts, copies, strict=True) for _ in range(count)]
        return decode.decode(model, rows, rooms, ends, choose, [1] * len(rows), ended)

    with mock.patch.object(policy, "decode", written):
        yield


def layers_of_peft() -> AbstractContextManager[Any]:
    return mock.patch.object(decode, "_plain_lora", return_value=nullcontext())


def whole_rows() -> AbstractContextManager[Any]:
    return mock.patch.object(trainer, "can_share", return_value=False)


def as_they_come() -> AbstractContextManager[Any]:
    return mock.patch.object(trainer, "_sorted", lambda rows, _: rows)


@contextmanager
def nothing_of_it() -> Iterator[None]:
    with ExitStack() as stack:
        for each in (generate, whole_rows, as_they_come):
            stack.enter_context(each())
        yield


PARTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "as it is": nullcontext,
    "without decoding of our own": generate,
    "without a prompt shared in sampling": a_prompt_for_each_completion,
    "without plain LoRA layers in sampling": layers_of_peft,
    "without a prompt shared in the loss": whole_rows,
    "without rows sorted by prompt and length": as_they_come,
    "without all of these": nothing_of_it,
}


Arm = Callable[[int], Run]
"""A run with a seed."""


def by_turns(arms: Mapping[str, Arm], rounds: int) -> dict[str, list[Run]]:
    """Runs of each arm, every round with a seed of its own."""
    found: dict[str, list[Run]] = {name: [] for name in arms}
    for seed in range(rounds):
        for name, arm in arms.items():
            found[name].append(one := arm(seed))
            print(
                f"{one.rate:8.3f} steps/s, {one.work:6.2f} CPU s a step, {one.wall:6.1f} s: {name}",
                file=sys.stderr,
                flush=True,
            )
    return found


def run(arm: Callable[[Task], Run], task: Task, seed: int) -> Run:
    return arm(task.at(seed=seed))


def rate(runs: Sequence[Run]) -> float:
    return statistics.median(run.rate for run in runs)


def work(runs: Sequence[Run]) -> float:
    return statistics.median(run.work for run in runs)


def wall(runs: Sequence[Run]) -> float:
    return statistics.median(run.wall for run in runs)


def latency(task: Task, seconds: float, rounds: int) -> None:
    slow = replace(task, latency=seconds)
    staleness = (0, 1, 2, 4)
    arms = {"stock": partial(run, stock, slow), "stock, none": partial(run, stock, task)}
    for steps in staleness:
        arms[f"{steps}"] = partial(run, ours, slow.at(staleness=steps))
        arms[f"{steps}, none"] = partial(run, ours, task.at(staleness=steps))
    found = by_turns(arms, rounds)
    print(f"\n{task.name}, executor {seconds / 2:g} s and judge {seconds / 2:g} s")
    print(
        f"{'':20}{'steps/s':>9}{'of stock':>10}{'wall, s':>9}{'of no latency':>15}  mean reward over tenths of the run"
    )
    for said, name in (("stock TRL", "stock"), *((f"ours, staleness {steps}", f"{steps}") for steps in staleness)):
        runs, without = found[name], found[f"{name}, none"]
        ratio, longer = rate(runs) / rate(found["stock"]), wall(runs) / wall(without)
        print(f"{said:20}{rate(runs):9.3f}{ratio:10.2f}{wall(runs):9.1f}{longer:15.2f}  {curve(runs)}", flush=True)


def speed(task: Task, rounds: int) -> None:
    found = by_turns({"stock TRL": partial(run, stock, task), "ours": partial(run, ours, task)}, rounds)
    other = found["stock TRL"]
    print(f"\n{task.name}, no latency, staleness 0; reward: {task.reward.__name__}")
    print(
        f"{'':12}{'steps/s':>9}{'of stock':>10}{'CPU s/step':>12}{'of stock':>10}  mean reward over tenths of the run"
    )
    for name, runs in found.items():
        figures = f"{rate(runs):9.3f}{rate(runs) / rate(other):10.2f}{work(runs):12.2f}{work(runs) / work(other):10.2f}"
        print(f"{name:12}{figures}  {curve(runs)}", flush=True)


def curve(runs: Sequence[Run]) -> str:
    steps = [statistics.fmean(column) for column in zip(*(run.rewards for run in runs), strict=True)]
    tenths = [steps[len(steps) * tenth // 10 : len(steps) * (tenth + 1) // 10] for tenth in range(10)]
    return " ".join(f"{statistics.fmean(part):.2f}" for part in tenths if part)


def parts(task: Task, rounds: int) -> None:
    def without(part: Callable[[], AbstractContextManager[Any]], seed: int) -> Run:
        with part():
            return run(ours, task, seed)

    found = by_turns({name: partial(without, part) for name, part in PARTS.items()}, rounds)
    print(f"\n{task.name}, one part at a time replaced")
    print(f"{'':44}{'s/step':>10}{'slower by':>11}{'CPU s/step':>12}{'more by':>9}")
    whole = found["as it is"]
    for name, runs in found.items():
        slower, more = rate(whole) / rate(runs) - 1, work(runs) / work(whole) - 1
        print(f"{name:44}{1 / rate(runs):10.2f}{slower:11.0%}{work(runs):12.2f}{more:9.0%}", flush=True)


def updates(task: Task, count: int, url: str) -> None:
    """Whether the base, here and in vLLM, is what it was, and that the adapter is not."""
    train = task.settings.train
    rollouts = train.rollouts.model_copy(update={"url": url})
    guard = train.guard.model_copy(update={"enabled": False})  # what so many make of the policy is of no interest
    limits = {"max_steps": count, "prompts_per_step": 1, "group_size": 4, "max_completion_tokens": 8}
    small = replace(task, reward=share_of_vowels).at(**limits, rollouts=rollouts, guard=guard)
    before: list[str] = []
    made: list[Any] = []
    there: list[Sequence[float]] = []
    loaded: set[str] = set()
    attach = loop.attach_adapter

    def watched(model: Any, lora: params.Lora) -> Any:
        before.append(weights(model))
        made.append(attach(model, lora))
        return made[0]

    class Watched(vllm_policy.VllmPolicy):
        def connect(self) -> None:
            super().connect()
            self._read_there()

        def close(self) -> None:
            self._read_there()
            super().close()

        def _read_there(self) -> None:
            there.append(self._background.run(self._client.read(self._base.name, self._probes)))

        async def _load(self, served: Any) -> None:
            await super()._load(served)
            loaded.add(served.name)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(loop, "attach_adapter", watched))
        stack.enter_context(mock.patch.object(vllm_policy, "VllmPolicy", Watched))
        ours(small)
    moved = max(float(each.detach().abs().max()) for name, each in made[0].named_parameters() if "lora_B" in name)
    after = weights(made[0].unload())
    print(f"\n{count} updates, rollouts from {url}; the adapter's B from 0 to at most {moved:.2g}")
    print(f"base {before[0][:12]} before, {after[:12]} after", flush=True)
    if there:
        gap = max(abs(one - other) for one, other in zip(*there, strict=True))
        print(f"{len(loaded)} adapters loaded into vLLM; its base's log-probabilities differ by {gap:.2g}", flush=True)


def weights(model: Any) -> str:
    """The digest of all weights."""
    named = sorted(model.state_dict().items())
    return digest.of_json({name: digest.of_bytes(each.numpy().tobytes()) for name, each in named})


def made(settings: params.Params, hidden: int, layers: int) -> tuple[Any, Any]:
    """A policy that has learnt nothing, with the embedded base's tokenizer."""
    lessons = list(itertools.islice(curriculum.lessons(0), teach.TOKENIZER_LESSONS))
    words = teach.tokenizer(lessons, settings.base.vocabulary)
    base = settings.base.model_copy(update={"hidden_size": hidden, "layers": layers})
    return teach.blank_model(base, words), words


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=["latency", "speed", "parts", "updates"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=1.0, help="seconds of executor and judge together")
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument(
        "--rollouts", choices=["local", "vllm"], default="local", help="who writes those of the updates"
    )
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="questions a step")
    parser.add_argument("--group", type=int, default=6, help="completions of each")
    parser.add_argument("--tokens", type=int, default=96, help="longest completion")
    parser.add_argument("--policies", nargs="+", choices=["embedded", "large"], default=["embedded", "large"])
    given = parser.parse_args()
    chosen = given.only or ["latency", "speed", "parts", "updates"]
    settings = params.load()
    examples = list(itertools.islice(sources.made("word_problems", "train", 0), QUESTIONS))
    base, tokenizer = models.load(settings.base)
    identity = models.identify(settings.base)
    small = Task("embedded policy", base, tokenizer, examples, settings, valid_and_asks_programmer, identity=identity)
    base, tokenizer = made(settings, given.hidden, given.layers)
    size = sum(each.numel() for each in base.parameters()) / 1e6
    large = Task(f"{size:.1f}M policy", base, tokenizer, examples, settings, share_of_vowels)
    common = {
        "max_steps": given.steps,
        "prompts_per_step": given.prompts,
        "group_size": given.group,
        "max_completion_tokens": given.tokens,
        "eval_every": 10**6,
        "max_replaced_groups": 0,
    }
    small, large = small.at(**common), large.at(**common)
    tasks = [task for name, task in (("embedded", small), ("large", large)) if name in given.policies]
    print(f"{torch.get_num_threads()} threads, {given.steps} steps, {given.rounds} rounds", flush=True)
    if "speed" in chosen:
        for task in tasks:
            speed(task, given.rounds)
    if "latency" in chosen:
        latency(large, given.latency, given.rounds)
    if "parts" in chosen:
        for task in tasks:
            parts(task, given.rounds)
    if "updates" in chosen:
        updates(small, given.updates, given.rollouts)


if __name__ == "__main__":
    main()
