"""Handles in an event loop: what wakes it, and what collects."""

import asyncio

import pytest

from exl2nb.generator.handle import Channel, Handle, Handles
from exl2nb.generator.request import Completion, Timings, Token

FOREVER_S = 1e6  # a rest that only the end of the request ends


def token(text):
    return Token(1, text, 0.0, 1.0, 1, (), "target")


def ended(channel):
    timings = Timings(
        prompt_tokens=1, new_tokens=1, queue_s=0.0, first_token_s=0.0, prefill_s=0.0, decode_s=0.0, reused_tokens=0, preemptions=0
    )
    channel.end(Completion(text="", tokens=(), finish_reason="length", timings=timings, seed=0))


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_tokens_collect_after_the_first_chunk_and_come_at_the_end():
    async def run():
        channel = Channel()
        handle, came = Handle(channel), []

        async def read():
            async for chunk in handle.achunks(FOREVER_S):
                came.append(chunk.text)

        reading = asyncio.ensure_future(read())
        await settle()
        channel.put([token("a")])
        await settle()
        assert came == ["a"], "the first comes at once"
        for text in "bcd":
            channel.put([token(text)])
            await settle()
        assert came == ["a"]
        ended(channel)
        await reading
        return came

    assert asyncio.run(run()) == ["a", "bcd"]


def test_without_an_interval_each_comes_at_once():
    async def run():
        channel = Channel()
        handle, came = Handle(channel), []

        async def read():
            async for chunk in handle.achunks():
                came.append(chunk.text)

        reading = asyncio.ensure_future(read())
        for text in "abc":
            channel.put([token(text)])
            await settle()
        ended(channel)
        await reading
        return came

    assert asyncio.run(run()) == ["a", "b", "c"]


def test_several_handles_collect_together_and_any_end_wakes_them():
    async def run():
        channels = [Channel(), Channel()]
        handles, came = Handles([Handle(channel) for channel in channels]), []

        async def read():
            async for item in handles.achunks(FOREVER_S):
                came.append((item[0], item[1].text))

        reading = asyncio.ensure_future(read())
        await settle()
        channels[0].put([token("a")])
        await settle()
        channels[1].put([token("x")])
        channels[0].put([token("b")])
        await settle()
        assert came == [(0, "a")]
        ended(channels[1])
        await settle()
        assert came == [(0, "a"), (0, "b"), (1, "x")]
        channels[0].put([token("c")])
        ended(channels[0])
        await reading
        return came

    assert asyncio.run(run())[-1] == (0, "c")


def test_leaving_the_loop_cancels_the_request_and_an_error_is_raised():
    async def leave(channel):
        handle = Handle(channel)
        channel.put([token("a")])
        stream = handle.achunks(FOREVER_S)
        assert (await stream.__anext__()).text == "a"
        await stream.aclose()

    left, failed = Channel(), Channel()
    asyncio.run(leave(left))
    assert left.cancelled

    async def fail():
        failed.end(ValueError("broken"))
        async for _ in Handle(failed).achunks(FOREVER_S):
            pass

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(fail())
