"""Let a fresh model start with induction heads.

Everything that the embedded base does rests on copying from its context: numbers, names, places. The circuit for it, a
head that looks at the previous token and one that looks for what followed the same token before (Olsson et al.,
In-context Learning and Induction Heads, 2022), forms late and suddenly, and minutes on a CPU are too short to wait for
it. So the two layers are set up by hand; all other blocks start as zero and learn around them. A fresh model with a
vocabulary of 1,000 then copies most random tokens right.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2ForCausalLM

HEAD = 32
"""Size of an attention head: the smallest that vLLM's CPU kernels take."""
ROPE_THETA = 1e6
FAST = 6
"""Rotary pairs that turn fast enough to tell neighbours apart; the others hardly turn and carry content."""
SLOW = [*range(FAST, HEAD // 2), *range(HEAD // 2 + FAST, HEAD)]
DISTANCES = (1, 2, 3)
COPYING_HEADS = 2


def start_with_induction(model: "Qwen2ForCausalLM", seed: int) -> None:
    """Set up layers 0 and 1 of a model with heads of size HEAD and rotary base ROPE_THETA."""
    import torch

    random = torch.Generator().manual_seed(seed)
    width = model.config.hidden_size
    read = _orthogonal(width, random)
    written = _orthogonal(width, random)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        look_back(model)
        first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
        first.v_proj.weight[:HEAD] = read[:, :HEAD].T
        first.o_proj.weight[:, :HEAD] = 0.1 * written[:, :HEAD]
        for head in range(min(COPYING_HEADS, width // HEAD - 1)):
            own, values = slice(head * HEAD, (head + 1) * HEAD), read[:, HEAD * (head + 1) : HEAD * (head + 2)]
            for projection, content in ((second.q_proj, read), (second.k_proj, written)):
                projection.weight[own] = 0
                projection.weight[own][SLOW] = 2.5 * content[:, : len(SLOW)].T
            second.v_proj.weight[own] = values.T
            second.o_proj.weight[:, own] = values


def look_back(model: "Qwen2ForCausalLM") -> None:
    """Let the first heads of layer 0 attend one, two and three tokens back.

    With rotary positions constant queries and keys do it: their product depends on the distance alone, and a query that
    is turned back by `distance` makes it largest there.
    """
    import torch

    attention = model.model.layers[0].self_attn
    strength = torch.tensor([6.0] * FAST + [0.0] * (HEAD // 2 - FAST))
    frequency = ROPE_THETA ** (-torch.arange(0, HEAD, 2) / HEAD)
    for head, distance in zip(range(model.config.num_attention_heads), DISTANCES, strict=False):
        own = slice(head * HEAD, (head + 1) * HEAD)
        angle = distance * frequency
        attention.q_proj.weight[own] *= 0.3
        attention.k_proj.weight[own] *= 0.3
        attention.k_proj.bias[own] = torch.cat([strength, torch.zeros_like(strength)])
        attention.q_proj.bias[own] = torch.cat([strength * angle.cos(), -strength * angle.sin()])


def _orthogonal(size: int, random: "torch.Generator") -> "torch.Tensor":
    import torch

    basis: torch.Tensor = torch.linalg.qr(torch.randn(size, size, generator=random))[0]
    return basis
