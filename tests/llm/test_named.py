"""The model that flags and environment name, as the original runner's users are used to."""

import pytest

from gradeflow import params
from gradeflow.errors import SettingsError
from gradeflow.llm.named import named

LOCAL = params.Model(url="local")
SERVED = params.Model(url="http://127.0.0.1:8000/v1", model="small", retries=1)


def test_without_a_name_the_settings_hold() -> None:
    assert named(SERVED, "", "", {"API_KEY": "x", "API_BASE": "http://other/v1"}) == SERVED


@pytest.mark.parametrize(
    ("model", "provider", "environment", "url", "name"),
    [
        ("openai/gpt-4o-mini", "", {}, "https://api.openai.com/v1", "gpt-4o-mini"),
        ("gpt-4o-mini", "openai", {}, "https://api.openai.com/v1", "gpt-4o-mini"),
        ("", "", {"LLM_MODEL": "deepseek/deepseek-chat"}, "https://api.deepseek.com/v1", "deepseek-chat"),
        ("Qwen/Qwen2.5-7B", "", {"API_BASE": "http://host/v1"}, "http://host/v1", "Qwen/Qwen2.5-7B"),
        ("openai/Qwen/Qwen2.5-7B", "", {"API_BASE": "http://host/v1"}, "http://host/v1", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen2.5-7B", "mine", {"API_BASE": "http://host/v1"}, "http://host/v1", "Qwen/Qwen2.5-7B"),
    ],
)
def test_a_name_says_whom_to_ask(model: str, provider: str, environment: dict[str, str], url: str, name: str) -> None:
    found = named(LOCAL, model, provider, environment)
    assert (found.url, found.model, found.api_key_env) == (url, name, "")


def test_a_name_alone_is_one_of_the_server_in_the_settings() -> None:
    found = named(SERVED, "large", "", {})
    assert (found.url, found.model, found.retries) == (SERVED.url, "large", 1)


def test_key_and_temperature_come_from_the_environment() -> None:
    found = named(SERVED, "large", "", {"API_KEY": "sk-x", "LLM_TEMPERATURE": "0.7"})
    assert (found.api_key_env, found.temperature) == ("API_KEY", 0.7)
    assert named(SERVED, "large", "", {"API_KEY": "EMPTY"}).api_key_env == ""


@pytest.mark.parametrize(("model", "provider"), [("gpt-4o-mini", ""), ("gpt-4o-mini", "nobody")])
def test_a_model_that_no_known_server_has_is_refused(model: str, provider: str) -> None:
    with pytest.raises(SettingsError, match="set API_BASE"):
        named(LOCAL, model, provider, {})
