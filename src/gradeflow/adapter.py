"""Adapter files: what they are called, whether they are whole, and whether they do anything.

An adapter is a folder as PEFT saves it: adapter_model.safetensors (or .bin) and adapter_config.json. It names
its base by hub id and revision, or by the recipe of an embedded base (`gradeflow-base-<12 hex>`), never by a
path: another machine finds that base below its own `base.folder`, or makes it with `gradeflow base`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradeflow import digest as digests
from gradeflow.errors import AdapterError

if TYPE_CHECKING:
    import numpy as np
    from peft import PeftModel

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
EMBEDDED = "gradeflow-base-"

# What PEFT writes beside the meaning of an adapter, and what only its training needed.
_INCIDENTAL = {"auto_mapping", "inference_mode", "init_lora_weights", "peft_version", "runtime_config"}


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """Which model an adapter belongs to; `revision` is empty for an embedded base, whose name says it all."""

    name: str
    revision: str
    digest: str


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    rank: int
    alpha: float
    targets: tuple[str, ...]
    tensors: int
    dtype: str
    digest: str


def digest(folder: Path) -> str:
    """Digest of the weights' bytes and of what the configuration means, whatever its paths and versions."""
    return digests.of_json({"weights": digests.of_file(_weights(folder)), "config": _meaning(read_config(folder))})


def read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise AdapterError(f"{folder}: Output directory not found")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterError(f"{folder}: {CONFIG} not found") from None
    except ValueError as error:
        raise AdapterError(f"{folder / CONFIG}: Invalid config JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{folder / CONFIG}: Invalid config JSON: expected an object")
    return config


