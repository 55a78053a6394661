"""What the stand-ins for servers share: a free port of this machine, and threads that end with the test."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class LocalServer:
    """Listens while it is entered; its handlers find it as `self.server.owner`, and `closing` is set at the end."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self.closing = threading.Event()
        self._server = Listening(("127.0.0.1", 0), handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Listening(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    owner: Any

    def handle_error(self, request: Any, client_address: Any) -> None: ...
