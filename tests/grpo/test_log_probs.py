"""The shared reading of prompts against TRL's own method, on the same trainer, model and tokens."""

from typing import Any

import pytest
import torch

from gradeflow import models
from gradeflow.grpo import log_probs, loop
from support import tiny

PROMPTS, GROUP, PROMPT_TOKENS, COMPLETION_TOKENS = 3, 4, 20, 9
ROWS = PROMPTS * GROUP


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from datasets import Dataset
    from trl import GRPOTrainer

    folder = tmp_path_factory.mktemp("base")
    settings = tiny.settings(folder, train__temperature=0.7)
    base, tokenizer = models.load(settings.base)
    model = loop.attach_adapter(base, settings.train.lora)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    return log_probs.sharing_prompts(GRPOTrainer)(
        model=model,
        reward_funcs=[loop.reward],
        args=loop.configure(settings.train, folder / "run"),
        train_dataset=Dataset.from_list([{"prompt": "a", "id": "b"}]),
        processing_class=tokenizer,
    )


def batch(order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of rollouts whose prompts and completions differ in length."""
    torch.manual_seed(1)
    prompts = torch.randint(9, 90, (PROMPTS, PROMPT_TOKENS))
    seen = torch.stack([(torch.arange(PROMPT_TOKENS) >= 3 * row).long() for row in range(PROMPTS)])
    written = torch.stack([(torch.arange(COMPLETION_TOKENS) < 9 - row % 7).long() for row in range(ROWS)])
    ids = torch.cat([prompts.repeat_interleave(GROUP, 0), torch.randint(9, 90, written.shape)], dim=1)
    mask = torch.cat([seen.repeat_interleave(GROUP, 0), written], dim=1)
    return (ids * mask)[order], mask[order]


def gradients(model: Any, value: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    value.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


@pytest.mark.parametrize("order", [torch.arange(ROWS), torch.randperm(ROWS)], ids=["grouped", "shuffled"])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_probabilities_entropies_and_gradients_are_those_of_trl(
    trainer: Any, order: torch.Tensor, batch_size: int | None
) -> None:
    ids, mask = batch(order)
    theirs = super(type(trainer), trainer)._get_per_token_logps_and_entropies
    ours = trainer._get_per_token_logps_and_entropies
    asked = (trainer.model, ids, mask, COMPLETION_TOKENS, batch_size, True)
    expected, expected_entropy, _ = theirs(*asked)
    found, entropy, _ = ours(*asked)
    written = mask[:, -COMPLETION_TOKENS:].bool()
    assert found.shape == (ROWS, COMPLETION_TOKENS)
    torch.testing.assert_close(found[written], expected[written], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy[written], expected_entropy[written], rtol=1e-4, atol=1e-5)
    weights = torch.randn(found.shape) * written
    torch.testing.assert_close(
        gradients(trainer.model, (found * weights).sum()),
        gradients(trainer.model, (expected * weights).sum()),
        rtol=1e-3,
        atol=1e-4,
    )


def test_a_group_reads_its_prompt_once(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    embed = trainer.model.get_input_embeddings()
    hook = embed.register_forward_hook(lambda _module, inputs, _output: read.append(inputs[0].numel()))
    try:
        ids, mask = batch(torch.arange(ROWS))
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, COMPLETION_TOKENS)
    finally:
        hook.remove()
    assert read == [PROMPTS * (PROMPT_TOKENS - 1), ROWS * COMPLETION_TOKENS]


def test_what_cannot_be_shared_is_left_to_trl(trainer: Any) -> None:
    ids, mask = batch(torch.arange(ROWS))
    trainer.model.train()
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        assert not log_probs.can_share(trainer.model)
        found, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, COMPLETION_TOKENS)
    finally:
        trainer.model.gradient_checkpointing_disable()
    assert log_probs.can_share(trainer.model)
    expected, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, COMPLETION_TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
