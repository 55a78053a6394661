"""Batched decoding with a causal LM of this process.

Against `model.generate`: a prompt is read once however many completions it gets, keys and values go into a cache of the
final size without a copy for every token, rows that have ended are dropped, and a LoRA layer is three multiplications
and nothing else. Letters: P prompts, N completions, T tokens, V words.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

computing = threading.RLock()
"""Held by the thread whose model computes: policy and executor in one process take turns, rather than cores."""

Choose = Callable[["torch.Tensor", "torch.Tensor", int], "torch.Tensor"]
"""The next token (n,) from logits (n, V), the rows (n,) that they belong to among N, and the step from 0."""

Ended = Callable[[int, list[int]], None]
"""Is given a row, of N, and its tokens as soon as it has ended, while the others are still being written."""


def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rooms: Sequence[int],
    ends: Sequence[int],
    choose: Choose,
    copies: Sequence[int] | None = None,
    ended: Ended | None = None,
) -> list[list[int]]:
    """Completions as token ids, the one that ends it included: `copies` of each prompt, in order, N in all.

    `rooms` (N) are the most tokens of each; `ends` the ids that end a completion.
    """
    import torch

    device, width, longest = model.device, max(map(len, prompts)), max(rooms)
    padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    seen = [[0] * (width - len(prompt)) + [1] * (len(prompt) + longest) for prompt in prompts]
    tokens, mask = torch.tensor(padded, device=device), torch.tensor(seen, device=device)
    positions = (mask[:, :width].cumsum(1) - 1).clamp(min=0)
    room, stops = torch.tensor(rooms, device=device), torch.tensor(ends, device=device)
    kept = _cache(model.config, width + longest)

    def read(step: int) -> "torch.Tensor":
        logits: torch.Tensor = model(
            input_ids=tokens,
            attention_mask=mask[:, : width + step],
            position_ids=positions,
            past_key_values=kept,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits

    with computing, torch.inference_mode(), _plain_lora(model):
        logits = read(0)
        if copies is not None:
            each = torch.arange(len(prompts), device=device).repeat_interleave(torch.tensor(copies, device=device))
            kept.batch_select_indices(each)
            logits, mask, positions = logits[each], mask[each], positions[each]
        rows = torch.arange(len(rooms), device=device)
        running = torch.ones_like(rows, dtype=torch.bool)
        written = torch.zeros(len(rooms), longest, dtype=torch.long, device=device)
        lengths = torch.zeros_like(rows)
        for step in range(longest):
            chosen = choose(logits, rows, step)
            written[rows, step] = chosen
            lengths[rows] += running
            before, running = running, running & ~torch.isin(chosen, stops) & (room[rows] > step + 1)
            left = int(running.sum())
            if ended is not None and left < int(before.sum()):
                for row in rows[before & ~running].tolist():
                    ended(row, written[row, : step + 1].tolist())
            if not left:
                break
            tokens, positions = chosen[:, None], positions[:, -1:] + 1
            if left <= len(rows) * 3 // 4:
                still = running.nonzero()[:, 0]
                kept.batch_select_indices(still)
                rows, mask, running = rows[still], mask[still], running[still]
                tokens, positions = tokens[still], positions[still]
            logits = read(step + 1)
    return [row[:length] for row, length in zip(written.tolist(), lengths.tolist(), strict=True)]


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a completion, by the model's generation settings, else the tokenizer's."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    return list(ends) if isinstance(ends, list) else [ends]


def greedy(logits: "torch.Tensor", _rows: "torch.Tensor", _step: int) -> "torch.Tensor":
    return logits.argmax(-1)


def sampler(temperatures: "torch.Tensor", draws: "torch.Tensor", top_p: float = 1.0, top_k: int = 0) -> Choose:
    """Draw from the likeliest words: the `top_k` first (0: all), then as many as `top_p` needs.

    `temperatures` (N), where 0 is greedy; `draws` (N, T) are uniform in [0, 1), one for each token.
    """
    import torch

    def choose(logits: "torch.Tensor", rows: "torch.Tensor", step: int) -> "torch.Tensor":
        warm = temperatures[rows, None]
        shares = (logits.float() / warm.clamp(min=1e-4)).softmax(-1)
        order = None
        if top_k or top_p < 1:
            shares, order = shares.sort(-1, descending=True)
        if order is not None and top_k:
            shares, order = shares[:, :top_k], order[:, :top_k]
            shares = shares / shares.sum(-1, keepdim=True)
        if top_p < 1:
            shares = shares.where(shares.cumsum(-1) - shares < top_p, 0.0)
        reached = shares.cumsum(-1)
        place = torch.searchsorted(reached, draws[rows, step, None] * reached[:, -1:], right=True)
        place = place.clamp(max=shares.shape[-1] - 1)
        sampled = place if order is None else order.gather(-1, place)
        return sampled.where(warm > 0, logits.argmax(-1, keepdim=True))[:, 0]

    return choose


@contextmanager
def _plain_lora(model: Any) -> Iterator[None]:
    """PEFT looks up adapters, types and variants at each call of a layer, which takes longer than a small one computes.

    Nothing is merged: base and adapter are multiplied apart, as they are now.
    """
    plain = {layer: forward for layer in model.modules() if (forward := _plain_forward(layer)) is not None}
    for layer, forward in plain.items():
        layer.forward = forward
    try:
        yield
    finally:
        for layer in plain:
            del layer.forward


def _plain_forward(layer: Any) -> "Callable[[torch.Tensor], torch.Tensor] | None":
    """What an unmerged LoRA layer with one active adapter computes; None for what is anything else, or trains."""
    import torch

    if not _is_lora(layer) or layer.training or layer.disable_adapters or layer.merged or layer.lora_variant:
        return None
    base, active = layer.base_layer, [name for name in layer.active_adapters if name in layer.lora_A]
    if type(base) is not torch.nn.Linear or len(active) != 1 or "forward" in {**vars(layer), **vars(base)}:
        return None
    down, up = layer.lora_A[active[0]].weight, layer.lora_B[active[0]].weight
    if layer.lora_bias[active[0]] or not base.weight.dtype == down.dtype == up.dtype:
        return None
    scaled, linear = (up * layer.scaling[active[0]]).t(), torch.nn.functional.linear

    def forward(x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        return torch.addmm(linear(flat, base.weight, base.bias), linear(flat, down), scaled).view(*x.shape[:-1], -1)

    return forward


def _is_lora(layer: Any) -> bool:
    """Without PEFT's import where there is no adapter, as in an executor."""
    return type(layer).__module__ == "peft.tuners.lora.layer" and type(layer).__name__ == "Linear"


def _cache(config: Any, room: int) -> Any:
    from transformers.cache_utils import DynamicCache, DynamicLayer

    kept = DynamicCache(config=config)
    kept.layers = [_roomy_layer()(room) if type(layer) is DynamicLayer else layer for layer in kept.layers]
    return kept


@cache
def _roomy_layer() -> Any:
    from transformers.cache_utils import DynamicLayer

    class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
        """Keys and values are views of buffers made once, so that a token is written without a copy."""

        def __init__(self, room: int) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._room = room
            self._length = 0

        def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
            rows, heads, length, width = key_states.shape
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self._keys = key_states.new_empty(rows, heads, self._room, width)
                self._values = value_states.new_empty(rows, heads, self._room, value_states.shape[-1])
            start, self._length = self._length, self._length + length
            self._keys[:, :, start : self._length] = key_states
            self._values[:, :, start : self._length] = value_states
            self.keys, self.values = self._keys[:, :, : self._length], self._values[:, :, : self._length]
            return self.keys, self.values

        def batch_select_indices(self, indices: Any) -> None:
            self._keys, self._values = self._keys[indices], self._values[indices]
            self.keys, self.values = self._keys[:, :, : self._length], self._values[:, :, : self._length]

    return RoomyLayer
