"""Whether a loaded adapter does anything, and what: told by the logits of a few fixed token sequences."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradeflow.errors import AdapterError

if TYPE_CHECKING:
    import torch
    from peft import PeftModel

PLACES = 4  # logits of each probe that a fingerprint has


def default_probes(vocabulary: int, count: int = 4, length: int = 16) -> tuple[tuple[int, ...], ...]:
    """Token sequences spread over the vocabulary, the same wherever they are asked for."""
    return tuple(
        tuple((7919 * (length * row + column) + 1) % vocabulary for column in range(length)) for row in range(count)
    )


def logit_change(model: "PeftModel", probes: Sequence[Sequence[int]]) -> float:
    """The largest difference that the active adapter makes in a logit; probes are of one length."""
    return float(_changes(model, probes).abs().max())


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


def fingerprint(model: "PeftModel", probes: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """The changes of a few fixed logits at the end of each probe, to four digits.

    Two fingerprints are compared by `alike`, never by equality or by a digest: on another machine the same numbers are
    added in another order, and whatever they are rounded to, some lie at an edge.
    """
    ends = _changes(model, probes)[:, -1]
    step = max(1, ends.shape[-1] // PLACES)
    return tuple(float(f"{value:.4g}") for value in ends[:, ::step][:, :PLACES].flatten().tolist())


def alike(one: Sequence[float], other: Sequence[float], tolerance: float = 0.01) -> bool:
    """Whether two fingerprints differ by no more than `tolerance` of the largest change.

    In float32 one per cent is far above what machines differ by. In bfloat16 it holds only of an adapter that moves
    the logits by much more than their own rounding, which is a 256th of them.
    """
    largest = max(map(abs, (*one, *other)), default=0.0)
    return len(one) == len(other) and all(abs(a - b) <= tolerance * largest for a, b in zip(one, other, strict=True))


def _changes(model: "PeftModel", probes: Sequence[Sequence[int]]) -> "torch.Tensor":
    """What the active adapter adds to every logit: probes x positions x vocabulary."""
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
    changes: torch.Tensor = adapted.float() - plain.float()
    return changes
