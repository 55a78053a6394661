"""An adapter's files and its base's: found, read, digested and stamped; what they mean is judged in `checks`."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradeflow import digest as digests
from gradeflow.errors import AdapterError

if TYPE_CHECKING:
    import numpy as np

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
EMBEDDED = "gradeflow-base-"

# What PEFT writes beside the meaning of an adapter, and what only its training needed.
_INCIDENTAL = {"auto_mapping", "inference_mode", "init_lora_weights", "peft_version", "runtime_config"}
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """Which model an adapter belongs to; `revision` is empty for an embedded base, whose name says it all."""

    name: str
    revision: str
    digest: str


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    values: "np.ndarray[Any, Any]"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


def digest(folder: Path) -> str:
    """Digest of the weights' bytes and of what the configuration means, whatever its paths and versions."""
    weights = find_weights(folder, allow_bin=True)
    return digests.of_json({"weights": digests.of_file(weights), "config": _meaning(read_config(folder))})


def read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise AdapterError(f"{folder}: Output directory not found")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterError(f"{folder}: {CONFIG} not found. Save the adapter with PEFT's save_pretrained") from None
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


def find_weights(folder: Path, *, allow_bin: bool) -> Path:
    """The file with the adapter's tensors: as PEFT does, safetensors before .bin.

    Raises:
        AdapterError: there is none, or only a .bin that is not to be read.
    """
    if not folder.is_dir():
        raise AdapterError(f"{folder}: Output directory not found")
    safe, pickled = (folder / name for name in WEIGHTS)
    if safe.is_file() or (allow_bin and pickled.is_file()):
        return safe if safe.is_file() else pickled
    if pickled.is_file():
        raise AdapterError(
            f"{pickled}: a pickle, and only safetensors are read. Save it again with safe_serialization=True, or, if "
            "you trust it, set evaluate.allow_bin to true: then its tensors are read, and nothing in it is run"
        )
    said = f"{folder}: No adapter weight file (*.safetensors or *.bin); expected {WEIGHTS[0]}"
    raise AdapterError(f"{said}{_what_else(folder)}")


def _what_else(folder: Path) -> str:
    if (folder / "config.json").is_file():
        return ". This folder is a whole model: give it as base.model, or give the adapter before it was merged"
    if checkpoints := sorted(path.parent.name for path in folder.glob(f"checkpoint-*/{CONFIG}")):
        return f". There are adapters below: {', '.join(checkpoints)}; name one of them"
    return ""


def base_name(written: str) -> str:
    """What a configuration says of its base, without the part of a path that depends on the machine."""
    last = Path(written).name
    return last if last.startswith(EMBEDDED) or Path(written).is_absolute() else written


def scale_of(config: Mapping[str, Any], alpha: float, rank: int) -> float:
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def read_weights(file: Path) -> dict[str, Tensor]:
    tensors = _read_bin(file) if file.suffix == ".bin" else _read_safetensors(file)
    if not tensors:
        raise AdapterError(f"{file}: holds no tensors")
    return tensors


def base_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a saved model, read from the headers of its files.

    Raises:
        AdapterError: there are no safetensors, or they are not whole.
    """
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
            raise _not_whole(file, error) from None
    return shapes


def _meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what does not change the effect; PEFT's new defaults are empty values."""
    kept = {
        key: value for key, value in config.items() if key not in _INCIDENTAL and value not in (None, False, [], {})
    }
    if "base_model_name_or_path" in kept:
        kept["base_model_name_or_path"] = base_name(str(kept["base_model_name_or_path"]))
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        if isinstance(kept.get(key), list):
            kept[key] = sorted(kept[key])
    return kept


def _not_whole(file: Path, error: Exception) -> AdapterError:
    with file.open("rb") as opened:
        pointer = opened.read(len(_POINTER)) == _POINTER
    if pointer:
        return AdapterError(f"{file}: a pointer of Git LFS in place of the file; fetch it with: git lfs pull")
    return AdapterError(f"{file}: not a whole safetensors file: {error}. Copy or save it again")


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, deserialize

    try:
        views: list[tuple[str, dict[str, Any]]] = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise _not_whole(file, error) from None
    return {name: _decode(file, name, view) for name, view in views}


def _decode(file: Path, name: str, view: Mapping[str, Any]) -> Tensor:
    import numpy as np

    kinds = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    if (code := view["dtype"]) not in kinds:
        raise _no_float(file, name, code)
    values = np.frombuffer(view["data"], dtype=kinds[code]).reshape(view["shape"])
    if code == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return Tensor(_DTYPES[code], values)


def _read_bin(file: Path) -> dict[str, Tensor]:
    import pickle

    import torch

    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        said = str(error).partition("\n")[0]
        raise AdapterError(f"{file}: not a file of tensors: {said}. Save it as safetensors") from None
    if not isinstance(loaded, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
        raise AdapterError(f"{file}: not a file of tensors: it holds other things too. Save it as safetensors")
    tensors = {}
    for name, tensor in loaded.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES.values():
            raise _no_float(file, name, dtype)
        tensors[name] = Tensor(dtype, tensor.float().numpy())
    return tensors


def _no_float(file: Path, name: str, dtype: str) -> AdapterError:
    expected = ", ".join(_DTYPES.values())
    return AdapterError(f"{file}: tensor {name} is {dtype}; expected one of {expected}. Save it in one of these")
