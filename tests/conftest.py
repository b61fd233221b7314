"""Set-up shared by all tests."""

import asyncio


def pytest_configure() -> None:
    """Keep pytest-asyncio on Python 3.11 from making an event loop that nobody closes."""
    asyncio.set_event_loop(None)
