"""A function applied to many items on all cores."""

import gc
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

from rich.progress import Progress

Item = TypeVar("Item")
Shared = TypeVar("Shared")
Found = TypeVar("Found")

FEW = 6
"""So many items are done before another process would have started."""
_shared: Any = None


def each(
    function: Callable[[Item, Shared], Found],
    items: Sequence[Item],
    shared: Shared,
    progress: Progress,
    said: str,
) -> Iterator[Found]:
    """`function(item, shared)` of each item, in their order; `shared` travels to each process once.

    Only a few results wait for whoever takes them. The bar is called what is `said`.
    """
    found = (function(item, shared) for item in items) if len(items) <= FEW else _spread(function, items, shared)
    yield from progress.track(found, total=len(items), description=said)


def _spread(function: Callable[[Item, Shared], Found], items: Sequence[Item], shared: Shared) -> Iterator[Found]:
    count = os.cpu_count() or 1
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    with ProcessPoolExecutor(count, context, initializer=_keep, initargs=(shared,)) as executor:
        waiting: deque[Future[Found]] = deque()
        try:
            for item in items:
                if len(waiting) > 2 * count:
                    yield waiting.popleft().result()
                waiting.append(executor.submit(_call, function, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _keep(shared: Any) -> None:
    """What rows leave behind has no cycles, and looking for some among all that is shared would cost a fifth."""
    global _shared  # noqa: PLW0603 - a process has one, for as long as it lives
    _shared = shared
    gc.disable()


def _call(function: Callable[[Any, Any], Found], item: Any) -> Found:
    return function(item, _shared)
