"""A stand-in for an OpenAI-compatible server, on a free port of this machine; it breaks as it is told to."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal

from support.local_server import Listening, LocalServer

Fault = Literal[
    "empty", "null", "refused", "no choices", "cut", "reasoning", "garbage", "html", "drop", "timeout",
    "400", "401", "404", "429", "500", "503",
]  # fmt: skip
Replies = Callable[[list[dict[str, str]]], str]
Faults = Callable[[int, dict[str, Any]], Fault | None]


class ChatServer(LocalServer):
    """Answers with `reply(messages)`, unless `faults` names a fault for the request.

    `bodies` and `headers` hold what was asked, `peak` the most requests at once. `cut` and `reasoning` stop
    at max_tokens with some text or with none; given `enough`, not where a request allows that many tokens.
    Beyond `most` requests at once it answers 429; `context` is how many tokens (words) its model can have, which it
    tells as vLLM does; without `schemas` it refuses a response_format, and as OpenAI does what is `unsupported`.
    """

    def __init__(
        self,
        reply: Replies = lambda messages: f"echo: {messages[-1]['content']}",
        faults: Faults | Sequence[Fault | None] = (),
        *,
        latency_s: float = 0.0,
        enough: int | None = None,
        most: int | None = None,
        context: int | None = None,
        schemas: bool = True,
        unsupported: Sequence[str] = (),
    ) -> None:
        self.reply = reply
        self.faults = faults if callable(faults) else lambda number, body: dict(enumerate(faults)).get(number)
        self.latency_s = latency_s
        self.enough = enough
        self.most = most
        self.context = context
        self.schemas = schemas
        self.unsupported = unsupported
        self.refused = 0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.peak = 0
        self._now = 0
        self._lock = threading.Lock()
        super().__init__(_Handler)

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    def enter(self, body: dict[str, Any], headers: dict[str, str]) -> Fault | None:
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(headers)
            self._now += 1
            if self.most is not None and self._now > self.most:
                self.refused += 1
                return "429"
            self.peak = max(self.peak, self._now)
        if self.context is not None and words(body) + room(body) > self.context:
            return "400"
        if not self.schemas and "response_format" in body:
            return "400"
        fault = self.faults(number, body)
        enough = self.enough is not None and room(body) >= self.enough
        return None if enough and fault in {"cut", "reasoning"} else fault

    def leave(self) -> None:
        with self._lock:
            self._now -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Listening

    def do_GET(self) -> None:
        length = {} if self.server.owner.context is None else {"max_model_len": self.server.owner.context}
        model = {"id": "small", "object": "model", "created": 0, "owned_by": ""} | length
        self._send(200, json.dumps({"object": "list", "data": [model]}).encode())

    def do_POST(self) -> None:
        owner = self.server.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            known = owner.context is not None
            self._send(200 if known else 404, json.dumps({"count": words(body)}).encode())
            return
        fault = owner.enter(body, {name.lower(): value for name, value in self.headers.items()})
        if refused := next((name for name in owner.unsupported if name in body), ""):
            owner.leave()
            error = {"message": f"Unsupported parameter: {refused}", "code": "unsupported_parameter", "param": refused}
            self._send(400, json.dumps({"error": error}).encode())
            return
        try:
            if fault != "429":
                time.sleep(owner.latency_s)
            self._answer(owner, body, fault)
        finally:
            owner.leave()

    def _answer(self, owner: ChatServer, body: dict[str, Any], fault: Fault | None) -> None:
        match fault:
            case "drop":
                self.close_connection = True
                self.connection.shutdown(2)
            case "timeout":
                owner.closing.wait(10)
                self.close_connection = True
            case "garbage":
                self._send(200, b'{"id": "chatcmpl-1", "choi')
            case "html":
                self._send(200, b"<html>Sign in to the proxy</html>", "text/html")
            case "400" | "401" | "404" | "429" | "500" | "503":
                said = f"told to fail with {fault}; your key is {self.headers['Authorization']}"
                self._send(int(fault), json.dumps({"error": {"message": said}}).encode())
            case _:
                self._send(200, json.dumps(_completion(owner, body, fault)).encode())

    def _send(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


def room(body: dict[str, Any]) -> int:
    return int(body.get("max_tokens") or body.get("max_completion_tokens") or 0)


def words(body: dict[str, Any]) -> int:
    return sum(len(said["content"].split()) for said in body["messages"])


def _completion(owner: ChatServer, body: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
    text: str | None = owner.reply(body["messages"])
    finish_reason = "stop"
    match fault:
        case "empty":
            text = ""
        case "null":
            text = None
        case "refused":
            text, finish_reason = None, "content_filter"
        case "cut":
            text, finish_reason = (text or "")[: len(text or "") // 2], "length"
        case "reasoning":
            text, finish_reason = None, "length"
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
    prompt_tokens = words(body)
    completion_tokens = room(body) if finish_reason == "length" else len((text or "").split())
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [] if fault == "no choices" else [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
