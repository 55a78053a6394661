"""The training loop: TRL's GRPOTrainer over workflows that an environment grades.

The loop reports to a `Watcher` and knows nothing of MLflow. Letters: B rollouts of a step, G rollouts of a question.
"""

import itertools
import logging
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gradeflow import models, params
from gradeflow.audit import Alarm
from gradeflow.decode import end_ids
from gradeflow.errors import SettingsError, TooManyFaults
from gradeflow.grpo.environment import Graded, WorkflowEnvironment
from gradeflow.grpo.log_probs import sharing_prompts
from gradeflow.grpo.sample import sample
from gradeflow.types import Event, Example, Rollout, Turn
from gradeflow.workflow.program import policy_messages

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import GRPOConfig

Wait = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end on the stage's event loop."""

Group = Sequence[Rollout]
"""The rollouts of one question in one step."""

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


class Watcher(Protocol):
    """What a stage does with what the loop reports."""

    def step(
        self,
        number: int,
        logs: Mapping[str, float],
        groups: Sequence[Group],
        replaced: Sequence[Group],
        temperature: float,
    ) -> None: ...

    def checkpoint(self, number: int, adapter: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Course:
    """What one training run is made of, besides its settings."""

    model: "PeftModel"
    tokenizer: "PreTrainedTokenizerBase"
    examples: Sequence[Example]
    environment: WorkflowEnvironment
    folder: Path
    wait: Wait


def attach_adapter(model: "PreTrainedModel", settings: params.Lora) -> "PeftModel":
    """A fresh LoRA adapter on the model; B starts at zero, so the policy starts as the base."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules),
    )
    return get_peft_model(model, config)


def train(course: Course, settings: params.Train, workflow: params.Workflow, watcher: Watcher) -> None:
    """Train to `settings.max_steps`, going on from the newest checkpoint in `course.folder` where there is one.

    Raises:
        TooManyFaults: more rollouts than allowed have no score; the newest checkpoint is there to go on from.
    """
    from transformers.trainer_utils import get_last_checkpoint

    rollouts = Rollouts(course, settings, workflow)
    trainer = trainer_of(course, settings, workflow, rollouts)
    trainer.add_callback(_report(trainer, rollouts, settings, watcher))
    last = get_last_checkpoint(str(course.folder)) if course.folder.is_dir() else None
    trainer.train(resume_from_checkpoint=last)


def trainer_of(course: Course, settings: params.Train, workflow: params.Workflow, rollouts: "Rollouts") -> Any:
    """TRL's trainer of the course's model on its examples; its KL is to the base, whatever the adapter is by then."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    logging.getLogger("trl").setLevel(logging.ERROR)  # it prints each prompt whose rollout has no score
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOTrainer

    rows = [
        {"prompt": policy_messages(example, workflow), "id": example.id}
        for example in evenly(course.examples, settings.seed)
    ]
    trainer = sharing_prompts(GRPOTrainer)(
        model=course.model,
        reward_funcs=[reward],
        args=configure(settings, course.folder),
        train_dataset=Dataset.from_list(rows),
        processing_class=course.tokenizer,
        rollout_func=rollouts,
    )
    if "ref" in course.model.peft_config:  # TRL's copy of the adapter as it was, which need not be the base
        course.model.delete_adapter("ref")
    trainer.remove_callback(PrinterCallback)
    return trainer


def configure(settings: params.Train, folder: Path) -> "GRPOConfig":
    """TRL's configuration of these settings. Accumulation covers whole groups, so none is split over two updates."""
    import torch
    from trl import GRPOConfig

    rollouts = settings.prompts_per_step * settings.group_size
    micro = math.gcd(settings.micro_batch, rollouts)
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=settings.max_steps,
        seed=settings.seed,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rollouts // micro,
        num_generations=settings.group_size,
        shuffle_dataset=False,  # `evenly` has done it
        max_completion_length=settings.max_completion_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        lr_scheduler_type=SCHEDULES[settings.lr_schedule],
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        beta=settings.kl_coef,
        epsilon=settings.clip_range,
        epsilon_high=settings.clip_range_high,
        num_iterations=settings.ppo_epochs,
        scale_rewards=settings.scale_rewards,
        gradient_checkpointing=settings.gradient_checkpointing,
        bf16=settings.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="steps",
        save_steps=settings.eval_every,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def evenly(examples: Sequence[Example], seed: int) -> list[Example]:
    """In random order, but with each kind spread evenly: every step then has the kinds in the data's own ratio."""
    order = list(examples)
    random.Random(seed).shuffle(order)
    total, seen = Counter(example.kind for example in order), Counter[str]()
    places: list[float] = []
    for example in order:
        places.append((seen[example.kind] + 0.5) / total[example.kind])
        seen[example.kind] += 1
    return [order[index] for index in sorted(range(len(order)), key=places.__getitem__)]


def reward(completions: Sequence[Any], score: Sequence[float | None], **_: Any) -> list[float | None]:
    """The environment's score; None, where it abstained, keeps the rollout out of its group's statistics."""
    assert len(completions) == len(score)
    return list(score)


class Rollouts:
    """TRL's rollout function: sample from the policy, let the environment grade, mask what has no score.

    A group with fewer than two scores has no advantages. Another question's group stands in for it, as often in a step
    as the settings allow; after that it stays, and is masked as a whole.
    """

    def __init__(self, course: Course, settings: params.Train, workflow: params.Workflow) -> None:
        self._course = course
        self._settings = settings
        self._workflow = workflow
        self._examples = {_asked(example, workflow): example for example in course.examples}
        self.groups: list[Group] = []
        """The last step's, one for each of its questions."""
        self.replaced: list[Group] = []
        """Those for which others stand in."""
        self.alarm = Alarm(course.environment.judge)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any] | None]:
        asked = [
            (text, len(list(group))) for text, group in itertools.groupby(prompt[-1]["content"] for prompt in prompts)
        ]
        examples, sizes = [self._examples[text] for text, _ in asked], [size for _, size in asked]
        self.groups, self.replaced = self._roll_out(examples, sizes, trainer.temperature), []
        self._require_scores()
        others = self._others(examples, trainer.state.global_step)
        while places := [place for place, group in enumerate(self.groups) if not has_advantages(group)]:
            fresh = list(itertools.islice(others, len(places)))
            if not fresh:
                break
            found = self._roll_out(fresh, [sizes[place] for place in places[: len(fresh)]], trainer.temperature)
            for place, group in zip(places, found, strict=False):
                self.replaced.append(self.groups[place])
                self.groups[place] = group
            self._require_scores()
        rollouts = list(itertools.chain(*self.groups))
        self.alarm.add(rollouts)
        return {
            "prompt_ids": [list(one.turns[0].prompt_ids) for one in rollouts],
            "completion_ids": [list(one.turns[0].completion_ids) for one in rollouts],
            "logprobs": None,
            "env_mask": [mask for group in self.groups for mask in _masks(group)],
            "score": [one.sample.score for one in rollouts],
        }

    def _others(self, examples: Sequence[Example], step: int) -> Iterator[Example]:
        """As many questions as a step may replace, drawn from those that are not in it."""
        here = {example.id for example in examples}
        order = [example for example in self._course.examples if example.id not in here]
        random.Random(f"{self._settings.seed} {step}").shuffle(order)
        return iter(order[: self._settings.max_replaced_groups])

    def _roll_out(self, examples: Sequence[Example], sizes: Sequence[int], temperature: float) -> list[Group]:
        """A group of rollouts for each example."""
        asked = [self._encode(policy_messages(example, self._workflow)) for example in examples]
        started, clock = time.time(), time.perf_counter()
        written = sample(
            self._course.model,
            asked,
            end_ids(self._course.model, self._course.tokenizer),
            copies=sizes,
            max_tokens=self._settings.max_completion_tokens,
            temperature=temperature,
            top_p=self._settings.top_p,
            top_k=self._settings.top_k,
        )
        times = started, time.perf_counter() - clock
        texts = self._course.tokenizer.batch_decode(written, skip_special_tokens=True)
        rows = [row for row, size in zip(zip(examples, asked, strict=True), sizes, strict=True) for _ in range(size)]
        pairs = [(text, example) for text, (example, _) in zip(texts, rows, strict=True)]
        with models.leaving_room():
            graded: list[Graded] = self._course.wait(self._course.environment.grade_all(pairs))
        rollouts = iter(
            [
                self._rollout(example, read, ids, one, *times)
                for (example, read), ids, one in zip(rows, written, graded, strict=True)
            ]
        )
        return [list(itertools.islice(rollouts, size)) for size in sizes]

    def _rollout(
        self, example: Example, read: list[int], written: list[int], graded: Graded, started: float, seconds: float
    ) -> Rollout:
        text = graded.sample.completion
        turn = Turn(tuple(read), tuple(written), (1,) * len(written), text)
        asked = {"messages": policy_messages(example, self._workflow)}
        wrote = Event("policy", "policy", started, seconds, asked, {"text": text}, len(read), len(written))
        return Rollout(example, (turn,), graded.sample, (*graded.events, wrote), graded.reason)

    def _encode(self, prompt: Any) -> list[int]:
        ids = self._course.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        if len(ids) > self._settings.max_prompt_tokens:
            raise SettingsError(
                f"train.max_prompt_tokens is {self._settings.max_prompt_tokens}; a prompt has {len(ids)} tokens"
            )
        return list(ids)

    def _require_scores(self) -> None:
        tried = list(itertools.chain(*self.groups, *self.replaced))
        faults = [one.sample.fault or "" for one in tried if one.sample.score is None]
        if len(faults) > self._settings.max_fault_share * len(tried):
            cause = max(set(faults), key=faults.count)
            raise TooManyFaults(
                f"{len(faults)} of {len(tried)} rollouts of a step have no score (mostly {cause}); more than "
                f"train.max_fault_share = {self._settings.max_fault_share}. When "
                f"{self._course.environment.needs} answer again, the same command goes on from the last checkpoint",
                cause=cause,
            )


