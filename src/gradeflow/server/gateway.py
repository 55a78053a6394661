"""What stands before an OpenAI-compatible server: names of the registry, bounds, a key, digests on replies, metrics.

It is ASGI middleware, so that it runs inside the server's own process, in front of this package's or of vLLM's.
"""

import asyncio
import contextlib
import ipaddress
import json
import random
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradeflow.server import metrics
from gradeflow.server.catalogue import Catalogue, Served

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

DIGEST = b"x-gradeflow-adapter"
VERSION = b"x-gradeflow-version"
REFUSED = b"x-gradeflow-refused"
CHAT = "/v1/chat/completions"
ASKING = (CHAT, "/v1/completions")
ROUTES = {
    **dict.fromkeys(ASKING, "POST"),
    **dict.fromkeys(("/v1/models", "/health", "/ready", "/metrics", "/metrics/", "/openapi.json"), "GET"),
}
OPEN = frozenset({"/health", "/ready"})
"""Asked by what watches over servers, without a key; they tell nothing of what is served."""
LENGTHS = ("max_tokens", "max_completion_tokens", "min_tokens")
CHOICES = ("n", "best_of")
GRAMMARS = ("structured_outputs", "response_format", "tools")
"""What a server compiles before it answers."""
SYSTEM = re.compile(rb'"system_fingerprint":(?:null|"[^"\\]*")')
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
HEADER_BYTES = 300
CLOSED = 499
"""The status, as nginx has it, of a request whose client went away before its reply."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Most of each: bytes of a request, seconds until it is here, tokens and choices of a reply, requests at once.

    `prompts` bounds prompts times choices, `grammar` the characters of a schema.
    """

    tokens: int
    body: int
    concurrency: int
    choices: int = 16
    prompts: int = 64
    grammar: int = 64 * 1024
    receive_s: float = 30.0
    send_s: float = 60.0


