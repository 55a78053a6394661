"""The shared reading of prompts against TRL's own method, on the same trainer, model and tokens."""

from typing import Any

import pytest
import torch

from gradeflow import models
from gradeflow.grpo import loop, trainer
from gradeflow.grpo.log_probs import can_share
from support import tiny

PROMPTS, GROUP, PROMPT_TOKENS, COMPLETION_TOKENS = 3, 4, 20, 9
ROWS = PROMPTS * GROUP


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer of ours, measuring at a temperature of 0.7."""
    folder = tmp_path_factory.mktemp("base")
    settings = tiny.settings(folder, train__temperature=0.7)
    base, tokenizer = models.load(settings.base)
    model = loop.attach_adapter(base, settings.train.lora)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    nothing: Any = None
    found = trainer.make(model, tokenizer, nothing, settings.train, folder / "run", nothing, nothing)
    found._temperatures = [0.7] * ROWS
    return found


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
def test_probabilities_entropies_and_gradients_are_those_of_trl(made: Any, order: torch.Tensor) -> None:
    ids, mask = batch(order)
    theirs = super(type(made), made)._get_per_token_logps_and_entropies
    ours = made._get_per_token_logps_and_entropies
    asked = (made.model, ids, mask, COMPLETION_TOKENS)
    expected, expected_entropy, _ = theirs(*asked, compute_entropy=True)
    found, entropy, _ = ours(*asked)
    written = mask[:, -COMPLETION_TOKENS:].bool()
    assert found.shape == (ROWS, COMPLETION_TOKENS)
    torch.testing.assert_close(found[written], expected[written], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy[written], expected_entropy[written], rtol=1e-4, atol=1e-5)
    weights = torch.randn(found.shape) * written
    torch.testing.assert_close(
        gradients(made.model, (found * weights).sum()),
        gradients(made.model, (expected * weights).sum()),
        rtol=1e-3,
        atol=1e-4,
    )


def test_a_group_reads_its_prompt_once(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    embed = made.model.get_input_embeddings()
    hook = embed.register_forward_hook(lambda _module, inputs, _output: read.append(inputs[0].numel()))
    try:
        ids, mask = batch(torch.arange(ROWS))
        made._get_per_token_logps_and_entropies(made.model, ids, mask, COMPLETION_TOKENS)
    finally:
        hook.remove()
    assert read == [PROMPTS * (PROMPT_TOKENS - 1), ROWS * COMPLETION_TOKENS]


def test_what_cannot_be_shared_is_left_to_trl(made: Any) -> None:
    ids, mask = batch(torch.arange(ROWS))
    made.model.train()
    made.model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        assert not can_share(made.model)
        found, _, _ = made._get_per_token_logps_and_entropies(made.model, ids, mask, COMPLETION_TOKENS)
    finally:
        made.model.gradient_checkpointing_disable()
    assert can_share(made.model)
    expected, _, _ = made._get_per_token_logps_and_entropies(made.model, ids, mask, COMPLETION_TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