def has_advantages(group: Group) -> bool:
    """Whether two or more rollouts have a score: one alone has nothing to be compared with."""
    return sum(one.sample.score is not None for one in group) >= 2


def _masks(group: Group) -> list[list[int]]:
    """1 for each token of the rollouts that are learnt from."""
    live = has_advantages(group)
    return [[int(live and one.sample.score is not None)] * len(one.turns[0].completion_ids) for one in group]


def _asked(example: Example, workflow: params.Workflow) -> str:
    return policy_messages(example, workflow)[-1]["content"]


def temperature_at(step: int, settings: params.Train) -> float:
    """The temperature of step `step`, from 0: linear to `temperature_end`, then constant."""
    if not settings.temperature_steps:
        return settings.temperature
    share = min(1.0, step / settings.temperature_steps)
    return settings.temperature + share * (settings.temperature_end - settings.temperature)


def _report(trainer: Any, rollouts: Rollouts, settings: params.Train, watcher: Watcher) -> Any:
    from transformers import TrainerCallback

    class Report(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            trainer.temperature = temperature_at(state.global_step, settings)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
            if "loss" in (logs or {}):
                logs = {**logs, **rollouts.alarm.metrics()}
                watcher.step(state.global_step, logs, rollouts.groups, rollouts.replaced, trainer.temperature)
                rollouts.alarm.check()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            watcher.checkpoint(state.global_step, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    return Report()
