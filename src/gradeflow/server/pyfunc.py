"""A registered adapter as MLflow's `python_function`: what `mlflow.pyfunc.load_model` and `mlflow models serve` load.

    model = mlflow.pyfunc.load_model("models:/gradeflow-policy@champion")
    model.predict({"messages": [{"role": "user", "content": "What is 3 + 4?"}]})

The files are the adapter's alone. Its base is looked for as `gradeflow serve` does it: by the params.yaml of the
working folder, or of the project that the store lies in.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gradeflow import adapter, models, params
from gradeflow.errors import SetupError
from gradeflow.server import chat
from gradeflow.server.gateway import ApiError
from gradeflow.server.http import ChatRequest, completion, question

SETTINGS = "params.yaml"


class ChatModel:
    """`predict` takes what OpenAI's chat completions take, less the model's name, and gives their reply."""

    def __init__(self, loaded: chat.Chat, name: str, max_tokens: int) -> None:
        self._chat = loaded
        self._name = name
        self._max_tokens = max_tokens

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """A reply to one request; to a table or a list of them, a list.

        Raises:
            ValueError: a request is not of that form, or too long.
        """
        if hasattr(data, "to_dict"):
            data = data.to_dict("records")
        if isinstance(data, Mapping):
            return self._answer({**data, **(params or {})})
        return [self._answer({**row, **(params or {})}) for row in data]

    def _answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        name = self._name
        try:
            request = ChatRequest.model_validate({"model": name, **asked})
            if request.stream:
                raise ValueError("stream: a python_function gives its reply at once")
            (answer,) = self._chat.generate([question(request, self._chat, name, self._max_tokens)])
        except (ValidationError, ApiError) as error:
            raise ValueError(str(error)) from None
        return completion(name, answer) | {"system_fingerprint": name}


def _load_pyfunc(path: str) -> ChatModel:
    """What MLflow calls with the folder of the model's files."""
    folder = Path(path)
    root = next((place for place in (Path.cwd(), *folder.resolve().parents) if (place / SETTINGS).is_file()), None)
    if root is None:
        raise SetupError(
            f"no {SETTINGS} here or above {folder}, which says where the base is: go to the project's folder"
        )
    settings = params.load(root / SETTINGS)
    base = settings.base.model_copy(update={"folder": root / settings.base.folder})
    config = adapter.read_config(folder)
    name, revision = str(config["base_model_name_or_path"]), str(config.get("revision") or "")
    where, pinned = models.of_adapter(base, name, revision)
    adapter.validate(folder, base_folder=Path(where) if Path(where).is_dir() else None)
    digest = adapter.digest(folder)[:12]
    loaded = chat.load(where, pinned)
    loaded.attach(digest, folder)
    adapter.fingerprint(loaded.model, adapter.default_probes(len(loaded.tokenizer)))
    return ChatModel(loaded, digest, settings.serve.max_tokens)
