"""How many calls are in flight: more while that brings more a second, fewer where the server cannot take them."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

START = 64
HOLD = 2
"""After a step back, so many rounds pass before the next step up."""
NOISE = 0.25
"""Refusals in a round, as a share of the calls allowed, that may have nothing to do with how many there are."""
GAIN = 1.05
"""A step up that does not bring so much more a second is taken back."""


class Pace:
    """Doubles the calls in flight, round by round, up to `most` or to the first sign that they are too many.

    A round is as many calls as were allowed at its start. The signs are refusals by the server (`overloaded`), which
    say that the calls then running are about what it takes, and a round that ended no faster than the smaller one
    before it. Afterwards steps up are small and rare. A few refusals in a round are no sign: some servers refuse calls
    at any load.
    """

    def __init__(self, most: int) -> None:
        self.limit = min(START, most)
        self._most = most
        self._running = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._doubling = True
        self._hold = 0
        self._refused = 0
        self._left = self.limit
        self._full = True
        self._began = time.monotonic()
        self._before: tuple[int, float] = (0, 0.0)  # the limit and the calls a second of the last round that counts

    @asynccontextmanager
    async def turn(self, *, ahead: bool = False) -> AsyncIterator[None]:
        """Wait for one's turn, in the order of asking or `ahead` of the others."""
        if self._running >= self.limit or self._queue:
            waiter = asyncio.get_running_loop().create_future()
            (self._queue.appendleft if ahead else self._queue.append)(waiter)
            try:
                await waiter  # whoever wakes it has counted it
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._leave()
                else:
                    self._queue.remove(waiter)
                raise
        else:
            self._running += 1
        try:
            yield
        finally:
            self._leave()

    def served(self) -> None:
        """A call had a reply, of whatever use."""
        self._full &= self._running >= self.limit
        self._left -= 1
        if self._left <= 0:
            self._end_round()

    def overloaded(self) -> None:
        """A call was refused. Where many are, those that run are about what it takes, if they are most."""
        self._refused += 1
        if self._refused <= NOISE * self.limit:
            return
        self._doubling = False
        self._hold = HOLD
        self._set(min(self.limit, max(1, self._running - 1, self.limit * 9 // 10)))

    def _end_round(self) -> None:
        self._refused = 0
        rate = self.limit / max(time.monotonic() - self._began, 1e-9)
        limit_before, rate_before = self._before
        if not self._full:  # the work, not the limit, decided
            self._set(self.limit)
        elif limit_before < self.limit and limit_before and rate < GAIN * rate_before:
            self._doubling = False
            self._hold = HOLD
            self._before = (0, 0.0)
            self._set(limit_before)
        elif self._hold:
            self._hold -= 1
            self._set(self.limit)
        else:
            self._before = (self.limit, rate)
            self._set(self.limit * 2 if self._doubling else self.limit + max(1, self.limit // 10))

    def _set(self, limit: int) -> None:
        """Begin a round."""
        self.limit = min(limit, self._most)
        self._left, self._full, self._began = self.limit, True, time.monotonic()
        self._wake()

    def _leave(self) -> None:
        self._running -= 1
        self._wake()

    def _wake(self) -> None:
        while self._queue and self._running < self.limit:
            waiter = self._queue.popleft()
            if not waiter.done():
                self._running += 1
                waiter.set_result(None)
