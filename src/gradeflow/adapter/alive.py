"""Whether a loaded adapter does anything, and what: told by what it does to the likelihood of fixed token sequences."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradeflow.errors import AdapterError

if TYPE_CHECKING:
    import torch
    from peft import PeftModel

EXACT = 0.01
ROUGH = 0.25


def default_probes(vocabulary: int, count: int = 4, length: int = 16) -> tuple[tuple[int, ...], ...]:
    """Token sequences spread over the vocabulary, the same wherever they are asked for."""
    return tuple(
        tuple((7919 * (length * row + column) + 1) % vocabulary for column in range(length)) for row in range(count)
    )


def fingerprint(model: "PeftModel", probes: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """What the active adapter does to the log-probability of each token of each probe but the first.

    It can be had from any server that tells the log-probabilities of a prompt. Two are compared by `alike`, never by
    equality or by a digest: on another machine the same numbers are added in another order.

    Raises:
        AdapterError: it changes none of them, or makes one that is no number.
    """
    adapted, plain = _both(model, probes)
    return changes(log_probabilities(adapted, probes), log_probabilities(plain, probes))


def changes(adapted: Sequence[float], plain: Sequence[float]) -> tuple[float, ...]:
    """The fingerprint of an adapter from log-probabilities with and without it, to four digits.

    Raises:
        AdapterError: all are the same, or one is no number.
    """
    found = tuple(float(f"{one - other:.4g}") for one, other in zip(adapted, plain, strict=True))
    if not all(map(math.isfinite, found)):
        raise AdapterError("the loaded adapter makes log-probabilities that are not numbers")
    if not any(found):
        raise AdapterError(
            "the loaded adapter changes no log-probability: it is not bound to the model, not active, or all zero"
        )
    return found


def tolerance(*dtypes: str) -> float:
    """Of the largest change, how much two fingerprints of one adapter may differ, by what the two ran in.

    In float32 one per cent is far above what machines differ by. Numbers of 16 bits are rounded to a 256th or a
    2048th of themselves, so that much of a small change may be lost.
    """
    return EXACT if set(dtypes) == {"float32"} else ROUGH


def alike(one: Sequence[float], other: Sequence[float], tolerance: float = EXACT) -> bool:
    """Whether two fingerprints differ by no more than `tolerance` of the largest change."""
    largest = max(map(abs, (*one, *other)), default=0.0)
    return len(one) == len(other) and all(abs(a - b) <= tolerance * largest for a, b in zip(one, other, strict=True))


def _both(model: "PeftModel", probes: Sequence[Sequence[int]]) -> "tuple[torch.Tensor, torch.Tensor]":
    """Logits with the active adapter and without: probes x positions x vocabulary."""
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
    return adapted.float(), plain.float()


def log_probabilities(logits: "torch.Tensor", probes: Sequence[Sequence[int]]) -> list[float]:
    """Of each token of the probes but the first, from logits of probes x positions x vocabulary."""
    import torch

    tokens = torch.tensor([list(probe[1:]) for probe in probes], device=logits.device)
    found: list[float] = logits[:, :-1].log_softmax(-1).gather(-1, tokens[..., None]).flatten().tolist()
    return found
