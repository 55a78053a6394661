"""Stand-ins for Docker: a client that notes what it is asked and acts a part, and an engine that the real client asks.

`python docker_stand_in.py NOTES PART ARGUMENTS...` is the client: it appends its arguments to NOTES as a line of JSON.
"""

import json
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

NO_ENGINE = "docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
NO_IMAGE = "docker: Error response from daemon: No such image: gradeflow-evaluate:latest"
NO_GPU = 'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].'


def put(folder: Path, part: str) -> Path:
    """An executable `docker` in `folder` that acts the part; returns where it notes what it was asked."""
    folder.mkdir(exist_ok=True)
    notes, client = folder / "notes.jsonl", folder / "docker"
    client.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" "{notes}" "{part}" "$@"\n')
    client.chmod(0o755)
    return notes


def asked(notes: Path) -> list[list[str]]:
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def act(notes: Path, part: str, arguments: list[str]) -> int:
    with notes.open("a") as file:
        file.write(json.dumps(arguments) + "\n")
    killed = notes.with_name("killed")
    if arguments[0] == "kill":
        killed.touch()
        return 0
    if arguments[0] == "build":
        print("building")
        return 1 if part == "cannot build" else 0
    print("loading\nhalf a line", end="", flush=True)
    match part:
        case "hang":
            while not killed.exists():
                time.sleep(0.01)
            return 137
        case "hang on":
            time.sleep(600)
        case "end late":
            time.sleep(1)
            return 137
        case "no engine" | "no image" | "no gpu":
            print("\n" + {"no engine": NO_ENGINE, "no image": NO_IMAGE, "no gpu": NO_GPU}[part])
            return 125
        case "no entry":
            return 127
        case status:
            return int(status)
    return 0


@contextmanager
def engine(socket: Path) -> Iterator[list[dict[str, Any]]]:
    """Answers the real client's `docker create` on a socket; what containers it asked for."""
    wanted: list[dict[str, Any]] = []

    class Engine(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Api-Version", "1.50")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.reply(200, b"")

        def do_POST(self) -> None:
            wanted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.reply(201, b'{"Id": "0123456789ab", "Warnings": []}')

        def log_message(self, *_: Any) -> None: ...

        def address_string(self) -> str:
            return "client"

    with socketserver.ThreadingUnixStreamServer(str(socket), Engine) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield wanted
        server.shutdown()


if __name__ == "__main__":
    sys.exit(act(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
