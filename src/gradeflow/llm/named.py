"""The model that the original runner's users name: by its flags, or by the environment that its .env file made.

LLM_MODEL, LLM_PROVIDER, LLM_TEMPERATURE, API_KEY and API_BASE. A provider may stand before the model's name, as LiteLLM
has it: `openai/gpt-4o-mini`. A name such as `Qwen/Qwen2.5-7B-Instruct` has none, and needs API_BASE.
"""

from collections.abc import Mapping

from pydantic import ValidationError

from gradeflow import params
from gradeflow.errors import SettingsError

PROVIDERS: Mapping[str, str] = {
    "openai": "https://api.openai.com/v1",
    "deepseek": "https://api.deepseek.com/v1",
    "openrouter": "https://openrouter.ai/api/v1",
    "siliconflow": "https://api.siliconflow.cn/v1",
    "ollama": "http://localhost:11434/v1",
    "hosted_vllm": "http://localhost:8000/v1",
}
NO_KEY = "EMPTY"


def named(known: params.Model, model: str, provider: str, environment: Mapping[str, str]) -> params.Model:
    """`known` with what is named in its place; as it is where nothing is.

    Raises:
        SettingsError: there is a name, and no telling which server has it.
    """
    model = model or environment.get("LLM_MODEL", "")
    if not model:
        return known
    prefix, _, rest = model.partition("/")
    provider = provider or environment.get("LLM_PROVIDER", "")
    if not provider and prefix in PROVIDERS and rest:
        provider = prefix
    if provider and prefix == provider:
        model = rest
    changes: dict[str, object] = {"model": model, "url": _url(known, model, provider, environment)}
    if environment.get("API_KEY", NO_KEY) != NO_KEY:
        changes["api_key_env"] = "API_KEY"
    if given := environment.get("LLM_TEMPERATURE"):
        changes["temperature"] = given
    try:
        return params.Model.model_validate(known.model_dump() | changes)
    except ValidationError as error:
        told = [f"{problem['loc'][0]}: {problem['msg']}, not {problem['input']!r}" for problem in error.errors()]
        raise SettingsError(f"the model that flags or environment name: {'; '.join(told)}") from None


def _url(known: params.Model, model: str, provider: str, environment: Mapping[str, str]) -> str:
    if base := environment.get("API_BASE"):
        return base
    if provider in PROVIDERS:
        return PROVIDERS[provider]
    if known.url != "local" and not provider:
        return known.url
    said = f"provider {provider!r} is not known" if provider else "no provider is named"
    raise SettingsError(
        f"model {model}: {said}; set API_BASE to the URL of its OpenAI-compatible server, or put one of "
        f"{', '.join(PROVIDERS)} before its name"
    )
