"""TRL's GRPOTrainer on groups that are written and graded outside of it.

TRL keeps the optimizer, its schedule, the loss and the checkpoints. What differs: where a batch comes from, the
reference's log-probabilities are computed while scores are waited for, a prompt is read once for its whole group, and
each rollout is measured at the temperature that it was sampled at. Letters: B rollouts of a micro-batch, P and T tokens
of its longest prompt and completion.
"""

import itertools
import logging
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gradeflow import params
from gradeflow.decode import computing
from gradeflow.grpo import checkpoint
from gradeflow.grpo.advantages import advantages
from gradeflow.grpo.log_probs import can_share, log_probs
from gradeflow.grpo.rollouts import Batch, Rollouts
from gradeflow.types import Rollout, Turn

if TYPE_CHECKING:
    import torch
    from trl import GRPOConfig

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
KEPT = 2
"""Checkpoints that stay on the disk."""

Key = tuple[tuple[int, ...], tuple[int, ...], float]
"""A prompt, a completion and a temperature."""

T = TypeVar("T")


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
        max_completion_length=settings.max_completion_tokens,
        temperature=settings.temperature,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        lr_scheduler_type=SCHEDULES[settings.lr_schedule],
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        beta=settings.kl_coef,
        epsilon=settings.clip_range,
        epsilon_high=settings.clip_range_high,
        num_iterations=settings.ppo_epochs,
        gradient_checkpointing=settings.gradient_checkpointing,
        bf16=settings.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="steps",
        save_steps=settings.eval_every,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def temperature_at(step: int, settings: params.Train) -> float:
    """The temperature of step `step`, from 0: linear to `temperature_end`, then constant."""
    if not settings.temperature_steps:
        return settings.temperature
    share = min(1.0, step / settings.temperature_steps)
    return settings.temperature + share * (settings.temperature_end - settings.temperature)


