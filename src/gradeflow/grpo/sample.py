"""Greedy completions of a policy, for validation and for measuring: what it writes when nothing is left to chance."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradeflow import params
from gradeflow.types import Example
from gradeflow.workflow.program import policy_messages

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def complete(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    *,
    max_tokens: int,
    batch_size: int = 64,
    temperature: float = 0.0,
) -> list[str]:
    """One completion per rendered prompt, in order; temperature 0 is greedy, otherwise the torch seed decides."""
    import torch

    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    texts = [""] * len(prompts)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )
    training = model.training
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            chunk = order[start : start + batch_size]
            batch = tokenizer(
                [prompts[index] for index in chunk],
                return_tensors="pt",
                padding=True,
                add_special_tokens=False,
            ).to(model.device)
            generate: Any = model.generate
            written = generate(**batch, max_new_tokens=max_tokens, pad_token_id=tokenizer.pad_token_id, **sampling)
            fresh = written[:, batch["input_ids"].shape[1] :]
            for index, text in zip(chunk, tokenizer.batch_decode(fresh, skip_special_tokens=True), strict=True):
                texts[index] = text
    model.train(training)
    return texts


def policy_prompts(
    tokenizer: "PreTrainedTokenizerBase", examples: Sequence[Example], workflow: params.Workflow
) -> list[str]:
    chats: list[Any] = [policy_messages(example, workflow) for example in examples]
    return [str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in chats]
