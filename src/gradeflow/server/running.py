"""A gateway with its catalogue, as params.yaml asks for them, before whatever answers."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gradeflow import tracking
from gradeflow.adapter import Backend
from gradeflow.params import Params
from gradeflow.server import metrics
from gradeflow.server.catalogue import Catalogue, Engine, Reference
from gradeflow.server.gateway import App, Exchange, Gateway, Limits

CACHE = Path(".gradeflow/adapters")
SETTINGS = "GRADEFLOW_SERVE"
"""Names the file with the settings."""
KEY = "GRADEFLOW_SERVE_KEY"
"""Has the key that clients must send: a command line can be read by every user of the machine."""
RUN = "GRADEFLOW_SERVE_RUN"
"""The run that traces belong to."""

MOST_TRACES = 100
"""Of those that wait to be sent."""
log = logging.getLogger(__name__)


def references(settings: Params) -> tuple[Reference, ...]:
    """Raises:
    SettingsError: one is no reference.
    """
    return tuple(dict.fromkeys(map(Reference.of, settings.serve.models)))


def gateway(
    app: App, engine: Engine, settings: Params, *, backend: Backend, key: str, run_id: str, cache: Path = CACHE
) -> Gateway:
    """With a `key` all but what says that it lives asks for it; traces belong to the run."""
    told = settings.serve
    catalogue = Catalogue(
        references(settings),
        settings.base,
        cache,
        engine,
        backend,
        switched=metrics.switched,
        was_refused=metrics.refused,
    )
    limits = Limits(told.max_tokens, told.max_request_kib * 1024, told.max_concurrency)
    return Gateway(app, catalogue, limits, [key] if key else [], told.trace_share, tracer(run_id), told.poll_s)


def tracer(run_id: str) -> Callable[[Exchange], None]:
    """Sends exchanges to MLflow from a thread; one that cannot be sent soon is lost, as those not sampled are."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="traces")
    waiting: set[asyncio.Task[None]] = set()

    async def send(exchange: Exchange) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(thread, record, exchange, run_id)
        except Exception as error:  # noqa: BLE001 - whatever it is, replies do not depend on it
            log.warning("a trace is lost: %s", error)

    def traced(exchange: Exchange) -> None:
        if len(waiting) >= MOST_TRACES:
            return
        task = asyncio.create_task(send(exchange))
        waiting.add(task)
        task.add_done_callback(waiting.discard)

    return traced


def record(exchange: Exchange, run_id: str) -> None:
    """A request and its reply as a trace."""
    served = exchange.served
    tracking.record_call(
        exchange.path.removeprefix("/v1/"),
        exchange.body,
        {"reply": exchange.reply.decode(errors="replace")},
        seconds=exchange.ended - exchange.began,
        run=run_id,
        tags={
            "gradeflow.serve.name": exchange.name,
            "gradeflow.serve.version": served.model,
            "gradeflow.adapter.digest": served.version.digest,
            "gradeflow.serve.status": str(exchange.status),
        },
    )
