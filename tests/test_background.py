import asyncio
import threading

import pytest

from gradeflow.background import Background


async def where() -> str:
    return threading.current_thread().name


def test_work_runs_in_a_thread_of_its_own_and_its_errors_come_back() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with Background() as background:
        assert background.run(where()) == "gradeflow-background"
        assert background.start(where()).result() == "gradeflow-background"
        with pytest.raises(ZeroDivisionError):
            background.run(fail())


def test_what_still_runs_at_the_end_is_cancelled_and_waited_for() -> None:
    said = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            said.append("cleaned up")

    with Background() as background:
        future = background.start(long())
        background.run(asyncio.sleep(0.01))
    assert said == ["cleaned up"]
    assert future.cancelled()
