"""Brings what waits in an outbox to the store: in a thread for a run that goes on, at once for those that ended."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gradeflow.redact import redact
from gradeflow.tracking import delivery, store
from gradeflow.tracking.courier import Courier
from gradeflow.tracking.outbox import REFUSED, Busy, Outbox, Part

PACE_S = 5.0
PAUSE_S = 15.0
TURN = threading.Lock()
"""Runs of one process write by turns: SQLite makes writers that meet wait longer than each of them writes."""


def send_what_waits(outboxes: Path) -> None:
    """Send what runs of this folder left unsent when they ended or were killed, as far as the store knows the runs."""
    from mlflow.exceptions import MlflowException

    for folder in sorted(outboxes.iterdir()) if outboxes.exists() else ():
        with suppress(Busy):
            outbox = Outbox(folder)
            try:
                if not outbox.is_empty():
                    store.client().get_run(folder.name)
                    _say(f"sending what an earlier command logged in run {folder.name} and could not send")
                    sender = Sender(outbox)
                    sender.send()
                    if sender.refused:
                        _say(sender.refusals())
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            finally:
                outbox.close()


class Sender:
    """Sends the entries of one run, each until the store takes or refuses it. `trouble` says why it does not answer.

    A `courier` computes for it; without one it is done here.

    At the run's end nothing may get through for `away_s` to a store that is away, and for `slow_s` to one that has
    neither taken nor failed what it was sent last; for `soon_s`, where its user waits for the command to end.
    """

    away_s, slow_s, soon_s = 15.0, 120.0, 5.0

    def __init__(self, outbox: Outbox, courier: Courier | None = None) -> None:
        self.outbox = outbox
        self.refused: list[str] = []
        self.trouble = ""
        self._run = outbox.folder.name
        self._client = store.client()
        self._courier = courier
        self._part: Part | None = None
        self._taken = 0
        self._moved = time.monotonic()
        self._wake, self._news = threading.Event(), threading.Event()
        self._hurry = self._ending = False
        self._thread = threading.Thread(target=self._work, name=f"sender of run {self._run}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self, *, soon: bool = False) -> bool:
        """Wait until the store has all; False when it takes too long."""
        began = time.monotonic()
        self._hurry = True
        self._wake.set()
        while not self.outbox.is_empty():
            limit = self.soon_s if soon else self.away_s if self.trouble else self.slow_s
            if time.monotonic() - max(began, self._moved) > limit:
                return False
            self._news.wait(0.25)
            self._news.clear()
        self._hurry = False
        return True

    def stop(self) -> None:
        """End the thread and close the outbox; where it waits for the store, when that has answered or failed."""
        self._ending = True
        self._wake.set()
        self._thread.join(timeout=1.0)

    def send(self) -> None:
        """Send all that waits. Whatever the store raises passes, and what it has not taken stays."""
        while part := self._part or self.outbox.take():
            self._part = part
            for refused in self._deliver(part):
                self.refused += refused
                self._taken += 1
                self._moved = time.monotonic()
            part.remove()
            self._part, self._taken = None, 0
            self._news.set()

    def _deliver(self, part: Part) -> Iterator[list[str]]:
        failed = bool(self.refused)
        if self._courier and self._courier.ready:
            uri = self._client.tracking_uri
            yield from self._courier.deliver(uri, self._run, part, self._taken, failed=failed)
        else:
            sending = delivery.deliver(self._client, self._run, part, self._taken, failed=failed)
            while True:
                with TURN:
                    if (refused := next(sending, None)) is None:
                        return
                yield refused

    def refusals(self) -> str:
        return (
            f"run {self._run}: the tracking store refused {len(self.refused)} of the things logged, the first because: "
            f"{self.refused[0]}. They are in {self.outbox.folder / REFUSED}"
        )

    def _work(self) -> None:
        pause = PACE_S
        while not self._ending:
            self._wake.wait(PACE_S / 4 if self._hurry else pause)
            self._wake.clear()
            try:
                self.send()
            except Exception as error:  # noqa: BLE001 - stores raise what they like; it is said, and tried again
                self._failed(error)
                self._news.set()
                pause = min(2 * pause, PAUSE_S)
            else:
                self._answered()
                pause = PACE_S
        self.outbox.close()

    def _failed(self, error: Exception) -> None:
        before, self.trouble = self.trouble, redact(f"{self._client.tracking_uri}: {store.one_line(error)}")
        if not before:
            _say(f"{self.trouble}. The run goes on; what it logs waits in {self.outbox.folder}")

    def _answered(self) -> None:
        if self.trouble:
            _say("the tracking store answers again, and has all that waited")
        self.trouble = ""


def _say(line: str) -> None:
    print(f"gradeflow: {line}", file=sys.stderr, flush=True)
