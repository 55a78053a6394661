"""What a policy writes: completions in training, and greedy ones, in which nothing is left to chance, to measure it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradeflow import params
from gradeflow.decode import Choose, decode, end_ids, greedy, sampler
from gradeflow.types import Example
from gradeflow.workflow.program import policy_messages

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    ends: Sequence[int],
    *,
    max_tokens: int,
    copies: Sequence[int] | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> list[list[int]]:
    """Completions of prompts, as token ids with the one that ends it; by torch's own seed, temperature 0 is greedy."""
    import torch

    number = len(prompts) if copies is None else sum(copies)
    choose: Choose = greedy
    if temperature:
        draws = torch.rand(number, max_tokens).to(model.device)
        choose = sampler(torch.full((number,), temperature, device=model.device), draws, top_p, top_k)
    training = model.training
    model.eval()
    try:
        return decode(model, prompts, [max_tokens] * number, ends, choose, copies)
    finally:
        model.train(training)


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
    ids: list[list[int]] = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    order = sorted(range(len(prompts)), key=lambda index: len(ids[index]))
    texts = [""] * len(prompts)
    for start in range(0, len(order), batch_size):
        chunk = order[start : start + batch_size]
        written = sample(
            model,
            [ids[index] for index in chunk],
            end_ids(model, tokenizer),
            max_tokens=max_tokens,
            temperature=temperature,
        )
        for index, text in zip(chunk, tokenizer.batch_decode(written, skip_special_tokens=True), strict=True):
            texts[index] = text
    return texts


def policy_prompts(
    tokenizer: "PreTrainedTokenizerBase", examples: Sequence[Example], workflow: params.Workflow
) -> list[str]:
    chats: list[Any] = [policy_messages(example, workflow) for example in examples]
    return [str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in chats]