def make(
    model: Any,
    tokenizer: Any,
    rollouts: Rollouts,
    settings: params.Train,
    folder: Path,
    state: Callable[[], Mapping[str, Any]],
    finish: Callable[[Path], None],
) -> Any:
    """A trainer of the model's adapter, with its checkpoints in `folder`.

    Each has the `state` of all that is not TRL's, and `finish` completes its files before it counts.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    logging.getLogger("trl").setLevel(logging.ERROR)
    from datasets import Dataset
    from transformers import PrinterCallback, Trainer
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    base = model.get_base_model()
    plain = base.forward

    class GroupTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
        """`batch` is what the last update learnt from."""

        batch: Batch

        def __init__(self) -> None:
            config = configure(settings, folder)
            rows = config.generation_batch_size * settings.max_steps
            super().__init__(
                model=model,
                reward_funcs=[_unused],
                args=config,
                train_dataset=Dataset.from_dict({"prompt": [""] * rows}),
                processing_class=tokenizer,
            )
            if "ref" in model.peft_config:  # TRL's copy of the adapter as it was, which need not be the base
                model.delete_adapter("ref")
            self.remove_callback(PrinterCallback)
            self._inputs: list[dict[str, Any]] = []
            self._measured: dict[Key, torch.Tensor] = {}
            self._temperatures: list[float] = []
            self._head_temperature = settings.temperature

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> "torch.Tensor":  # noqa: ARG002
            window = self.args.steps_per_generation
            if self._step % (window * self.num_iterations) == 0:
                self._inputs = self._learn_from(self.state.global_step)
            with computing:
                return super().training_step(model, self._inputs[self._step % window], num_items_in_batch)  # type: ignore[no-any-return]

        def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
            return inputs  # they are where the model is

        def _learn_from(self, step: int) -> list[dict[str, Any]]:
            self._measured.clear()
            self.batch = rollouts.take(step, temperature_at(step, settings), self._measure)
            rows = _rows(self.batch, settings)
            tokens = sum(sum(turn.mask) for _, turn, _ in rows)
            rows = [row for row in rows if row[2] or self.beta] or [_silent(self.batch.rollouts[0])]
            self._measure([(turn, rollout.temperature) for rollout, turn, _ in rows])
            rows = _sorted(rows, lambda row: row[1])
            return [self._tensors(part, tokens, step) for part in _parts(rows, self.args.steps_per_generation)]

        def _tensors(self, rows: "Sequence[Row]", tokens: int, step: int) -> dict[str, Any]:
            import torch

            turns = [turn for _, turn, _ in rows]
            found = self._padded(turns)
            device, width = self.model.device, found["completion_ids"].shape[1]

            def table(values: "Sequence[Sequence[float] | torch.Tensor]") -> torch.Tensor:
                filled = [torch.as_tensor(value, dtype=torch.float32) for value in values]
                return torch.stack([torch.nn.functional.pad(one, (0, width - len(one))) for one in filled]).to(device)

            found["tool_mask"] = table([turn.mask for turn in turns]).long()
            found["advantages"] = torch.tensor([advantage for *_, advantage in rows], device=device)
            found["num_items_in_batch"] = torch.tensor(float(tokens), device=device)
            found["temperatures"] = [rollout.temperature for rollout, *_ in rows]
            fresh = all(rollout.version == step for rollout, *_ in rows)
            if self.num_iterations > 1 or not fresh or not rollouts.own_model:
                found["old_per_token_logps"] = table([turn.log_probs for turn in turns])
            if self.beta:
                measured = [self._measured[_key(turn, rollout.temperature)] for rollout, turn, _ in rows]
                found["ref_per_token_logps"] = table(measured)
            if fresh and not rollouts.own_model:
                found["measured_at"] = step
            return found

        def _measure(self, turns: Sequence[tuple[Turn, float]]) -> None:
            """Keep what the reference, the base alone, thinks of turns."""
            import torch

            missing = {_key(*pair): pair for pair in turns if _key(*pair) not in self._measured}
            if not self.beta or not missing:
                return
            order = _sorted(list(missing.values()), lambda pair: pair[0])
            size = self.args.per_device_train_batch_size
            training = self.model.training
            self.model.eval()
            try:
                with computing, torch.no_grad(), self.model.disable_adapter():
                    for start in range(0, len(order), size):
                        part = order[start : start + size]
                        asked = self._padded([turn for turn, _ in part])
                        self._temperatures = [temperature for _, temperature in part]
                        found, _, _ = self._get_per_token_logps_and_entropies(
                            self.model,
                            torch.cat([asked["prompt_ids"], asked["completion_ids"]], dim=1),
                            torch.cat([asked["prompt_mask"], asked["completion_mask"]], dim=1),
                            asked["completion_ids"].shape[1],
                        )
                        for pair, row in zip(part, found, strict=True):
                            self._measured[_key(*pair)] = row[: len(pair[0].completion_ids)]
            finally:
                self.model.train(training)

        def _padded(self, turns: Sequence[Turn]) -> dict[str, Any]:
            """Prompts (B, P) padded on the left, completions (B, T) on the right, and their masks."""
            import torch
            from trl.trainer.utils import pad

            found = {}
            for name, side in (("prompt", "left"), ("completion", "right")):
                ids = [torch.tensor(getattr(turn, f"{name}_ids")) for turn in turns]
                token = self._tokenizer.pad_token_id
                found[f"{name}_ids"] = pad(ids, padding_value=token, padding_side=side).to(self.model.device)
                ones = [torch.ones_like(each) for each in ids]
                found[f"{name}_mask"] = pad(ones, padding_value=0, padding_side=side).to(self.model.device)
            return found

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> "torch.Tensor":
            self._temperatures = inputs["temperatures"]
            before = {name: len(values) for name, values in self._metrics["train"].items()}
            loss = super()._compute_loss(model, inputs)
            if not (inputs["completion_mask"] * inputs["tool_mask"]).any():  # its figures are of nothing
                self._metrics["train"] = _shortened(self._metrics["train"], before)
            elif inputs.get("measured_at") == self.state.global_step:
                self._compare(inputs)
            return loss  # type: ignore[no-any-return]

        def _compare(self, inputs: dict[str, Any]) -> None:
            """Log what the engine that wrote and this one differ by on the same weights: mean over tokens, in nats."""
            written = inputs["completion_mask"] * inputs["tool_mask"]
            gaps = (self._found.detach() - inputs["old_per_token_logps"]).abs() * written
            self._metrics["train"]["log_prob_gap"].append((gaps.sum() / written.sum().clamp(min=1)).item())

        def _get_per_token_logps_and_entropies(
            self,
            model: Any,
            input_ids: "torch.Tensor",
            attention_mask: "torch.Tensor",
            logits_to_keep: int,
            *_: Any,
            **__: Any,
        ) -> "tuple[torch.Tensor, torch.Tensor, None]":
            """Log-probabilities and entropies (B, T) of the completions, each at its rollout's temperature."""
            import torch

            given = torch.tensor(self._temperatures, device=input_ids.device)
            shape, dtype = (len(input_ids), logits_to_keep), torch.float32
            found, entropy = (torch.zeros(shape, dtype=dtype, device=input_ids.device) for _ in range(2))
            for temperature in sorted(set(self._temperatures)):
                self._set_head(temperature)
                rows = (given == temperature).nonzero()[:, 0]
                with self.accelerator.autocast():
                    part = self._read(model, input_ids[rows], attention_mask[rows], logits_to_keep)
                if len(rows) == len(input_ids):
                    self._found = part[0]
                    return *part, None
                found, entropy = (
                    found.index_copy(0, rows, part[0].float()),
                    entropy.index_copy(0, rows, part[1].float()),
                )
            self._found = found
            return found, entropy, None

        def _read(
            self, model: Any, ids: "torch.Tensor", mask: "torch.Tensor", length: int
        ) -> "tuple[torch.Tensor, torch.Tensor]":
            if can_share(model) and self.accelerator.num_processes == 1:
                return log_probs(model, ids, mask, length)
            found, entropy, _ = super()._get_per_token_logps_and_entropies(
                model, ids, mask, length, compute_entropy=True
            )
            return found, entropy

        def _set_head(self, temperature: float) -> None:
            """TRL's head divides by the temperature it was made with, whatever the schedule says by now."""
            if temperature != self._head_temperature:
                base.forward = plain
                add_fused_lm_head(base, temperature=temperature, outputs=("log_probs", "entropy"))
                self._head_temperature = temperature

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            number = self.state.global_step
            with checkpoint.writing(folder, number, state()) as self._part:
                Trainer._save_checkpoint(self, model, trial)  # noqa: SLF001 - TRL's would add a model card each time
                finish(self._part / f"checkpoint-{number}")
            checkpoint.keep(folder, KEPT)

        def _get_output_dir(self, trial: Any) -> str:  # noqa: ARG002
            return str(self._part)

    return GroupTrainer()


