"""The client-side journal: order, coalescing, resumption, and the two ways to end."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import EngineError, ErrorReason, InvariantError
from services.gateway.journal import StreamJournal
from services.gateway.ports import Finish, FinishReason, TokenEvent

FINISH = Finish(FinishReason.LENGTH, None, num_prompt_tokens=3, num_output_tokens=2, num_cached_tokens=0)


async def test_read_takes_everything_that_waits_as_one_event():
    journal = StreamJournal()
    journal.append(0, [5])
    journal.append(1, [6, 7])
    assert await journal.read() == TokenEvent(0, (5, 6, 7), None)
    journal.append(3, [8], FINISH)
    assert await journal.read() == TokenEvent(3, (8,), FINISH)


async def test_read_ends_the_iteration_after_the_finish_was_read():
    journal = StreamJournal()
    journal.append(0, [5], FINISH)
    await journal.read()
    with pytest.raises(StopAsyncIteration):
        await journal.read()


async def test_read_gives_what_waits_before_it_raises_the_failure_again_and_again():
    journal = StreamJournal()
    journal.append(0, [5])
    journal.fail(EngineError(ErrorReason.STEP_FAILED, "broken"))
    assert await journal.read() == TokenEvent(0, (5,), None)
    for _ in range(2):
        with pytest.raises(EngineError, match="broken"):
            await journal.read()


async def test_read_loses_nothing_when_it_is_interrupted():
    journal = StreamJournal()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await journal.read()
    journal.append(0, [5])
    assert await journal.read() == TokenEvent(0, (5,), None)


async def test_append_wakes_a_reader_that_waits():
    journal = StreamJournal()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(journal.read())
        await asyncio.sleep(0)
        journal.append(0, [5])
    assert reading.result().token_ids == (5,)


async def test_append_is_refused_when_positions_are_missing():
    journal = StreamJournal()
    journal.append(0, [5])
    with pytest.raises(InvariantError, match="without a gap"):
        journal.append(2, [7])


async def test_append_is_refused_when_a_known_position_changes():
    journal = StreamJournal()
    journal.append(0, [5, 6])
    with pytest.raises(InvariantError, match="are the same"):
        journal.append(1, [9, 7])


async def test_append_is_ignored_after_the_end():
    journal = StreamJournal()
    journal.append(0, [5], FINISH)
    journal.append(1, [6])
    journal.fail(EngineError(ErrorReason.STEP_FAILED, "late"))
    assert journal.token_ids == (5,)
    assert await journal.read() == TokenEvent(0, (5,), FINISH)


@given(
    st.lists(st.integers(0, 9), max_size=20), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8)
)
async def test_append_keeps_one_copy_of_each_position_when_parts_arrive_again(token_ids, parts):
    journal = StreamJournal()
    for start, length in parts:
        start = min(start, journal.num_tokens)
        journal.append(start, token_ids[start : start + length])
    journal.append(0, token_ids)
    assert list(journal.token_ids) == token_ids
