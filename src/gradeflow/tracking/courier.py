"""A process beside this one that asks the store.

MLflow's client computes milliseconds for each thing it sends. In a thread of the run's process that time is taken from
the run's work, as Python's threads take turns; here it is another processor's, or what the work leaves of this one.

Each way goes one JSON object a line: a question to its standard input, any number of `told` and one `over` or `failed`
back. It ends with whoever started it, at once: what it was sending is sent again.
"""

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gradeflow.errors import TrackingError
from gradeflow.tracking import delivery, store
from gradeflow.tracking.outbox import Part

NICE = 5
"""How much it lets the work go first."""


class Courier:
    """One question at a time, and a run is made before anything else is delivered: somebody waits for it.

    Between `start` and the end of its imports, and should it end, it is not `ready`, and whoever has something to ask
    asks the store itself.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._has_answered = threading.Event()
        self._turns = threading.Condition()
        self._is_busy, self._urgent = False, 0

    @property
    def ready(self) -> bool:
        return self._has_answered.is_set() and self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process, unless it is there."""
        if self._process is None or self._process.poll() is not None:
            self._has_answered.clear()
            command = [sys.executable, "-c", "from gradeflow.tracking import courier; courier.main()"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
            threading.Thread(target=self._greet, daemon=True).start()

    def _greet(self) -> None:
        with suppress(TrackingError):
            deque(self._ask({}))
            self._has_answered.set()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def create_run(self, uri: str, experiment: str, tags: Mapping[str, str], name: str) -> str:
        """Returns the run's id.

        Raises:
            TrackingError: the store does not answer, or refuses.
        """
        told = {"experiment_id": experiment, "tags": dict(tags), "run_name": name}
        try:
            (made,) = self._ask({"uri": uri, "create": told}, urgent=True)
        except TrackingError as error:
            raise store.in_words(uri, error) from None
        return str(made)

    def deliver(self, uri: str, run: str, part: Part, taken: int, *, failed: bool) -> Iterator[list[str]]:
        """As `delivery.deliver`.

        Raises:
            TrackingError: what that would raise, in one line.
        """
        told = {"run": run, "part": str(part.folder), "taken": taken, "failed": failed}
        return self._ask({"uri": uri, "deliver": told})

    @contextmanager
    def _turn(self, *, urgent: bool) -> Iterator[None]:
        with self._turns:
            self._urgent += urgent
            self._turns.wait_for(lambda: not self._is_busy and (urgent or not self._urgent))
            self._urgent -= urgent
            self._is_busy = True
        try:
            yield
        finally:
            with self._turns:
                self._is_busy = False
                self._turns.notify_all()

    def _ask(self, question: Mapping[str, Any], *, urgent: bool = False) -> Iterator[Any]:
        with self._turn(urgent=urgent):
            process = self._process
            assert process is not None and process.stdin and process.stdout, "start comes first"  # noqa: PT018
            try:
                process.stdin.write(json.dumps({"folder": str(Path.cwd()), "settings": _settings(), **question}) + "\n")
                process.stdin.flush()
            except OSError:
                raise TrackingError("the process that sends to it has ended") from None
            for line in process.stdout:
                match json.loads(line):
                    case {"told": one}:
                        yield one
                    case {"failed": why}:
                        raise TrackingError(why)
                    case _:
                        return
            raise TrackingError("the process that sends to it has ended")


COURIER = Courier()
"""Of this process."""
atexit.register(COURIER.stop)


def _settings() -> dict[str, str]:
    """What MLflow reads from the environment."""
    return {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}


def _answer(question: Mapping[str, Any]) -> Iterator[Any]:
    import mlflow

    os.chdir(question["folder"])  # a store's URI may be relative
    for name in _settings().keys() - question["settings"].keys():
        del os.environ[name]
    os.environ.update(question["settings"])
    match question:
        case {"uri": uri, "create": told}:
            yield mlflow.MlflowClient(uri).create_run(**told).info.run_id
        case {"uri": uri, "deliver": {"run": run, "part": part, "taken": taken, "failed": failed}}:
            mlflow.set_tracking_uri(uri)  # where artifacts go is looked up there
            yield from delivery.deliver(mlflow.MlflowClient(uri), run, Part(Path(part)), taken, failed=failed)


def main() -> None:
    """Answer until nobody can ask any more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what MLflow prints is no answer
    os.nice(NICE)
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            asked.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    import mlflow.store.tracking.sqlalchemy_store
    import mlflow.tracing.client  # noqa: F401 - before they are needed

    while True:
        try:
            for told in _answer(json.loads(asked.get())):
                print(json.dumps({"told": told}), file=answers)
        except Exception as error:  # noqa: BLE001 - stores raise what they like
            print(json.dumps({"failed": store.one_line(error)}), file=answers)
        else:
            print(json.dumps({"over": True}), file=answers)
