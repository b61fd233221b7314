import asyncio
import os
import signal

import pytest

from nearkv.demo.interrupting import run_interruptibly


async def _answer():
    return 42


async def _fail():
    raise ValueError("no engine")


def test_result_and_errors_come_through():
    assert run_interruptibly(_answer()) == 42
    with pytest.raises(ValueError, match="no engine"):
        run_interruptibly(_fail())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_clean_up_is_finished_in_spite_of_a_second_signal(number):
    steps = []

    async def work():
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), number)
            for _ in range(10):  # rounds of the loop, in which the signal is delivered
                await asyncio.sleep(0)
            steps.append("stopped")

    assert run_interruptibly(work()) is None
    assert steps == ["stopped"]
