"""Whether an adapter's files are whole, belong to a base and suit a backend. No model is run for it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradeflow.adapter import files, vllm
from gradeflow.adapter.files import CONFIG, BaseIdentity, Tensor
from gradeflow.errors import AdapterError

Backend = Literal["vllm", "hf"]

PREFIX = "base_model.model."
# LoRA of a kind whose tensors have other shapes or other layers than the checks here know.
UNKNOWN = ("target_parameters", "layer_replication", "use_qalora", "use_bdlora", "arrow_config")
# Initialisations that change the base's own weights, as PEFT does again whenever it loads such an adapter.
CHANGING = frozenset({"pissa", "olora", "corda", "lora_ga", "loftq"})


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """`rank` is the largest of any module; `saved` are the modules that were trained whole (modules_to_save)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    tensors: int
    dtype: str
    digest: str
    saved: tuple[str, ...] = ()
    dora: bool = False


def validate(
    folder: Path,
    base: BaseIdentity | None = None,
    base_folder: Path | None = None,
    *,
    backend: Backend = "hf",
    allow_bin: bool = False,
) -> AdapterFacts:
    """Check all that can be checked without running a model.

    With `base` the adapter must name that base; with `base_folder` its tensors must fit the model there. An
    adapter_model.bin is read only with `allow_bin`, and then as tensors: nothing in it is run.

    Raises:
        AdapterError: the first thing that is wrong: which file, and what to do.
    """
    file = files.find_weights(folder, allow_bin=allow_bin)
    config = files.read_config(folder)
    _require_lora(folder / CONFIG, config)
    if base is not None:
        _require_base(folder, config, base)
    tensors = files.read_weights(file)
    found = _sort(file, config, tensors)
    _require_dtype(file, found.pairs)
    _require_finite(file, tensors)
    ranks = _require_ranks(file, config, found.pairs)
    _require_effect(file, found)
    _require_targets(file, config, found.pairs)
    if base_folder is not None:
        _require_fit(file, config, found, base_folder)
    if backend == "vllm":
        alphas = {module: _of_module(config.get("alpha_pattern"), module, config["lora_alpha"]) for module in ranks}
        vllm.require(folder, config, {name: files.scale_of(config, alphas[name], ranks[name]) for name in ranks})
    return AdapterFacts(
        rank=max(config["r"], *ranks.values()),
        alpha=float(config["lora_alpha"]),
        targets=tuple(sorted({module.rpartition(".")[2] for module in found.pairs})),
        tensors=len(tensors),
        dtype=next(iter(found.pairs.values())).a.dtype,
        digest=files.digest(folder),
        saved=tuple(sorted({name.rpartition(".")[0] for name in found.whole})),
        dora=bool(found.magnitudes),
    )


class _Pair(NamedTuple):
    """The two matrices of one module: `a` is rank x inputs, `b` outputs x rank."""

    a: Tensor
    b: Tensor
    embedding: bool


class _Found(NamedTuple):
    """An adapter's tensors by module of the base; `whole`, by tensor of the base, are those trained as they are."""

    pairs: Mapping[str, _Pair]
    magnitudes: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]
    others: int


