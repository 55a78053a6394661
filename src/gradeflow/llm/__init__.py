"""Chat with a model: at an OpenAI-compatible URL, in this process, or from a script.

A client answers or raises ProviderError; what it returns is never a stand-in for an answer that did not come.
"""

from collections.abc import Mapping
from pathlib import Path

from gradeflow import params
from gradeflow.errors import SettingsError
from gradeflow.llm.client import ChatClient, Reply, Usage
from gradeflow.llm.local import LocalClient
from gradeflow.llm.openai import OpenAIClient
from gradeflow.llm.scripted import ScriptedClient

__all__ = ["LOCAL", "ChatClient", "Clients", "Reply", "ScriptedClient", "Usage", "connect"]

LOCAL = "local"


def connect(model: params.Model, base_folder: Path | None) -> ChatClient:
    if model.url != LOCAL:
        return OpenAIClient(model)
    if base_folder is None:
        raise SettingsError("url is `local`, but there is no base model in a folder of this machine; name a URL")
    return LocalClient(base_folder, model)


class Clients:
    """The named models of a run, each connected once, however many parts ask it."""

    def __init__(self, models: Mapping[str, params.Model], base_folder: Path | None) -> None:
        self._models = models
        self._base_folder = base_folder
        self._connected: dict[str, ChatClient] = {}

    def __getitem__(self, name: str) -> ChatClient:
        if name not in self._connected:
            self._connected[name] = connect(self._models[name], self._base_folder)
        return self._connected[name]

    def figures(self) -> dict[str, float]:
        """What was asked so far, as metrics `llm/<name>/<figure>`."""
        return {
            f"llm/{name}/{figure}": value
            for name, client in self._connected.items()
            for figure, value in client.usage.figures().items()
        }

    async def close(self) -> None:
        for client in self._connected.values():
            await client.close()
