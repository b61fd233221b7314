import sys
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from nearkv.demo.errors import LaunchError
from nearkv.demo.launching import ProcessSpec, running
from nearkv.demo.stage import casualties, enter_together


@asynccontextmanager
async def resource(name, log, *, fails=False):
    log.append(f"{name} starts")
    try:
        if fails:
            raise LaunchError(f"{name} died")
        yield name
    finally:
        log.append(f"{name} stops")


async def test_contexts_entered_together_keep_their_order():
    async with AsyncExitStack() as stack:
        names = await enter_together(stack, [resource("a", []), resource("b", [])])
    assert names == ("a", "b")


async def test_one_failure_stops_the_others_and_is_raised_itself():
    log = []
    with pytest.raises(LaunchError, match="b died"):
        async with AsyncExitStack() as stack:
            await enter_together(stack, [resource("a", log), resource("b", log, fails=True)])
    assert sorted(log) == ["a starts", "a stops", "b starts", "b stops"]


async def test_dead_process_is_described_with_its_log(tmp_path):
    spec = ProcessSpec(
        name="engine-a",
        command=(sys.executable, "-c", "print('out of memory'); raise SystemExit(9)"),
        env={},
        log_path=tmp_path / "log",
    )
    async with running(spec) as process:
        await process.wait()
        [description] = casualties([process])
    assert "engine-a ended with status 9" in description
    assert "out of memory" in description