Row = tuple[Rollout, Turn, float]
"""A rollout, one of its turns, and the advantage of what it wrote there."""


def _rows(batch: Batch, settings: params.Train) -> list[Row]:
    """All that has an advantage, be it 0."""
    scores = [[one.sample.score for one in group] for group in batch.groups]
    found = advantages(scores, settings.scale_rewards)
    return [
        (rollout, turn, advantage)
        for group, own in zip(batch.groups, found, strict=True)
        for rollout, advantage in zip(group, own, strict=True)
        if advantage is not None
        for turn in rollout.turns
    ]


def _shortened(figures: Mapping[str, list[float]], lengths: Mapping[str, int]) -> defaultdict[str, list[float]]:
    """The figures as they were at these lengths; TRL divides by them, so that none is empty."""
    return defaultdict(list, {name: figures[name][:length] for name, length in lengths.items() if length})


def _silent(rollout: Rollout) -> Row:
    """A row of which no token is learnt, for the loss needs one."""
    turn = rollout.turns[0]
    return rollout, replace(turn, mask=(0,) * len(turn.mask)), 0.0


def _sorted(rows: Sequence[T], turn_of: Callable[[T], Turn]) -> list[T]:
    """Turns with one prompt side by side, short completions first: little padding, and few prompts read twice."""
    longest: Counter[tuple[int, ...]] = Counter()
    for turn in map(turn_of, rows):
        longest[turn.prompt_ids] = max(longest[turn.prompt_ids], len(turn.completion_ids))

    def place(row: T) -> tuple[int, tuple[int, ...], int]:
        turn = turn_of(row)
        return longest[turn.prompt_ids], turn.prompt_ids, len(turn.completion_ids)

    return sorted(rows, key=place)


def _parts(rows: Sequence[Row], count: int) -> list[Sequence[Row]]:
    """As many parts, of much the same size; where there are too few rows, some teach nothing."""
    ends = [len(rows) * number // count for number in range(count + 1)]
    return [rows[start:end] or [_silent(rows[0][0])] for start, end in itertools.pairwise(ends)]


def _key(turn: Turn, temperature: float) -> Key:
    return turn.prompt_ids, turn.completion_ids, temperature


def _unused(**_: Any) -> list[float]:
    """TRL asks for a reward function; rollouts come with their scores."""
    raise NotImplementedError
