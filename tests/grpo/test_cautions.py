"""Settings that are known to end badly are named, and those that the project ships are not among them."""

from pathlib import Path

import pytest

from gradeflow import params
from gradeflow.grpo.cautions import cautions

ROOT = Path(__file__).parents[2]
PROFILES = sorted((ROOT / "profiles").glob("*.yaml"))
LARGE = {"base.model": "Qwen/Qwen2.5-7B-Instruct", "base.revision": "a", "train.learning_rate": "1e-5"}


def found(**changes: str) -> list[str]:
    return cautions(params.load(ROOT / "params.yaml", {f"train.{name}": value for name, value in changes.items()}))


def test_the_settings_that_the_project_ships_are_not_among_them() -> None:
    assert found() == []


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_nor_are_those_of_a_profile(profile: Path) -> None:
    import yaml

    train = yaml.safe_load(profile.read_text())["train"]
    plain = {f"train.{name}": str(value) for name, value in train.items() if isinstance(value, int | float | str)}
    assert cautions(params.load(ROOT / "params.yaml", LARGE | plain)) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"group_size": "2"}, "train.group_size is 2"),
        ({"group_size": "3"}, "train.group_size is 3"),
        ({"prompts_per_step": "2"}, "train.prompts_per_step times train.group_size is 12"),
        ({"learning_rate": "5e-7"}, "train.learning_rate is 5e-07: below"),
        ({"learning_rate": "0.1"}, "train.learning_rate is 0.1: above"),
        ({"kl_coef": "0", "learning_rate": "2e-2"}, "train.kl_coef is 0"),
        ({"warmup_steps": "45"}, "train.warmup_steps is 45, of 45 steps"),
        ({"temperature": "0.1"}, "train.temperature is 0.1"),
        ({"temperature_end": "0.2", "temperature_steps": "10"}, "train.temperature_end is 0.2"),
        ({"staleness": "4", "ppo_epochs": "2"}, "train.staleness is 4 and train.ppo_epochs 2"),
        ({"max_completion_tokens": "32"}, "train.max_completion_tokens is 32"),
    ],
)
def test_what_is_known_to_end_badly_is_named(changes: dict[str, str], named: str) -> None:
    (said,) = found(**changes)
    assert said.startswith(named)


@pytest.mark.parametrize(
    "changes",
    [
        {"group_size": "4"},
        {"kl_coef": "0"},
        {"temperature_end": "0.2"},  # without a schedule it is never reached
        {"staleness": "4"},
        {"ppo_epochs": "2"},
    ],
)
def test_what_is_only_unusual_is_not(changes: dict[str, str]) -> None:
    assert found(**changes) == []


def test_a_learning_rate_is_judged_by_the_size_of_the_base() -> None:
    large = params.load(ROOT / "params.yaml", LARGE)
    assert cautions(large) == []
    (said,) = cautions(params.load(ROOT / "params.yaml", LARGE | {"train.learning_rate": "5e-3"}))
    assert said.startswith("train.learning_rate is 0.005: above")
    (said,) = cautions(params.load(ROOT / "params.yaml", LARGE | {"train.learning_rate": "3e-4", "train.kl_coef": "0"}))
    assert said.startswith("train.kl_coef is 0 and train.learning_rate 0.0003")


def test_two_rollouts_are_told_what_their_scaling_does() -> None:
    (scaled,) = found(group_size="2")
    (plain,) = found(group_size="2", scale_rewards="none")
    assert "1 or -1" in scaled
    assert "1 or -1" not in plain
