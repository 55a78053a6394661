"""The training loop: groups of graded workflows, TRL's trainer, checkpoints that can be gone on from.

The loop reports to a `Watcher` and knows nothing of MLflow.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gradeflow import adapter, llm, models, params
from gradeflow.adapter import BaseIdentity
from gradeflow.audit import Alarm
from gradeflow.background import Background
from gradeflow.errors import AdapterError, SettingsError
from gradeflow.grpo import checkpoint, trainer, vllm_policy
from gradeflow.grpo.environment import Environment
from gradeflow.grpo.episodes import Episodes
from gradeflow.grpo.policy import LocalPolicy, Policy
from gradeflow.grpo.questions import Questions
from gradeflow.grpo.rollback import Rollback
from gradeflow.grpo.rollouts import Batch, Rollouts
from gradeflow.types import Example

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Watcher(Protocol):
    """What a stage does with what the loop reports. `number` counts updates, from 1."""

    def step(self, number: int, logs: Mapping[str, float], batch: Batch) -> None: ...

    def checkpoint(self, number: int, adapter: Path) -> None: ...

    def collapse(self, number: int, reason: str) -> None:
        """The policy had collapsed; where it goes on from is in the reason."""


@dataclass(frozen=True, slots=True)
class Course:
    """What one training run is made of, besides its settings."""

    model: "PeftModel"
    tokenizer: "PreTrainedTokenizerBase"
    identity: BaseIdentity
    examples: Sequence[Example]
    environment: Environment
    background: Background
    folder: Path


def attach_adapter(model: "PreTrainedModel", settings: params.Lora) -> "PeftModel":
    """A fresh LoRA adapter on the model; B starts at zero, so the policy starts as the base."""
    from peft import get_peft_model

    return get_peft_model(model, lora_config(settings))


def lora_config(settings: params.Lora) -> "LoraConfig":
    """PEFT's configuration of these settings."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
    )


async def require_ready(settings: params.Train) -> None:
    """Raises what `vllm_policy.require_ready` does where vLLM is to write and cannot."""
    if settings.rollouts.url != llm.LOCAL:
        await vllm_policy.require_ready(settings)


@contextmanager
def policy_of(course: Course, settings: params.Train) -> Iterator[Policy]:
    """Who writes the course's rollouts, by `train.rollouts.url`."""
    if settings.rollouts.url == llm.LOCAL:
        yield LocalPolicy(course.model, course.tokenizer, settings)
        return
    parts = course.model, course.tokenizer, course.identity, course.background, settings, course.folder
    with vllm_policy.opened(*parts) as policy:
        yield policy


def episodes_of(course: Course, settings: params.Train, policy: Policy | None = None) -> Episodes:
    """Episodes of the course, written by its model where no other policy is given."""
    tokenizer: Any = course.tokenizer

    def encode(messages: Any) -> list[int]:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    policy = policy or LocalPolicy(course.model, tokenizer, settings)
    return Episodes(policy, encode, decode, course.environment, course.background, settings)


def require_room(course: Course, examples: Sequence[Example], settings: params.Train) -> None:
    """Raises SettingsError where a question is too long to be asked: met in the middle, it would end training."""
    encode, most = episodes_of(course, settings).encode, settings.max_prompt_tokens
    lengths = {one.id: len(encode(course.environment.opening(one))) for one in examples}
    if long := [name for name, length in lengths.items() if length > most]:
        longest = max(long, key=lengths.__getitem__)
        raise SettingsError(
            f"train.max_prompt_tokens is {most}; {len(long)} of {len(lengths)} questions take more, most of all "
            f"{longest}: {lengths[longest]}. Raise it, or leave such questions out of the data"
        )


def rollouts_of(course: Course, settings: params.Train, policy: Policy | None = None) -> Rollouts:
    """The course's groups."""
    return Rollouts(episodes_of(course, settings, policy), Questions(course.examples, settings.seed), settings)


def train(course: Course, settings: params.Train, watcher: Watcher) -> None:
    """Train to `settings.max_steps`, going on from the newest checkpoint in `course.folder` where there is one.

    Raises:
        TooManyFaults: more rollouts than allowed have no score; the newest checkpoint is there to go on from.
        AdapterError: what training has made of the adapter is dead; it is in no checkpoint.
        CollapseError: the policy collapsed once more than it may.
        ProviderError: the server that writes rollouts was away for too long; as with too many faults.
    """
    with policy_of(course, settings) as policy:
        _train(course, rollouts_of(course, settings, policy), settings, watcher)


def _train(course: Course, rollouts: Rollouts, settings: params.Train, watcher: Watcher) -> None:
    models.settle_threads()
    rollback = Rollback(course.model, rollouts, settings)
    alarm = Alarm(course.environment.judge)
    last = checkpoint.newest(course.folder)
    if last is not None:
        kept = checkpoint.state_of(last)
        rollouts.restore(kept["rollouts"])
        alarm.restore(kept["alarm"])
        rollback.restore(last)

    def state() -> dict[str, Any]:
        return {"rollouts": rollouts.state(), "alarm": alarm.state()}

    def finish(folder: Path) -> None:
        adapter.stamp(folder, course.identity)
        if has_learnt(log for log in made.state.log_history if log["step"] > rollback.began_anew):
            _require_alive(folder, course.identity)
        rollback.save(folder)

    made = trainer.make(course.model, course.tokenizer, rollouts, settings, course.folder, state, finish)
    made.add_callback(_report(made, alarm, rollback, watcher, settings.ppo_epochs))
    made.train(resume_from_checkpoint=None if last is None else str(last))


def has_learnt(logs: Iterable[Mapping[str, float]]) -> bool:
    """Whether any update has moved the adapter; the first of a warm-up, and one without anything to learn, do not."""
    return any(log.get("learning_rate", 0) != 0 and log.get("grad_norm", 0) != 0 for log in logs)


def _require_alive(folder: Path, identity: BaseIdentity) -> None:
    try:
        adapter.validate(folder, identity)
    except AdapterError as error:
        raise AdapterError(
            f"step {checkpoint.number_of(folder)}: training has broken the adapter, and stops. {error}. Lower "
            "train.learning_rate or train.max_grad_norm; the best checkpoint so far is kept"
        ) from error


def _report(made: Any, alarm: Alarm, rollback: Rollback, watcher: Watcher, epochs: int) -> Any:
    from transformers import TrainerCallback

    class Report(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            self.started = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
            if "loss" in (logs or {}):
                if (state.global_step - 1) % epochs == 0:  # others learn from the same rollouts again
                    alarm.add(rollout for group in made.batch.asked for rollout in group)
                collapsed = rollback.due(state.global_step, logs, made.batch)
                found = {**alarm.metrics(), **rollback.metrics(), "step_time": time.perf_counter() - self.started}
                watcher.step(state.global_step, {**logs, **found}, made.batch)
                if collapsed:
                    reason = rollback.go_back(state.global_step, kwargs["optimizer"], kwargs["lr_scheduler"])
                    watcher.collapse(state.global_step, reason)
                alarm.check()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            watcher.checkpoint(state.global_step, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    return Report()
