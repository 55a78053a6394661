"""Settings files of the program that trained AFlow workflows with an LLM judge: training.yaml and aflow_llm.yaml.

Every key of theirs is mapped to a setting of params.yaml, or named as dropped with the reason. API keys never enter
params.yaml.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gradeflow.commands.yaml_file import plain, read
from gradeflow.errors import SettingsError
from gradeflow.params import Operator

KEY_VARIABLE = "GRADEFLOW_LLM_API_KEY"


@dataclass(frozen=True, slots=True)
class Note:
    """What became of one key of the original: the setting it went `to`, or None, and why."""

    key: str
    to: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Imported:
    patch: dict[str, Any]
    notes: list[Note]


Names = Mapping[str, Any]
Rule = Callable[[Any, Names], tuple[dict[str, Any], str]]


def import_original(training_yaml: Path, aflow_yaml: Path | None = None) -> Imported:
    """Read the original's settings files; every key of theirs gets a note, unknown ones too.

    A key is known by its own name however deep it lies; where one name has two meanings, its section decides.
    The patch is for `apply`, which checks it against the schema.
    """
    leaves = dict(_leaves(read(training_yaml)))
    names = {path[-1]: value for path, value in leaves.items()}
    names |= {".".join(path[-2:]): value for path, value in leaves.items()}
    aflow = read(aflow_yaml) if aflow_yaml is not None else None
    names |= {"models": _models(aflow)} if aflow is not None else {}
    patch: dict[str, Any] = {}
    notes = [_follow(_rule(path), path, value, names, patch) for path, value in leaves.items()]
    if aflow is not None:
        notes += _import_models(aflow, names.get("aflow_executor_model"), patch)
    return Imported(patch, notes)


def _leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        path = (*above, str(key))
        if isinstance(value, Mapping) and key != "domain_ratios":
            yield from _leaves(value, path)
        else:
            yield path, plain(value)


def _rule(path: tuple[str, ...]) -> Rule:
    if path[-1] == "api_key":
        return _drop("a secret; it stays out of params.yaml")
    above = [RULES[part] for part in path[:-1] if part in RULES]
    return [
        *above,
        RULES.get(".".join(path[-2:])) or RULES.get(path[-1]) or _drop("no key of the original's"),
    ][0]


def _follow(rule: Rule, path: tuple[str, ...], value: Any, names: Names, patch: dict[str, Any]) -> Note:
    changes, reason = rule(value, names)
    for dotted, new in changes.items():
        *sections, last = dotted.split(".")
        tree = patch
        for part in sections:
            tree = tree.setdefault(part, {})
        tree[last] = new
    return Note(".".join(path), ", ".join(changes) or None, reason)


def _to(*settings: str, convert: Callable[[Any], Any] = lambda value: value, reason: str = "same meaning") -> Rule:
    return lambda value, _: (dict.fromkeys(settings, convert(value)), reason)


def _drop(reason: str) -> Rule:
    return lambda _value, _names: ({}, reason)


def _list(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _base(value: Any, _: Names) -> tuple[dict[str, Any], str]:
    return {
        "base.model": value,
        "base.revision": "",
    }, "the original pins no commit: for a hub model set base.revision"


def _bf16(value: Any, names: Names) -> tuple[dict[str, Any], str]:
    if "model_dtype" in names:
        return {}, "model_dtype decides"
    return {"train.dtype": "bfloat16" if value else "float32"}, "same meaning"


def _kl(_: Any, names: Names) -> tuple[dict[str, Any], str]:
    coefficient = names.get("kl_loss_coef", 0.0) if names.get("use_kl_loss", True) else 0.0
    return {"train.kl_coef": coefficient}, "KL to the base itself, adapter off; 0 where use_kl_loss is false"


def _operators(value: Any, _: Names) -> tuple[dict[str, Any], str]:
    asked, known = _list(value), get_args(Operator)
    kept, left = [name for name in asked if name in known], [name for name in asked if name not in known]
    return {"workflow.operators": kept}, f"not offered here: {', '.join(left)}" if left else "same meaning"


def _executor(value: Any, names: Names) -> tuple[dict[str, Any], str]:
    if "models" not in names:
        return {}, "its address is in aflow_llm.yaml: import both files"
    chosen = _called(names["models"], value)
    if chosen is None:
        return {}, f"aflow_llm.yaml has only {', '.join(names['models'])}"
    return _roles(chosen), "one model answered and judged"


def _max_new_tokens(value: Any, names: Names) -> tuple[dict[str, Any], str]:
    if {"response_max", "response_max_length"} & names.keys():
        return {}, "response_max_length bounds what is generated as well as what is trained on"
    return {"train.max_completion_tokens": value, "evaluate.max_gen_tokens": value}, "longest completion"


def _scheduled(names: Names) -> bool:
    schedule = any(name.startswith("temperature_schedule.") for name in names)
    return schedule and bool(names.get("temperature_schedule.enabled", True))


def _constant_temperature(value: Any, names: Names) -> tuple[dict[str, Any], str]:
    if _scheduled(names):
        return {}, "temperature_schedule decides"
    return dict.fromkeys(("train.temperature", "train.temperature_end"), value) | {
        "train.temperature_steps": 0
    }, "constant"


def _schedule(setting: str) -> Rule:
    def rule(value: Any, names: Names) -> tuple[dict[str, Any], str]:
        return (
            ({setting: value}, "linear, as there") if _scheduled(names) else ({}, "the schedule is switched off there")
        )

    return rule


_PROMPT = _to("train.max_prompt_tokens", reason="longer prompts are refused, not cut")
_RESPONSE = _to("train.max_completion_tokens", "evaluate.max_gen_tokens", reason="the same in training and evaluation")
_TARGETS = _to("train.lora.target_modules", convert=_list)
_ACCUMULATION = _drop("one update per batch of rollouts, groups never split; train.micro_batch bounds memory")
_DEVICES = _drop("devices are chosen outside: CUDA_VISIBLE_DEVICES, accelerate")
_DATA = _drop("data comes from `fetch` and `mix`, which name the sources")
_TRACKED = _drop("every step is tracked in MLflow")
_START, _END = _schedule("train.temperature"), _schedule("train.temperature_end")

RULES: dict[str, Rule] = {
    "exp_name": _to("tracking.experiment", reason="the MLflow experiment"),
    "output_dir": _drop("adapters are kept as artifacts of their MLflow run"),
    "log_dir": _TRACKED,
    "max_steps": _to("train.max_steps"),
    "save_every": _drop("an adapter is saved at each validation: train.eval_every"),
    "eval_every": _to("train.eval_every"),
    "val_samples": _to("train.val_samples"),
    "log_every": _TRACKED,
    "adv_estimator": _drop("GRPO is the one estimator; train.scale_rewards chooses its divisor"),
    "rollout_batch_size": _to("train.prompts_per_step", reason="questions per step"),
    "num_return_sequences_in_group": _to("train.group_size", reason="rollouts per question"),
    "ppo_epochs": _to("train.ppo_epochs"),
    "async_generation_ratio": _drop("rollouts come from the adapter that is trained on them"),
    "use_kl_loss": _kl,
    "kl_loss_coef": _kl,
    "clip_range": _to("train.clip_range", "train.clip_range_high", reason="one range for both sides"),
    "gamma": _drop("one reward per rollout: nothing to discount"),
    "lambda_gae": _drop("GRPO has no critic"),
    "prompt_max": _PROMPT,
    "prompt_max_length": _PROMPT,
    "response_max": _RESPONSE,
    "response_max_length": _RESPONSE,
    "base_model": _base,
    "strategy_model": _base,
    "model_dtype": _to("train.dtype"),
    "bf16": _bf16,
    "gradient_checkpointing": _to("train.gradient_checkpointing"),
    "use_lora": _drop("an adapter is always what is trained; the base stays frozen"),
    "lora_rank": _to("train.lora.rank"),
    "lora_alpha": _to("train.lora.alpha"),
    "lora_dropout": _to("train.lora.dropout"),
    "lora_target_modules": _TARGETS,
    "lora.rank": _to("train.lora.rank"),
    "lora.r": _to("train.lora.rank"),
    "lora.alpha": _to("train.lora.alpha"),
    "lora.dropout": _to("train.lora.dropout"),
    "lora.target": _TARGETS,
    "target_modules": _TARGETS,
    "learning_rate": _to("train.learning_rate"),
    "lr": _to("train.learning_rate"),
    "weight_decay": _to("train.weight_decay"),
    "wd": _to("train.weight_decay"),
    "max_grad_norm": _to("train.max_grad_norm"),
    "gradient_accumulation_steps": _ACCUMULATION,
    "grad_accum": _ACCUMULATION,
    "warmup_steps": _to("train.warmup_steps", reason="in effect here; the original never applied it"),
    "warmup": _to("train.warmup_steps", reason="in effect here; the original never applied it"),
    "device_mapping": _DEVICES,
    "physical_gpus": _DEVICES,
    "num_gpus": _DEVICES,
    "world_size": _DEVICES,
    "protected_pids": _drop("nobody else's process is ever ended"),
    "data_dir": _DATA,
    "train_dataset": _DATA,
    "val_dataset": _DATA,
    "test_dataset": _DATA,
    "domain_ratios": _to("mix.type_ratios", reason="shares of the mixed rows"),
    "aflow_config_path": _drop("its content is imported, given as the second file"),
    "aflow_executor_model": _executor,
    "aflow_operators": _operators,
    "aflow_operator_descriptions_path": _drop("the policy's prompt describes them, versioned with the package"),
    "execution_timeout": _to("workflow.wall_s", reason="seconds for one workflow"),
    "reward_weights": _drop("unused there too; the one scorer gives the reward"),
    "experience_buffer": _drop("always empty there: no reward reached its threshold"),
    "prompt_optimizer": _drop("the policy's prompt is fixed and versioned: what is trained is what was sampled"),
    "operator_prompt_enhancer": _drop("operators' prompts are fixed and versioned"),
    "wandb": _TRACKED,
    "generation_config.temperature": _constant_temperature,
    "generation_config.top_p": _to("train.top_p"),
    "generation_config.top_k": _to("train.top_k"),
    "generation_config.max_new_tokens": _max_new_tokens,
    "generation_config.do_sample": _drop("rollouts are always sampled"),
    "temperature_schedule.enabled": _drop("train.temperature_steps: 0 switches the schedule off"),
    "temperature_schedule.initial": _START,
    "temperature_schedule.start": _START,
    "temperature_schedule.final": _END,
    "temperature_schedule.end": _END,
    "temperature_schedule.warmup_steps": _schedule("train.temperature_steps"),
    "temperature_schedule.steps": _schedule("train.temperature_steps"),
    "debug": _drop("no such mode"),
    "verbose": _drop("no such mode"),
}


def _api_key(value: Any, _: Names) -> tuple[dict[str, Any], str]:
    if str(value or "").lower() in {"", "empty", "none", "dummy", "not-needed"}:
        return {"api_key_env": ""}, "that server asks for no key"
    return {"api_key_env": KEY_VARIABLE}, f"a secret, left out: `export {KEY_VARIABLE}=...` instead"


MODEL_RULES: dict[str, Rule] = {
    "api_type": _drop("every endpoint is OpenAI-compatible"),
    "base_url": _to("url"),
    "api_key": _api_key,
    "model_name": _to("model"),
    "temperature": _to("temperature", reason="operators ask at it; judge.temperature is the judge's"),
    "top_p": _to("top_p"),
    "no_proxy": _to("no_proxy"),
}


def _models(tree: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    models = tree.get("models")
    if not isinstance(models, Mapping) or not all(isinstance(model, Mapping) for model in models.values()):
        raise SettingsError("aflow_llm.yaml: expected `models:` with a mapping for each model")
    return models


def _called(models: Mapping[str, Mapping[str, Any]], wanted: Any) -> str | None:
    """The key of the model that is asked for by its key or by its name at the server."""
    named = (name for name, model in models.items() if wanted in {name, model.get("model_name")})
    return next(named, None) if wanted else None


def _setting_name(model: str) -> str:
    """Its key in `models` here, where a dot would be read as a section."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", model)


def _roles(model: str) -> dict[str, Any]:
    name = _setting_name(model)
    return {"workflow.executor": name, "judge.models": [name], "solve.model": name}


def _import_models(tree: Mapping[str, Any], wanted: Any, patch: dict[str, Any]) -> Iterator[Note]:
    """All models by their names there. Without a choice, or with one that is not there, the first has the roles."""
    models = _models(tree)
    if models and _called(models, wanted) is None:
        first = next(iter(models))
        yield _follow(lambda *_: (_roles(first), "the first model executes and judges"), ("models",), None, {}, patch)
    for name, model in models.items():
        section = patch.setdefault("models", {}).setdefault(_setting_name(str(name)), {})
        if "model_name" not in model:
            yield _follow(_to("model", reason="AFlow asks by this name"), ("models", str(name)), str(name), {}, section)
        for key, value in model.items():
            rule = MODEL_RULES.get(key, _drop("no key of the original's"))
            yield _follow(rule, ("models", str(name), key), plain(value), {}, section)
    for key in tree:
        if key != "models":
            yield Note(str(key), None, "no key of the original's")