class ApiError(Exception):
    """An answer in OpenAI's shape for errors."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Gone(Exception):  # noqa: N818 - who asked has gone away
    pass


@dataclass
class Exchange:
    """A request and what came of it, for metrics and traces. `body` is what was asked."""

    served: Served
    name: str
    path: str
    body: dict[str, Any]
    began: float = field(default_factory=time.monotonic)
    status: int = 0
    ended: float = 0.0
    reply: bytes = b""


@dataclass
class Gateway:
    """Clients must send one of `keys`, if there are any; `traced` is given this share of exchanges."""

    app: App
    catalogue: Catalogue
    limits: Limits
    keys: Sequence[str] = ()
    trace_share: float = 0.0
    traced: Callable[[Exchange], None] = lambda _: None
    poll_s: float = 0.25
    _running: int = 0
    _task: "asyncio.Task[None] | None" = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] == "http":
            self._follow()
            await self._answer(scope, receive, send)
        else:  # nothing here speaks by websocket
            await send({"type": "websocket.close", "code": 1008})

    async def _live(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._follow()
            await send(message)

        try:
            await self.app(scope, receive, told)
        finally:
            if self._task:
                self._task.cancel()

    def _follow(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self.catalogue.follow(self.poll_s))

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        try:
            self._admit(scope, path, method)
            if path in ASKING:
                await self._ask(scope, receive, send)
            elif path == "/ready":
                await self._ready(scope, send)
            elif path == "/openapi.json":
                await self._describe(scope, receive, send)
            elif path.startswith("/v1/models"):
                await _json(send, 200, self._models(path))
            else:
                await self.app(scope, receive, send)
        except ApiError as error:
            retry = [(b"retry-after", b"1")] if error.status == 429 else []
            await _json(send, error.status, error.body(), retry)
        except Gone:
            pass

    def _admit(self, scope: MutableMapping[str, Any], path: str, method: str) -> None:
        allowed = "GET" if path.startswith("/v1/models/") else ROUTES.get(path)
        if not self.keys and not _is_local(scope):
            raise ApiError(401, "without a key this server answers its own machine alone", code="invalid_api_key")
        if path not in OPEN and not self._may_ask(scope):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer <key>", code="invalid_api_key")
        if allowed is None:
            raise ApiError(404, f"there is no {path} here", code="not_found")
        if method not in {allowed, "HEAD" if allowed == "GET" else allowed}:
            raise ApiError(405, f"{path} takes {allowed}", code="method_not_allowed")

    def _may_ask(self, scope: MutableMapping[str, Any]) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return not self.keys or any(secrets.compare_digest(given, f"Bearer {key}".encode()) for key in self.keys)

    async def _ready(self, scope: MutableMapping[str, Any], send: Send) -> None:
        ready = self.catalogue.is_ready
        refused = {name: one.why for name, one in self.catalogue.refused.items()}
        told: dict[str, Any] = {"ready": ready}
        if self._may_ask(scope):
            told |= {"refused": refused, "registry": self.catalogue.store_fault or "answers"}
        await _json(send, 200 if ready else 503, told)

    async def _describe(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """The server's own description, less the routes that are not exposed."""
        parts: list[bytes] = []
        status = 200

        async def kept(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        await self.app(scope, receive, kept)
        if status != 200:  # vLLM can be told to describe nothing
            raise ApiError(404, "this server has no description", code="not_found")
        told = json.loads(b"".join(parts))
        told["paths"] = {path: one for path, one in told["paths"].items() if path in ROUTES}
        await _json(send, 200, told)

    def _models(self, path: str) -> dict[str, Any]:
        cards = {name: _card(name, served) for name, served in self.catalogue.names.items()}
        if path in {"/v1/models", "/v1/models/"}:
            return {"object": "list", "data": list(cards.values())}
        name = path.removeprefix("/v1/models/")
        return _card(name, self._served(name))

    def _served(self, name: str) -> Served:
        plain = name.removeprefix("models:/")
        found = self.catalogue.names.get(plain)
        if found is None:
            known = ", ".join(self.catalogue.names) or "none yet"
            raise ApiError(
                404,
                f"the model {name[:200]!r} is not served here; there are: {known}",
                code="model_not_found",
                param="model",
            )
        return found

    async def _ask(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        raw = await self._body(receive)  # before it counts: who sends slowly takes nobody's place
        if self._running >= self.limits.concurrency:
            raise ApiError(
                429, f"{self._running} requests are being answered; ask again soon", code="rate_limit_exceeded"
            )
        self._running += 1
        metrics.RUNNING.inc()
        try:
            body = self._checked(raw, scope["path"])
            name = body["model"]
            served = self._served(name)
            with self.catalogue.using(served):
                await self._forward(scope, receive, send, Exchange(served, name, scope["path"], body))
        finally:
            self._running -= 1
            metrics.RUNNING.dec()

    async def _body(self, receive: Receive) -> bytes:
        most, parts, size = self.limits.body, [], 0
        try:
            async with asyncio.timeout(self.limits.receive_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    part = message.get("body", b"")
                    size += len(part)
                    if size > most:
                        raise ApiError(413, f"the request has more than {most} bytes", code="request_too_large")
                    parts.append(part)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the request was not here after {self.limits.receive_s:g} s", code="timeout") from None

    def _checked(self, raw: bytes, path: str) -> dict[str, Any]:
        """The request as an object with a model, within bounds; all else is the server's to check."""
        try:
            body = json.loads(raw.decode(), parse_constant=_no_constant)
            if SURROGATE.search(raw):  # half of a pair is no text: no tokenizer and no reply can have it
                json.dumps(body, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the request is not JSON: {error}"[:300], code="invalid_request") from None
        if not isinstance(body, dict):
            raise ApiError(400, "the request is not a JSON object", code="invalid_request")
        if not isinstance(body.get("model"), str):
            raise ApiError(400, "model: a string is needed", code="invalid_request", param="model")
        for name in LENGTHS:
            self._at_most(body, name, self.limits.tokens)
        for name in CHOICES:
            self._at_most(body, name, self.limits.choices)
        for name in GRAMMARS:
            if len(json.dumps(body.get(name))) > self.limits.grammar:
                said = f"{name}: at most {self.limits.grammar} characters"
                raise ApiError(400, said, code="invalid_value", param=name)
        if path == CHAT and all(body.get(name) is None for name in LENGTHS[:2]):
            body["max_tokens"] = self.limits.tokens
        prompt = body.get("prompt") if path == "/v1/completions" else None
        many = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        if many * max(body.get(name) or 1 for name in CHOICES) > self.limits.prompts:
            said = f"prompt: at most {self.limits.prompts} at once, times n"
            raise ApiError(400, said, code="invalid_value", param="prompt")
        return body

    def _at_most(self, body: dict[str, Any], name: str, most: int) -> None:
        asked = body.get(name)
        if asked is not None and type(asked) is not int:  # servers take "16" and 16.0 for a number
            raise ApiError(400, f"{name}: a whole number is needed", code="invalid_value", param=name)
        if asked is not None and asked > most:
            raise ApiError(400, f"{name} is {asked}; at most {most} here", code="invalid_value", param=name)

    async def _forward(self, scope: MutableMapping[str, Any], receive: Receive, send: Send, exchange: Exchange) -> None:
        served = exchange.served
        raw = _written(exchange.body | {"model": served.key})
        keeps = self.trace_share > 0 and random.random() < self.trace_share
        headers = [pair for pair in scope["headers"] if pair[0] not in {b"content-length", b"transfer-encoding"}]
        asked = {**scope, "headers": [*headers, (b"content-length", str(len(raw)).encode())]}
        sent = False

        async def give() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": raw, "more_body": False}
            return await receive()

        key, name = served.key.encode(), exchange.name.encode()
        model = b'"model":"' + key + b'"', b'"model":"' + name + b'"'
        system = b'"system_fingerprint":"' + served.version.digest[:12].encode() + b'"'
        extra = [
            (DIGEST, served.version.digest.encode()),
            (VERSION, served.model.encode()),
            *self._refusal(exchange.name),
        ]

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                kept = [pair for pair in message.get("headers", []) if pair[0].lower() != b"content-length"]
                message = {**message, "headers": [*kept, *extra]}
            elif body := message.get("body"):
                body, replaced = SYSTEM.subn(system, body.replace(*model))
                if not replaced:
                    body = body.replace(model[1], model[1] + b"," + system)
                if exchange.status >= 400:
                    body = body.replace(key, name)
                message = {**message, "body": body}
                if keeps:
                    exchange.reply += body
            async with asyncio.timeout(self.limits.send_s):
                await send(message)

        try:
            with contextlib.suppress(TimeoutError):  # who asked does not read: the stream is cut
                await self.app(asked, give, told)
        finally:
            exchange.ended = time.monotonic()
            metrics.answered(served, exchange.status or CLOSED, exchange.ended - exchange.began)
            if keeps:
                self.traced(exchange)

    def _refusal(self, name: str) -> list[tuple[bytes, bytes]]:
        plain = name.removeprefix("models:/")
        found = next((one for one in self.catalogue.references if plain in one.names), None)
        refused = self.catalogue.refused.get(str(found)) if found else None
        if refused is None:
            return []
        said = f"version {refused.version}: {' '.join(refused.why.split())}"
        return [(REFUSED, said.encode("ascii", "replace")[:HEADER_BYTES])]


def _is_local(scope: MutableMapping[str, Any]) -> bool:
    """Whether it was asked by an address of this machine's own, or by a socket that is a file."""
    host, port = scope.get("server") or ("", None)
    if port is None:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return bool(host == "localhost")


def _written(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise ApiError(400, "a number is too large, or lists too deep", code="invalid_request") from None


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _card(name: str, served: Served) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.version.made_ms // 1000,
        "owned_by": "gradeflow",
        "version": served.model,
        "digest": served.version.digest,
    }


async def _json(send: Send, status: int, body: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    raw = json.dumps(body).encode()
    told = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": raw})
