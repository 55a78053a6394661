"""Settings of training that are known to end badly, said before the minutes are spent. Nothing is refused."""

from collections.abc import Iterator

from gradeflow import params

SMALL_BATCH = 16
"""Rollouts of a step. Practitioners' floor for stable learning is at 64; single-GPU profiles work with 32."""

SHORT = 64
"""Tokens that few workflows fit into."""

RATES = (1e-6, 1e-3)
"""Learning rates that LoRA has been seen to learn with, by reinforcement, on models of 0.5B and more."""

EMBEDDED_RATES = (1e-4, 2e-2)
"""The same for the embedded base, which is a thousand times smaller."""


def cautions(settings: params.Params) -> list[str]:
    """A sentence for each, which begins with the setting to change."""
    return [*_groups(settings.train), *_rates(settings), *_rollouts(settings.train)]


def _groups(train: params.Train) -> Iterator[str]:
    if train.group_size < 4:
        scaled = (
            ", where each advantage is 1 or -1 however small the difference" if train.scale_rewards == "group" else ""
        )
        yield (
            f"train.group_size is {train.group_size}{scaled}: so few rollouts have destroyed the output format of "
            "policies within 40 updates; use 4 or more, better 8"
        )
    if (rollouts := train.prompts_per_step * train.group_size) < SMALL_BATCH:
        yield (
            f"train.prompts_per_step times train.group_size is {rollouts}: updates from fewer than {SMALL_BATCH} "
            "rollouts are mostly noise"
        )


def _rates(settings: params.Params) -> Iterator[str]:
    train = settings.train
    low, high = EMBEDDED_RATES if settings.base.model == "embedded" else RATES
    if train.learning_rate < low:
        yield f"train.learning_rate is {train.learning_rate:g}: below {low:g}, adapters have not been seen to learn"
    if train.learning_rate > high:
        yield f"train.learning_rate is {train.learning_rate:g}: above {high:g}, adapters have been seen to collapse"
    if train.kl_coef == 0 and low * 100 < train.learning_rate:
        yield (
            f"train.kl_coef is 0 and train.learning_rate {train.learning_rate:g}: nothing holds the policy near the "
            f"base; lower the rate to {low * 100:g}, or use a train.kl_coef of 0.001 or more"
        )
    if train.warmup_steps >= train.max_steps > 1:
        yield (
            f"train.warmup_steps is {train.warmup_steps}, of {train.max_steps} steps: the learning rate never gets to "
            "what train.learning_rate says"
        )


def _rollouts(train: params.Train) -> Iterator[str]:
    ends = {"temperature": train.temperature}
    if train.temperature_steps:
        ends["temperature_end"] = train.temperature_end
    for name, temperature in ends.items():
        if temperature < 0.3:
            yield f"train.{name} is {temperature:g}: the rollouts of a group are much the same, and teach nothing"
    if (behind := train.ppo_epochs * (train.staleness + 1)) > 8:
        yield (
            f"train.staleness is {train.staleness} and train.ppo_epochs {train.ppo_epochs}: a rollout is learnt from "
            f"up to {behind} updates after it was written, and much of it is clipped away"
        )
    if train.max_completion_tokens < SHORT:
        yield (
            f"train.max_completion_tokens is {train.max_completion_tokens}: most workflows are cut off before their "
            "end, and score 0"
        )