def _require_lora(file: Path, config: Mapping[str, Any]) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        said = f"peft_type is {kind}" if kind else "peft_type is missing"
        raise AdapterError(f"{file}: {said}; expected LORA. Train a LoRA adapter: others cannot be checked or served")
    if unknown := [key for key in UNKNOWN if config.get(key)]:
        raise AdapterError(f"{file}: LoRA with {unknown[0]} cannot be checked here. Train without it")
    if (init := str(config.get("init_lora_weights"))).partition("_niter")[0] in CHANGING:
        raise AdapterError(
            f"{file}: init_lora_weights is {init}, which changes the base when the adapter is loaded. Save it as plain "
            "LoRA: save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1:
        raise AdapterError(f"{file}: r is {rank!r}; expected a rank of at least 1, as the adapter was trained with")
    if not isinstance(alpha, int | float) or not alpha > 0:
        raise AdapterError(f"{file}: lora_alpha is {alpha!r}; expected more than 0, as the adapter was trained with")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or not all(isinstance(one, int | float) for one in patterns.values()):
            raise AdapterError(f"{file}: {key} is {patterns!r}; expected a number by pattern of module names")
    if not config.get("target_modules") or not isinstance(config["target_modules"], list | str):
        said = f"target_modules is {config.get('target_modules')!r}"
        raise AdapterError(f"{file}: {said}; expected the names of the modules that have LoRA, or a pattern of them")


def _require_base(folder: Path, config: Mapping[str, Any], base: BaseIdentity) -> None:
    """An adapter without a revision cannot say of which one it is, nor in which folder a hub's model lies here."""
    if not config.get("base_model_name_or_path"):
        raise AdapterError(
            f"{folder / CONFIG}: base_model_name_or_path is missing, so nobody knows the adapter's base. If it is "
            f"{_named(base.name, base.revision)}, write that there"
        )
    name, revision = files.base_name(str(config["base_model_name_or_path"])), config.get("revision") or ""
    same = (name, revision) == (base.name, base.revision)
    if not same and (revision or Path(name).name != Path(base.name).name):
        raise AdapterError(
            f"{folder}: made for base {_named(name, revision)}, but the base here is "
            f"{_named(base.name, base.revision)}. Set base.model to the adapter's, or train an adapter of this one"
        )


def _named(name: str, revision: str) -> str:
    return f"{name}@{revision}" if revision else name


def _sort(file: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _Found:
    halves: dict[str, dict[str, Tensor]] = {}
    embeddings, magnitudes, whole, others = set(), {}, {}, 0
    for name, tensor in tensors.items():
        inner = name.removeprefix(PREFIX)
        if found := re.fullmatch(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?", inner):
            halves.setdefault(found[1], {})[found[3]] = tensor
            embeddings |= {found[1]} if found[2] else set()
        elif found := re.fullmatch(r"(.+)\.lora_magnitude_vector(?:\.weight)?", inner):
            magnitudes[found[1]] = tensor
        elif _saved_as(inner, config):
            whole[inner] = tensor
        elif _is_expected(inner, config):
            others += 1
        elif not halves and all("lora_" not in one for one in tensors):
            break
        else:
            raise AdapterError(
                f"{file}: {name} would be left out when the adapter is loaded: it is neither a LoRA pair nor named in "
                f"{CONFIG}. Save the adapter with PEFT's save_pretrained"
            )
    if not halves:
        expected = f"expected names like {PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
        raise AdapterError(f"{file}: no LoRA tensors among {len(tensors)}: {expected}, found {next(iter(tensors))}")
    for module, half in halves.items():
        if len(half) != 2:
            raise AdapterError(f"{file}: {module} has lora_{next(iter(half))} alone. Save the adapter again")
    if bare := [name for name in tensors if not name.startswith(PREFIX)]:
        raise AdapterError(
            f"{file}: {bare[0]} binds to no module: names begin with {PREFIX} where PEFT has saved them. Put it before"
        )
    pairs = {module: _Pair(half["A"], half["B"], module in embeddings) for module, half in halves.items()}
    _require_named(file, config, pairs, magnitudes, whole)
    return _Found(pairs, magnitudes, whole, others)


def _is_named(module: str, config: Mapping[str, Any], key: str) -> bool:
    named = config.get(key)
    return any(module == name or module.endswith(f".{name}") for name in (named if isinstance(named, list) else []))


def _saved_as(inner: str, config: Mapping[str, Any]) -> str:
    """The module of modules_to_save that the tensor is of; for PEFT any ending names it, `norm` all norms."""
    module = inner.rpartition(".")[0]
    return next((name for name in config.get("modules_to_save") or () if module.endswith(name)), "")


def _is_expected(inner: str, config: Mapping[str, Any]) -> bool:
    """Whether PEFT saves and loads the tensor beside pairs, vectors and modules_to_save."""
    module, _, kind = inner.rpartition(".")
    if kind == "bias":
        lora = module.endswith((".lora_B", ".lora_embedding_B"))
        return bool(config.get("lora_bias")) if lora else config.get("bias") not in {None, "none"}
    if kind == "trainable_tokens_delta":
        return bool(config.get("trainable_token_indices"))
    # the embeddings that LoRA was put on, and those that were resized, are saved as they are
    return kind == "weight" and module.removesuffix(".base_layer").rpartition(".")[2] in vllm.ENDS


def _require_named(
    file: Path,
    config: Mapping[str, Any],
    pairs: Mapping[str, _Pair],
    magnitudes: Mapping[str, Tensor],
    whole: Mapping[str, Tensor],
) -> None:
    """What the configuration calls for is there, and the other way round."""
    if magnitudes and not config.get("use_dora"):
        raise AdapterError(
            f"{file}: holds lora_magnitude_vector, but use_dora is not set in {CONFIG}, so it would be left out. "
            "Set use_dora to true there"
        )
    if config.get("use_dora") and (without := sorted(set(pairs) - set(magnitudes))):
        raise AdapterError(
            f"{file}: use_dora is set, and {without[0]} has no lora_magnitude_vector. Save the adapter again"
        )
    for name in config.get("modules_to_save") or ():
        if name not in {_saved_as(inner, config) for inner in whole}:
            raise AdapterError(
                f"{file}: no tensors for {name} of modules_to_save. Save the adapter again, or take it out of {CONFIG}"
            )


def _require_dtype(file: Path, pairs: Mapping[str, _Pair]) -> None:
    if len(dtypes := {half.dtype for pair in pairs.values() for half in (pair.a, pair.b)}) > 1:
        raise AdapterError(f"{file}: its LoRA tensors are {' and '.join(sorted(dtypes))}. Save them in one dtype")


def _require_finite(file: Path, tensors: Mapping[str, Tensor]) -> None:
    import numpy as np

    for name, tensor in tensors.items():
        if not np.isfinite(tensor.values).all():
            raise AdapterError(f"{file}: {name} holds NaN or infinity. Take an earlier checkpoint: training diverged")


def _require_ranks(file: Path, config: Mapping[str, Any], pairs: Mapping[str, _Pair]) -> dict[str, int]:
    ranks = {module: int(_of_module(config.get("rank_pattern"), module, config["r"])) for module in pairs}
    for module, pair in pairs.items():
        for half, tensor in (("A", pair.a), ("B", pair.b)):
            if len(tensor.shape) != 2 or 0 in tensor.shape:
                raise AdapterError(
                    f"{file}: {module}.lora_{half} has the shape {tensor.shape}, which is no matrix: shards of ZeRO-3 "
                    "or FSDP. Gather them before save_pretrained"
                )
        if (found := (pair.a.shape[0], pair.b.shape[-1])) != (ranks[module], ranks[module]):
            raise AdapterError(
                f"{file}: {module} has rank {found[0]} in lora_A and {found[1]} in lora_B; the config says "
                f"{ranks[module]}. Take both files from one training run"
            )
    return ranks


def _of_module(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's rule for `rank_pattern`: the first pattern that the end of the module's name matches."""
    found = (value for pattern, value in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?({pattern})", module))
    return next(found, default)


def _require_effect(file: Path, found: _Found) -> None:
    """What is trained beside the pairs may have an effect without them: only a run of the model tells."""
    if found.magnitudes or found.whole or found.others:
        return
    if not any(pair.a.values.any() and pair.b.values.any() for pair in found.pairs.values()):
        raise AdapterError(
            f"{file}: the adapter does nothing: lora_B (or lora_A) is zero in every module. It was saved before its "
            "training, or has learnt nothing; take another checkpoint"
        )


def _require_targets(file: Path, config: Mapping[str, Any], modules: Iterable[str]) -> None:
    targets = config["target_modules"]
    there = {module.rpartition(".")[2] for module in modules}
    if isinstance(targets, list) and (missing := {str(target).rpartition(".")[2] for target in targets} - there):
        raise AdapterError(
            f"{file}: no tensors for target modules {', '.join(sorted(missing))}. Save the adapter again, or take them "
            f"out of {CONFIG}"
        )


def _require_fit(file: Path, config: Mapping[str, Any], found: _Found, base_folder: Path) -> None:
    layers = files.base_shapes(base_folder)
    if "lm_head.weight" not in layers and "model.embed_tokens.weight" in layers:  # the two are tied
        layers["lm_head.weight"] = layers["model.embed_tokens.weight"]
    for module, pair in found.pairs.items():
        layer = layers.get(f"{module}.weight")
        if layer is None:
            raise AdapterError(f"{file}: the base in {base_folder} has no layer {module}. {_OTHER_BASE}")
        expected = layer[::-1] if pair.embedding or config.get("fan_in_fan_out") else layer
        if (own := (pair.b.shape[0], pair.a.shape[-1])) != expected:
            raise AdapterError(
                f"{file}: {module} maps {own[1]} inputs to {own[0]} outputs; in the base of {base_folder} it maps "
                f"{expected[1]} to {expected[0]}. {_OTHER_BASE}"
            )
    for name, tensor in found.whole.items():
        if tensor.shape != layers.get(name, tensor.shape):
            raise AdapterError(
                f"{file}: {name} of modules_to_save has the shape {tensor.shape}; in the base of {base_folder} it has "
                f"{layers[name]}. {_OTHER_BASE}"
            )
    _require_every_layer(file, config, found.pairs, layers)


_OTHER_BASE = "The adapter belongs to another base; set base.model to that"


def _require_every_layer(
    file: Path, config: Mapping[str, Any], modules: Iterable[str], layers: Mapping[str, tuple[int, ...]]
) -> None:
    """PEFT leaves a layer without tensors as it is and goes on: half of an adapter looks like a weak one."""
    if not isinstance(config["target_modules"], list) or config.get("layers_to_transform"):
        return
    there = set(modules)
    kinds = {_numberless(module) for module in there}
    meant = {
        module
        for module, _, _ in (name.rpartition(".") for name in layers)
        if _numberless(module) in kinds
        and _is_named(module, config, "target_modules")
        and not _is_named(module, config, "exclude_modules")
    }
    if isinstance(config.get("exclude_modules"), str):
        meant = {module for module in meant if not re.fullmatch(config["exclude_modules"], module)}
    if missing := sorted(meant - there):
        raise AdapterError(
            f"{file}: {len(missing)} of the {len(meant)} modules that target_modules names have no tensors, such as "
            f"{missing[0]}. Save the adapter again, whole"
        )


def _numberless(module: str) -> str:
    return re.sub(r"\.\d+\.", ".#.", module)
