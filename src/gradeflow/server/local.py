"""The catalogue's engine in this process: a base of transformers, with adapters of PEFT."""

from collections.abc import Sequence
from functools import partial

from gradeflow import adapter
from gradeflow.errors import AdapterError
from gradeflow.server.catalogue import Served
from gradeflow.server.chat import Chat


class Local:
    """`base` is where the chat's base was loaded from, and its revision."""

    def __init__(self, chat: Chat, base: tuple[str, str]) -> None:
        self._chat = chat
        self.base = base
        self._probes = adapter.default_probes(len(chat.tokenizer))
        self.dtype = str(chat.model.dtype).removeprefix("torch.")

    async def load(self, served: Served) -> None:
        if served.key in self._chat.adapters:
            return
        try:
            await self._chat.alone(partial(self._chat.attach, served.key, served.folder))
        except (RuntimeError, ValueError) as error:
            raise AdapterError(f"{served.folder}: PEFT does not load it: {str(error).splitlines()[0]}") from error

    async def unload(self, served: Served) -> None:
        await self._chat.alone(partial(self._chat.detach, served.key))

    async def log_probabilities(self, key: str) -> Sequence[float]:
        found: Sequence[float] = await self._chat.alone(partial(self._chat.log_probabilities, key, self._probes))
        return found
