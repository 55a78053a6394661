"""Hands the parts of an outbox to MLflow's client: all points, params and tags in as few batches as the store takes."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any

from gradeflow.tracking import store, traces
from gradeflow.tracking.outbox import Entry, Part

if TYPE_CHECKING:
    import mlflow

POINTS, PAIRS = 800, 100
"""Of one batch: the metric points, and the params or tags. MLflow takes 1000 things at once."""
# What the store says of an entry that it will never take. BAD_REQUEST is also its word for a lost database.
_REFUSALS = frozenset({"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"})
_TABLES = "mlflow.loggedArtifacts"
Thing = tuple[str, Sequence[Any]]
"""`metrics`, `params` or `tags`, and what MLflow makes one of."""


def deliver(client: "mlflow.MlflowClient", run: str, part: Part, taken: int, *, failed: bool) -> Iterator[list[str]]:
    """Send what is left of a part whose first `taken` entries the store has. Yields once for each further entry.

    What is yielded is why the store will never take the entry, or things of it: nothing, mostly. With such a refusal,
    or where some were `failed` before, the run ends as FAILED. Whatever else the store raises passes.
    """
    sending = _Sending(client, run, part)
    for entry in islice(in_batches(part.entries()), taken, None):
        refused = sending.send({**entry, "end": "FAILED"} if "end" in entry and failed else entry)
        failed = failed or bool(refused)
        yield refused


class _Sending:
    def __init__(self, client: "mlflow.MlflowClient", run: str, part: Part) -> None:
        self._client = client
        self._run = run
        self._part = part

    def send(self, entry: Entry) -> list[str]:
        """Returns why the store will never take it, or things of it."""
        from mlflow.exceptions import MlflowException

        try:
            self._send(entry)
        except MlflowException as error:
            if error.error_code not in _REFUSALS:
                raise
            batch = entry.get("batch", ())
            if (half := len(batch) // 2) > 0:
                return self.send({"batch": batch[:half]}) + self.send({"batch": batch[half:]})
            why = store.one_line(error)
            self._part.refuse(entry, why)
            return [why]
        return []

    def _send(self, entry: Entry) -> None:
        match entry:
            case {"batch": batch}:
                self._send_batch(batch)
            case {"dataset": dataset}:
                self._send_dataset(dataset)
            case {"file": file, "folder": folder}:
                self._client.log_artifacts(self._run, str(self._part.folder / file), folder)
            case {"trace": trace}:
                traces.send(trace, self._client.tracking_uri)
            case {"end": status, "at": at}:
                self._client.set_terminated(self._run, status, end_time=at)
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
