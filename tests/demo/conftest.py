import asyncio


def pytest_configure():
    # On Python 3.11 pytest-asyncio asks for the current loop, which makes one that nobody
    # closes; saying that there is none prevents it.
    asyncio.set_event_loop(None)
