"""A stand-in for a server of files, on a free port of this machine; it breaks as it is told to."""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal, get_args

from support.local_server import Listening, LocalServer

Fault = Literal[
    "drop",
    "stall",
    "wrong range",
    "ignored range",
    "longer range",
    "503",
    "503 for an hour",
    "429",
    "404",
    "redirect",
    "redirect loop",
    "changed",
    "cut file",
    "length too long",
    "length too short",
    "web page",
    "web page as data",
]
FAULTS: Sequence[Fault] = get_args(Fault)
PAGE = b"<!DOCTYPE html>\n<html><body>Sign in to the network</body></html>"


class FileServer(LocalServer):
    """Serves `files` by path, with ranges, unless `faults(number, path)` names a fault for a request.

    After `changed` it serves `later` in place of a file. Versions are told by `validators`: an ETag, a date, or not.
    `asked` holds what was requested: path and headers. A stalled answer goes on after `stall_s`.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        faults: Callable[[int, str], Fault | None] | Sequence[Fault | None] = (),
        *,
        later: bytes = b"",
        validators: Literal["etag", "date", "none"] = "etag",
        latency_s: float = 0.0,
        stall_s: float = 5.0,
    ) -> None:
        self.files = dict(files)
        self.faults = faults if callable(faults) else lambda number, path: dict(enumerate(faults)).get(number)
        self.later = later
        self.validators = validators
        self.latency_s = latency_s
        self.stall_s = stall_s
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.sent = 0
        self.lock = threading.Lock()
        super().__init__(_Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Listening

    def do_GET(self) -> None:
        owner = self.server.owner
        path = self.path.removeprefix("/moved")
        with owner.lock:
            number = len(owner.asked)
            owner.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            fault = owner.faults(number, self.path)
            if fault == "changed" and owner.later:
                owner.files[path] = owner.later
        time.sleep(owner.latency_s)
        match fault:
            case "503" | "429":
                self._send(int(fault), b"", {"Retry-After": "0"})
            case "503 for an hour":
                self._send(503, b"", {"Retry-After": "3600"})
            case "redirect":
                self._send(302, b"", {"Location": f"/moved{path}"})
            case "redirect loop":
                self._send(302, b"", {"Location": path})
                owner.faults = lambda number, path: "redirect loop"
            case "web page":
                self._send(200, PAGE, {"Content-Type": "text/html"})
            case "web page as data":
                self._send(200, PAGE, {})
            case _ if fault == "404" or path not in owner.files:
                self._send(404, b"", {})
            case _:
                self._file(owner.files[path], fault)

    def _file(self, content: bytes, fault: Fault | None) -> None:
        if fault == "cut file":
            content = content[: len(content) // 2]
        start = self._start(content) if fault != "ignored range" else None
        headers = self._version(content)
        if start is not None and start >= len(content):
            self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        body = content[start:]
        if start is not None:
            shift = {"wrong range": -7, "longer range": 0}.get(str(fault), 0)
            body = content[start + shift :]
            end = len(content) + (5 if fault == "longer range" else -1)
            headers["Content-Range"] = f"bytes {start + shift}-{end}/{len(content)}"
        status = 200 if start is None else 206
        match fault:
            case "drop" | "stall":
                self._send(status, body, headers, send=len(body) * 2 // 3, stall=fault == "stall")
            case "length too long":
                self._send(status, body, headers | {"Content-Length": str(len(body) + 100)})
                self.connection.shutdown(2)
            case "length too short":
                self._send(status, body, headers | {"Content-Length": str(len(body) // 2)})
            case _:
                self._send(status, body, headers)

    def _start(self, content: bytes) -> int | None:
        """Where the range that is asked for begins, if it is to be given."""
        version = self._version(content)
        condition = self.headers.get("If-Range")
        if "Range" not in self.headers or (condition is not None and condition not in version.values()):
            return None
        return int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))

    def _version(self, content: bytes) -> dict[str, str]:
        owner = self.server.owner
        if owner.validators == "none":
            return {}
        if owner.validators == "date":
            year = 2021 if content == owner.later else 2020
            return {"Last-Modified": f"Fri, 03 Jan {year} 10:00:00 GMT"}
        return {"ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], *, send: int | None = None, stall: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:send])
        self.server.owner.sent += len(body[:send])
        if stall:
            self.server.owner.closing.wait(self.server.owner.stall_s)
        if send is not None or len(body) > int(headers.get("Content-Length", len(body))):
            self.close_connection = True

    def log_message(self, *_: Any) -> None: ...
