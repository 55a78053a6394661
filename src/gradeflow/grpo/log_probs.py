"""Log-probabilities of completions for the GRPO loss, with each prompt read once for its whole group.

TRL reads prompt and completion together for every rollout, so that a group of G reads its prompt G times. Here the
prompt's keys and values are computed once and shared; gradients go through them as they would through the copies.
Letters: B rollouts of a batch, P tokens of the longest prompt, T tokens of the longest completion.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def can_share(model: Any) -> bool:
    """Whether the model keeps plain keys and values for each token; gradient checkpointing keeps none."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if model.training and getattr(model, "is_gradient_checkpointing", False):
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def log_probs(
    model: Any, input_ids: "torch.Tensor", attention_mask: "torch.Tensor", length: int
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Log-probability and entropy of the last `length` tokens, (B, T) each, 0 where the mask is.

    `input_ids` and `attention_mask` (B, P + T) have prompts padded on the left and completions on the right. The model
    has TRL's fused head, which divides the logits by the temperature.
    """
    import torch
    from transformers.cache_utils import DynamicCache

    prompts = input_ids[:, :-length].masked_fill(attention_mask[:, :-length] == 0, -1)
    prompts, group = prompts.unique(dim=0, return_inverse=True)
    seen = (prompts >= 0).long()
    completions, written = input_ids[:, -length:], attention_mask[:, -length:]
    # The last token of a prompt has another successor in each completion, so it is read with these.
    kept = DynamicCache(config=model.config)
    model(
        input_ids=prompts[:, :-1].clamp(min=0),
        attention_mask=seen[:, :-1],
        position_ids=_positions(seen[:, :-1]),
        past_key_values=kept,
        use_cache=True,
        logits_to_keep=1,
    )
    kept.batch_select_indices(group)
    mask = torch.cat([seen[group], written[:, :-1]], dim=1)
    found = model(
        input_ids=torch.cat([prompts[group, -1:], completions[:, :-1]], dim=1),
        attention_mask=mask,
        position_ids=_positions(mask)[:, -length:],
        past_key_values=kept,
        shift_labels=completions.masked_fill(written == 0, -100),
        fused_lm_head=True,
    )
    return found.log_probs, found.entropy


def _positions(mask: "torch.Tensor") -> "torch.Tensor":
    return (mask.cumsum(1) - 1).clamp(min=0)
