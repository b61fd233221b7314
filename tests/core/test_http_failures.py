"""Failed requests are explained in words, without a library's innards."""

import socket

import aiohttp
import pytest

from nearkv.http_failures import explain_failure


@pytest.fixture
def unused_url():
    with socket.socket() as held:  # bound, but not listening
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


async def test_a_refused_connection_is_called_so(unused_url):
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError) as caught:
            await session.get(unused_url)
    assert explain_failure(caught.value) == "cannot connect: Connection refused"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError(), "no answer in time"),
        (aiohttp.ServerTimeoutError("late"), "no answer in time"),
        (aiohttp.ClientPayloadError("cut off"), "ClientPayloadError: cut off"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_others_are_named(error, expected):
    assert explain_failure(error) == expected
