"""Which registered adapter answers to which name, and its following of aliases that move.

A model server knows an adapter by a name with its digest, so that nothing that it keeps by name (weights, prefixes) can
answer for another one. Clients ask by names of the registry. What lies between is one dictionary, which is replaced
when an alias has moved and the adapter that it leads to is loaded and proved; requests that began before keep theirs.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gradeflow import adapter, models, registry
from gradeflow.adapter import Backend
from gradeflow.champions import CHAMPION
from gradeflow.errors import AdapterError, SettingsError, TrackingError
from gradeflow.params import Base
from gradeflow.registry import Version

AGAIN_S = 30.0
"""After so long a version that was refused is tried again."""
KEPT = 8
"""So many versions that a followed alias has left behind go on answering to their numbers."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """A version with its files, checked; `key` is what the model server calls it."""

    version: Version
    folder: Path
    rank: int

    @property
    def model(self) -> str:
        return f"{self.version.name}/{self.version.version}"

    @property
    def key(self) -> str:
        return f"{self.model}:{self.version.digest[:16]}"


class Engine(Protocol):
    """A model server with one base."""

    @property
    def dtype(self) -> str:
        """What it computes in, as `float32`."""

    @property
    def base(self) -> tuple[str, str]:
        """Where its base was loaded from, and its revision."""

    async def load(self, served: Served) -> None:
        """Let it answer under its key.

        Raises:
            AdapterError: the server does not take it.
        """

    async def unload(self, served: Served) -> None:
        """Forget what was loaded; nobody asks for it any more."""

    async def log_probabilities(self, key: str) -> Sequence[float]:
        """Of the tokens of `adapter.default_probes` but the first of each, by an adapter, or the base for no key."""


@dataclass(frozen=True, slots=True)
class Reference:
    """`name@alias`, `name/3`, or `name`, which is its champion; each also after `models:/`."""

    name: str
    alias: str = ""
    number: int = 0

    @classmethod
    def of(cls, given: str) -> "Reference":
        """What a setting or a client means.

        Raises:
            SettingsError: it is none of these.
        """
        plain = given.removeprefix("models:/")
        name, at, alias = plain.partition("@")
        if at:
            found = cls(name, alias)
        else:
            name, slash, number = plain.partition("/")
            if slash and not number.isdecimal():
                raise SettingsError(
                    f"serve.models: {given!r} names no registered adapter; expected name@alias or name/3"
                )
            found = cls(name, number=int(number)) if slash else cls(name, CHAMPION)
        if not found.name or not (found.alias or found.number):
            raise SettingsError(f"serve.models: {given!r} names no registered adapter; expected name@alias or name/3")
        return found

    def __str__(self) -> str:
        return f"{self.name}@{self.alias}" if self.alias else f"{self.name}/{self.number}"

    @property
    def names(self) -> tuple[str, ...]:
        return (str(self), self.name) if self.alias == CHAMPION else (str(self),)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a version does not answer to a name that leads to it."""

    version: str
    why: str
    at: float


