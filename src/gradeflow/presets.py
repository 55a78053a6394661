"""Training presets under the names of the original RL agent: settings that are laid under what is typed."""

from collections.abc import Mapping

from gradeflow.errors import SettingsError

# A group of one, as the original's `fast` has it, has nothing to compare: two is the least.
_COMMON = {
    "train.environment": "modeling",
    "train.group_size": "2",
    "train.prompts_per_step": "8",
    "train.learning_rate": "1.0e-6",
    "train.warmup_steps": "0",
    "train.kl_coef": "0.0",
    "train.clip_range": "0.2",
    "train.clip_range_high": "0.3",
    "train.temperature": "0.7",
    "train.temperature_end": "0.7",
    "train.max_prompt_tokens": "4096",
    "train.max_completion_tokens": "2048",
    "train.micro_batch": "1",
    "train.gradient_checkpointing": "true",
    "solve.max_turns": "3",
    "solve.sandbox_timeout_s": "600",
}
PRESETS: Mapping[str, Mapping[str, str]] = {
    "fast": _COMMON | {"train.epochs": "0", "train.max_steps": "1", "train.eval_every": "1"},
    "standard": _COMMON | {"train.epochs": "2", "train.eval_every": "8"},
    "advanced": _COMMON | {"train.epochs": "4", "train.eval_every": "6", "train.learning_rate": "5.0e-7"},
}


def overrides(name: str) -> Mapping[str, str]:
    """What a preset sets; nothing without a name."""
    if name and name not in PRESETS:
        raise SettingsError(f"preset is {name!r}; expected one of {', '.join(PRESETS)}")
    return PRESETS[name] if name else {}