def stamp(folder: Path, identity: BaseIdentity) -> None:
    """Let the adapter name its base by identity, where PEFT has written a path of this machine."""
    named = {"base_model_name_or_path": identity.name, "revision": identity.revision or None}
    fresh = folder / f".{CONFIG}.part"
    fresh.write_text(json.dumps(read_config(folder) | named, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    fresh.replace(folder / CONFIG)


def validate(folder: Path, base: BaseIdentity | None = None, base_folder: Path | None = None) -> AdapterFacts:
    """Check all that can be checked without running a model.

    With `base` the adapter must name that base; with `base_folder` its tensors must fit the model there.

    Raises:
        AdapterError: the first thing that is wrong.
    """
    if not folder.is_dir():
        raise AdapterError(f"{folder}: Output directory not found")
    weights = _weights(folder)
    config = read_config(folder)
    if base is not None:
        _require_base(folder, config, base)
    tensors = _read_weights(weights)
    pairs = _pairs(weights, tensors)
    _require_finite(weights, tensors)
    _require_ranks(weights, config, pairs)
    _require_effect(weights, config, pairs)
    if base_folder is not None:
        _require_fit(weights, config, pairs, base_folder)
    targets = {module.rpartition(".")[2] for module in pairs}
    _require_targets(weights, config, targets)
    dtype = next(iter(tensors.values())).dtype
    return AdapterFacts(
        config["r"], float(config["lora_alpha"]), tuple(sorted(targets)), len(tensors), dtype, digest(folder)
    )


def default_probes(vocabulary: int, count: int = 4, length: int = 16) -> tuple[tuple[int, ...], ...]:
    """Token sequences spread over the vocabulary, the same wherever they are asked for."""
    return tuple(
        tuple((7919 * (length * row + column) + 1) % vocabulary for column in range(length)) for row in range(count)
    )


def logit_change(model: "PeftModel", probes: Sequence[Sequence[int]]) -> float:
    """The largest difference that the active adapter makes in a logit; probes are of one length."""
    import torch

    tokens = torch.tensor([list(probe) for probe in probes], device=model.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            adapted = model(input_ids=tokens).logits
            with model.disable_adapter():
                plain = model(input_ids=tokens).logits
    finally:
        model.train(was_training)
    return float((adapted.float() - plain.float()).abs().max())


def prove_alive(model: "PeftModel", probes: Sequence[Sequence[int]]) -> float:
    """The adapter's `logit_change`, if it makes one.

    Raises:
        AdapterError: it changes nothing, or turns logits into something that is no number.
    """
    change = logit_change(model, probes)
    if not change > 0:
        raise AdapterError(
            "the loaded adapter changes no logit: it is not bound to the model, not active, or all zero"
            if change == 0
            else "the loaded adapter makes logits that are not numbers"
        )
    return change


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    values: "np.ndarray[Any, Any]"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two matrices of one module: `a` is rank x inputs, `b` outputs x rank."""

    a: _Tensor
    b: _Tensor


def _weights(folder: Path) -> Path:
    if not folder.is_dir():
        raise AdapterError(f"{folder}: Output directory not found")
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise AdapterError(f"{folder}: No adapter weight file (*.safetensors or *.bin); expected {WEIGHTS[0]}")


def _meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what does not change the effect; PEFT's new defaults are empty values."""
    kept = {
        key: value for key, value in config.items() if key not in _INCIDENTAL and value not in (None, False, [], {})
    }
    if "base_model_name_or_path" in kept:
        kept["base_model_name_or_path"] = _base_name(str(kept["base_model_name_or_path"]))
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        if isinstance(kept.get(key), list):
            kept[key] = sorted(kept[key])
    return kept


def _base_name(written: str) -> str:
    """What a configuration says of its base, without the part of a path that depends on the machine."""
    last = Path(written).name
    return last if last.startswith(EMBEDDED) or Path(written).is_absolute() else written


def _require_base(folder: Path, config: Mapping[str, Any], base: BaseIdentity) -> None:
    name, revision = _base_name(str(config.get("base_model_name_or_path"))), config.get("revision") or ""
    if (name, revision) != (base.name, base.revision):
        raise AdapterError(
            f"{folder}: made for base {_named(name, revision)}, but the base here is {_named(base.name, base.revision)}"
        )


def _named(name: str, revision: str) -> str:
    return f"{name}@{revision}" if revision else name


def _read_weights(file: Path) -> dict[str, _Tensor]:
    tensors = _read_bin(file) if file.suffix == ".bin" else _read_safetensors(file)
    if not tensors:
        raise AdapterError(f"{file}: holds no tensors")
    return tensors


def _read_safetensors(file: Path) -> dict[str, _Tensor]:
    from safetensors import SafetensorError, deserialize

    try:
        views: list[tuple[str, dict[str, Any]]] = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
        return {name: _decode(file, name, view) for name, view in views}
    except SafetensorError as error:
        raise AdapterError(f"{file}: not a whole safetensors file: {error}") from None


def _decode(file: Path, name: str, view: Mapping[str, Any]) -> _Tensor:
    import numpy as np

    kinds = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    if (code := view["dtype"]) not in kinds:
        raise AdapterError(f"{file}: tensor {name} is {code}; expected one of {', '.join(kinds)}")
    values = np.frombuffer(view["data"], dtype=kinds[code]).reshape(view["shape"])
    if code == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return _Tensor(names[code], values)


def _read_bin(file: Path) -> dict[str, _Tensor]:
    import pickle

    import torch

    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise AdapterError(f"{file}: not a file of tensors: {str(error).splitlines()[0]}") from None
    return {
        name: _Tensor(str(tensor.dtype).removeprefix("torch."), tensor.float().numpy())
        for name, tensor in loaded.items()
    }


def _pairs(file: Path, tensors: Mapping[str, _Tensor]) -> dict[str, _Pair]:
    """The LoRA pairs by the module of the base that they adapt."""
    halves: dict[str, dict[str, _Tensor]] = {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?", name):
            halves.setdefault(found[1], {})[found[2]] = tensor
    if not halves:
        raise AdapterError(f"{file}: no LoRA tensors among {len(tensors)}: expected names like ...q_proj.lora_A.weight")
    for module, half in halves.items():
        if len(half) != 2:
            raise AdapterError(f"{file}: {module} has lora_{next(iter(half))} alone")
    return {module: _Pair(half["A"], half["B"]) for module, half in halves.items()}


def _require_finite(file: Path, tensors: Mapping[str, _Tensor]) -> None:
    import numpy as np

    for name, tensor in tensors.items():
        if not np.isfinite(tensor.values).all():
            raise AdapterError(f"{file}: {name} holds NaN or infinity")


def _require_ranks(file: Path, config: Mapping[str, Any], pairs: Mapping[str, _Pair]) -> None:
    if not isinstance(config.get("r"), int) or config["r"] < 1:
        raise AdapterError(f"{file.parent / CONFIG}: r is {config.get('r')!r}; expected a rank of at least 1")
    for module, pair in pairs.items():
        expected = _of_module(config.get("rank_pattern") or {}, module, config["r"])
        if (found := (pair.a.shape[0], pair.b.shape[-1])) != (expected, expected):
            raise AdapterError(
                f"{file}: {module} has rank {found[0]} in lora_A and {found[1]} in lora_B; the config says {expected}"
            )


def _of_module(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's rule for `rank_pattern`: the first pattern that the end of the module's name matches."""
    found = (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module))
    return next(found, default)


def _require_effect(file: Path, config: Mapping[str, Any], pairs: Mapping[str, _Pair]) -> None:
    if not isinstance(config.get("lora_alpha"), int | float) or not config["lora_alpha"] > 0:
        raise AdapterError(f"{file.parent / CONFIG}: lora_alpha is {config.get('lora_alpha')!r}; expected more than 0")
    if not any(pair.a.values.any() and pair.b.values.any() for pair in pairs.values()):
        raise AdapterError(f"{file}: the adapter does nothing: lora_B (or lora_A) is zero in every module")


def _require_targets(file: Path, config: Mapping[str, Any], found: set[str]) -> None:
    targets = config.get("target_modules")
    if isinstance(targets, list) and (missing := {str(target).rpartition(".")[2] for target in targets} - found):
        raise AdapterError(f"{file}: no tensors for target modules {', '.join(sorted(missing))}")


def _require_fit(file: Path, config: Mapping[str, Any], pairs: Mapping[str, _Pair], base_folder: Path) -> None:
    layers = _base_shapes(base_folder)
    for module, pair in pairs.items():
        layer = layers.get(f"{module}.weight")
        if layer is None:
            raise AdapterError(f"{file}: the base in {base_folder} has no layer {module}")
        expected = layer[::-1] if config.get("fan_in_fan_out") else layer
        if (found := (pair.b.shape[0], pair.a.shape[-1])) != expected:
            raise AdapterError(
                f"{file}: {module} maps {found[1]} inputs to {found[0]} outputs; "
                f"in the base of {base_folder} it maps {expected[1]} to {expected[0]}"
            )


def _base_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a saved model, read from the headers of its files."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise AdapterError(f"{folder}: no base model here (no *.safetensors). Make it with `gradeflow base`")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as model:
                names = list(model.keys())
                shapes |= {name: tuple(model.get_slice(name).get_shape()) for name in names}
        except SafetensorError as error:
            raise AdapterError(f"{file}: not a whole safetensors file: {error}") from None
    return shapes
