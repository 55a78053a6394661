"""Brings what waits in an outbox to the store: in a thread for a run that goes on, at once for those that ended."""

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from gradeflow.redact import redact
from gradeflow.tracking import store, traces
from gradeflow.tracking.outbox import REFUSED, Busy, Entry, Outbox, Part

POINTS, PAIRS = 800, 100
"""Of one batch: the metric points, and the params or tags. MLflow takes 1000 things at once."""
PACE_S = 5.0
PAUSE_S = 15.0
# What the store says of an entry that it will never take. BAD_REQUEST is also its word for a lost database.
_REFUSALS = frozenset({"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"})
_TABLES = "mlflow.loggedArtifacts"
Thing = tuple[str, Sequence[Any]]
"""`metrics`, `params` or `tags`, and what MLflow makes one of."""
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

    At the run's end nothing may get through for `away_s` to a store that is away, and for `slow_s` to one that has
    neither taken nor failed what it was sent last; for `soon_s`, where its user waits for the command to end.
    """

    away_s, slow_s, soon_s = 15.0, 120.0, 5.0

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.refused: list[str] = []
        self.trouble = ""
        self._run = outbox.folder.name
        self._client = store.client()
        self._part: Part | None = None
        self._left: deque[Entry] = deque()
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
        while part := self._part or self._take():
            while self._left:
                with TURN:
                    self._send_or_refuse(self._left[0])
                self._left.popleft()
                self._moved = time.monotonic()
            part.remove()
            self._part = None
            self._news.set()

    def _take(self) -> Part | None:
        if part := self.outbox.take():
            self._part, self._left = part, deque(in_batches(part.entries()))
        return part

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

    def _send_or_refuse(self, entry: Entry) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._send(entry)
        except MlflowException as error:
            if error.error_code not in _REFUSALS:
                raise
            batch = entry.get("batch", ())
            if (half := len(batch) // 2) > 0:
                self._send_or_refuse({"batch": batch[:half]})
                self._send_or_refuse({"batch": batch[half:]})
            else:
                self.refused.append(store.one_line(error))
                self.outbox.refuse(entry, self.refused[-1])

    def _send(self, entry: Entry) -> None:
        match entry:
            case {"batch": batch}:
                self._send_batch(batch)
            case {"dataset": dataset}:
                self._send_dataset(dataset)
            case {"file": file, "folder": folder}:
                self._send_files(file, folder)
            case {"trace": trace}:
                traces.send(trace, self._client.tracking_uri)
            case {"end": status, "at": at}:
                self._client.set_terminated(self._run, "FAILED" if self.refused else status, end_time=at)
            case _:
                raise ValueError(f"an entry that no one knows how to send: {sorted(entry)}")
        if "table" in entry:
            self._list_table(entry["table"])

    def _send_batch(self, batch: Sequence[Thing]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        of_kind: dict[str, list[Any]] = {"metrics": [], "params": [], "tags": []}
        made = {"metrics": Metric, "params": Param, "tags": RunTag}
        for kind, fields in batch:
            of_kind[kind].append(made[kind](*fields))
        self._client.log_batch(self._run, of_kind["metrics"], of_kind["params"], of_kind["tags"])

    def _send_dataset(self, dataset: Mapping[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        read = Dataset(dataset["name"], dataset["digest"], source_type="local", source=dataset["source"])
        tags = [InputTag(key, value) for key, value in dataset["tags"].items()]
        self._client.log_inputs(self._run, datasets=[DatasetInput(read, tags=tags)])

    def _send_files(self, name: str, folder: str | None) -> None:
        assert self._part
        self._client.log_artifacts(self._run, str(self._part.folder / name), folder)

    def _list_table(self, name: str) -> None:
        """Put the table on the list that `mlflow.load_table` and the UI read."""
        listed = json.loads(self._client.get_run(self._run).data.tags.get(_TABLES, "[]"))
        if (table := {"path": name, "type": "table"}) not in listed:
            self._client.set_tag(self._run, _TABLES, json.dumps([*listed, table]))


def in_batches(entries: Iterable[Entry]) -> Iterator[Entry]:
    """All metrics, params and tags in as few batches as the store takes, then the rest in its order."""
    points: list[Thing] = []
    params: dict[str, str] = {}
    tags: dict[str, str] = {}
    rest: list[Entry] = []
    for entry in entries:
        match entry:
            case {"metrics": metrics, "at": at, "step": step}:
                points += [("metrics", (name, value, at, step)) for name, value in metrics.items()]
            case {"params": more}:
                params |= more
            case {"tags": more}:
                tags |= more
            case _:
                rest.append(entry)
    kinds = (
        _chunks(points, POINTS),
        _chunks([("params", one) for one in params.items()], PAIRS),
        _chunks([("tags", one) for one in tags.items()], PAIRS),
    )
    for batch in zip_longest(*kinds, fillvalue=()):
        yield {"batch": [*chain(*batch)]}
    yield from rest


def _chunks(things: Sequence[Thing], size: int) -> Iterator[Sequence[Thing]]:
    return (things[start : start + size] for start in range(0, len(things), size))


def _say(line: str) -> None:
    print(f"gradeflow: {line}", file=sys.stderr, flush=True)
