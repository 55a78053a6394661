"""The pace against a server of this event loop that takes only so many calls at once."""

import asyncio

import pytest

from gradeflow.llm.pace import START, Pace

CALL_S = 0.01


class Server:
    def __init__(self, most: int) -> None:
        self.most = most
        self.now = self.peak = self.refused = 0

    async def call(self, pace: Pace) -> None:
        """One call, with as many tries as it needs."""
        again = False
        while True:
            async with pace.turn(ahead=again):
                if self.now < self.most:
                    self.now += 1
                    self.peak = max(self.peak, self.now)
                    await asyncio.sleep(CALL_S)
                    self.now -= 1
                    pace.served()
                    return
                self.refused += 1
                pace.overloaded()
            again = True
            await asyncio.sleep(CALL_S / 2)


def run(server: Server, pace: Pace, calls: int) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*(server.call(pace) for _ in range(calls)))

    asyncio.run(all_of_them())


@pytest.mark.parametrize("most", [1, 5, 40, 100])
def test_it_finds_what_the_server_takes(most: int) -> None:
    server, pace = Server(most), Pace(256)
    run(server, pace, 20 * most + 100)
    assert server.peak == most
    assert pace.limit <= 1.3 * most + 1


def test_it_never_runs_more_than_it_may() -> None:
    server, pace = Server(10_000), Pace(48)
    run(server, pace, 500)
    assert server.peak == 48
    assert server.refused == 0


def test_it_begins_small() -> None:
    assert Pace(1000).limit == START
    assert Pace(3).limit == 3


def test_refusals_that_have_nothing_to_do_with_it_do_not_wear_it_down() -> None:
    async def with_hiccups() -> Pace:
        pace = Pace(64)

        async def call(number: int) -> None:
            async with pace.turn():
                await asyncio.sleep(CALL_S)
                pace.overloaded() if number % 10 == 0 else pace.served()

        await asyncio.gather(*(call(number) for number in range(3000)))
        return pace

    assert asyncio.run(with_hiccups()).limit > 48


def test_turns_come_in_order_but_for_those_that_go_ahead() -> None:
    async def order() -> list[str]:
        pace, found = Pace(1), []

        async def call(name: str, *, ahead: bool = False) -> None:
            async with pace.turn(ahead=ahead):
                found.append(name)
                await asyncio.sleep(CALL_S)

        calls = [asyncio.create_task(call(name)) for name in "abc"]
        await asyncio.sleep(0)
        await asyncio.gather(*calls, asyncio.create_task(call("again", ahead=True)))
        return found

    assert asyncio.run(order()) == ["a", "again", "b", "c"]


def test_who_stops_waiting_takes_no_turn() -> None:
    async def leave() -> list[int]:
        pace, found = Pace(1), []

        async def call(number: int) -> None:
            async with pace.turn():
                found.append(number)
                await asyncio.sleep(CALL_S)

        calls = [asyncio.create_task(call(number)) for number in range(4)]
        await asyncio.sleep(CALL_S / 2)
        calls[1].cancel()  # it waits
        calls[0].cancel()  # it has its turn
        await asyncio.wait(calls)
        return found

    assert asyncio.run(leave()) == [0, 2, 3]