@dataclass
class Catalogue:
    """`names` are what clients may ask for; `refused` says which names lead to what cannot be served, and why."""

    references: Sequence[Reference]
    base: Base
    cache: Path
    engine: Engine
    backend: Backend = "hf"
    names: Mapping[str, Served] = field(default_factory=dict)
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    switched: Callable[[str, Served | None, Served], None] = lambda *_: None
    was_refused: Callable[[str, str], None] = lambda *_: None
    store_fault: str = ""
    _plain: Sequence[float] = ()
    _served: dict[str, Served] = field(default_factory=dict)
    _in_use: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def using(self, served: Served) -> Iterator[None]:
        """It stays loaded as long as the context lasts."""
        self._in_use[served.key] += 1
        try:
            yield
        finally:
            self._in_use[served.key] -= 1

    async def follow(self, every_s: float) -> None:
        """Look for moved aliases until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:
                log.exception("the registry could not be followed; what is served stays")
            await asyncio.sleep(every_s)

    async def refresh(self) -> None:
        """Look once, and switch what has moved."""
        try:
            wanted = await asyncio.to_thread(self._look)
        except TrackingError as error:
            if not self.store_fault:
                log.warning("the registry does not answer; what is served stays: %s", error)
            self.store_fault = str(error)
            return
        self.store_fault = ""
        for reference, version in wanted.items():
            await self._follow(reference, version)
        await self._forget()

    def _look(self) -> dict[Reference, Version | None]:
        """What each reference leads to now, with one request for each registered model unless something moved."""
        aliases = {name: registry.aliases(name) for name in {one.name for one in self.references if one.alias}}
        found: dict[Reference, Version | None] = {}
        for one in self.references:
            number = one.number or aliases[one.name].get(one.alias, 0)
            now = self.names.get(str(one))
            is_same = now is not None and now.version.version == number
            found[one] = now.version if now and is_same else registry.get_version(one.name, number) if number else None
        return found

    async def _follow(self, reference: Reference, version: Version | None) -> None:
        now, before = self.names.get(str(reference)), self.refused.get(str(reference))
        if version is None:
            self._refuse(
                reference, "none", f"the registry has no {reference}. Run `gradeflow promote`, or name another"
            )
            return
        if now is not None and now.version.version == version.version:
            self._accept(reference)
            return
        if before and before.version == str(version.version) and time.monotonic() - before.at < AGAIN_S:
            return
        try:
            served = await self._bring(version)
        except Exception as error:  # noqa: BLE001 - whatever it is, the old version goes on
            self._refuse(reference, str(version.version), str(error) or type(error).__name__)
            return
        self.names = {**self.names, **dict.fromkeys((*reference.names, served.model), served)}
        self._accept(reference)
        self.switched(str(reference), now, served)
        log.warning("%s is %s now", reference, served.version)

    async def _forget(self) -> None:
        """Unload what was left behind long ago."""
        led_to = {self.names[str(one)].key for one in self.references if str(one) in self.names}
        behind = [served for key, served in self._served.items() if key not in led_to]
        for served in behind[: max(len(behind) - KEPT, 0)]:
            if not self._in_use[served.key]:
                del self._served[served.key], self._in_use[served.key]
                self.names = {name: one for name, one in self.names.items() if one.key != served.key}
                await self.engine.unload(served)

    def _accept(self, reference: Reference) -> None:
        self.refused = {name: one for name, one in self.refused.items() if name != str(reference)}

    def _refuse(self, reference: Reference, version: str, why: str) -> None:
        before = self.refused.get(str(reference))
        if before is None or (before.version, before.why) != (version, why):
            log.error("%s: version %s is not served: %s", reference, version, why)
            self.was_refused(str(reference), version)
        self.refused = {**self.refused, str(reference): Refusal(version, why, time.monotonic())}

    async def _bring(self, version: Version) -> Served:
        """Fetch, check, load and prove."""
        served = await asyncio.to_thread(fetch, version, self.base, self.cache, self.backend)
        if not is_same_base(own := base_of(served.folder, self.base), self.engine.base):
            raise AdapterError(f"{version} is of base {own[0]}, which is not served here")
        if served.key not in self._served:
            await self.engine.load(served)
        await self._prove(served)
        self._served.pop(served.key, None)
        self._served[served.key] = served  # the last one, now, to be forgotten
        return served

    async def _prove(self, served: Served) -> None:
        """What the loaded adapter does is what was registered.

        Raises:
            AdapterError: it does nothing, or something else.
        """
        if not self._plain:
            self._plain = await self.engine.log_probabilities("")
        found = adapter.changes(await self.engine.log_probabilities(served.key), self._plain)
        told = served.version.tags.get(registry.FINGERPRINT)
        if not told:
            return
        registered = json.loads(told)
        allowed = adapter.tolerance(registered["dtype"], self.engine.dtype)
        if not adapter.alike(found, registered["changes"], allowed):
            raise AdapterError(
                f"{served.version}: once loaded it does not do to probabilities what it did when it was evaluated: "
                "its fingerprint differs. Evaluate and promote it on this base again"
            )

    @property
    def is_ready(self) -> bool:
        return all(str(one) in self.names for one in self.references)


def fetch(version: Version, base: Base, cache: Path, backend: Backend) -> Served:
    """The files of a version, checked against the registry and the base.

    Raises:
        AdapterError: they are not the registered adapter, do nothing, or do not fit.
        TrackingError: the store has others.
    """
    folder = registry.fetch(version, cache).resolve()
    where, _ = base_of(folder, base)
    own = Path(where) if Path(where).is_dir() else None
    facts = adapter.validate(folder, base_folder=own, backend=backend, allow_bin=True)
    if facts.digest != version.digest:
        raise AdapterError(
            f"{folder}: its digest is {facts.digest[:12]}; {version.name} {version.version} was registered "
            f"as {version.digest[:12]}"
        )
    return Served(version, folder, facts.rank)


def is_same_base(one: tuple[str, str], other: tuple[str, str]) -> bool:
    return one == other or (one[1] == other[1] and Path(one[0]).resolve() == Path(other[0]).resolve())


def base_of(folder: Path, settings: Base) -> tuple[str, str]:
    """Where the base that an adapter names is loaded from, and its revision."""
    config = adapter.read_config(folder)
    return models.of_adapter(settings, str(config.get("base_model_name_or_path")), config.get("revision") or "")
