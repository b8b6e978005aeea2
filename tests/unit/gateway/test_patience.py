import asyncio

import pytest

from services.gateway.patience import Patience


async def test_wait_over_its_time_ends_with_a_timeout():
    patience, never = Patience(), asyncio.Event()
    with pytest.raises(TimeoutError), patience.within(0.01):
        await never.wait()
    # The task is not left in a cancelled state: the next wait is an ordinary one.
    assert asyncio.current_task().cancelling() == 0
    with patience.within(10):
        await asyncio.sleep(0)
    patience.close()


async def test_time_that_has_passed_ends_the_first_wait():
    patience = Patience()
    with pytest.raises(TimeoutError), patience.until(asyncio.get_running_loop().time() - 1):
        await asyncio.Event().wait()


async def test_waits_in_time_share_one_timer():
    loop, patience, num_timers = asyncio.get_running_loop(), Patience(), 0
    call_at = loop.call_at

    def counting(*arguments, **options):
        nonlocal num_timers
        num_timers += 1
        return call_at(*arguments, **options)

    loop.call_at = counting
    try:
        for _ in range(100):
            with patience.within(30):
                await asyncio.sleep(0)
    finally:
        loop.call_at = call_at
        patience.close()
    assert num_timers == 1


async def test_an_earlier_bound_than_the_timers_counts():
    patience = Patience()
    with patience.within(30):
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError), patience.within(0.01):
        await asyncio.Event().wait()


async def test_timer_of_an_earlier_wait_does_not_end_a_later_one():
    patience, is_done = Patience(), asyncio.Event()
    with patience.within(0.01):
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.05, is_done.set)
    with patience.within(30):
        await is_done.wait()
    patience.close()


async def test_later_wait_ends_at_its_own_time_when_an_earlier_timer_fires_before():
    loop, patience = asyncio.get_running_loop(), Patience()
    with patience.within(0.01):
        await asyncio.sleep(0)
    begin_s = loop.time()
    with pytest.raises(TimeoutError), patience.until(begin_s + 0.05):
        await asyncio.Event().wait()
    assert loop.time() >= begin_s + 0.05


async def test_cancellation_from_elsewhere_stays_one():
    patience, is_waiting = Patience(), asyncio.Event()

    async def wait() -> None:
        with patience.within(30):
            is_waiting.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(wait())
        await is_waiting.wait()
        task.cancel()
    assert task.cancelled()
    patience.close()


async def test_cancellation_in_the_same_moment_as_the_end_of_the_time_is_not_lost():
    patience, is_waiting = Patience(), asyncio.Event()

    async def wait() -> None:
        with patience.within(0):
            is_waiting.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(wait())
        await is_waiting.wait()
        task.cancel()  # the timer is due, and fires in the same turn of the loop
        patience._fire()
    assert task.cancelled()


async def test_failure_of_the_block_is_its_own():
    patience = Patience()
    with pytest.raises(KeyError), patience.within(30):
        raise KeyError
    patience.close()


async def test_nothing_is_left_to_fire_after_close():
    patience = Patience()
    with patience.within(30):
        await asyncio.sleep(0)
    timer = patience._timer
    patience.close()
    assert timer.cancelled()
    assert patience._timer is None
