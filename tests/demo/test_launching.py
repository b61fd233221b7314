import asyncio
import os
import signal
import sys

import pytest

from nearkv.demo.errors import LaunchError
from nearkv.demo.launching import ProcessSpec, launch, running, wait_until_ready

SLEEP = "import time; time.sleep(60)"
STUBBORN_CHILD = f"""
import os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    time.sleep(60)
{SLEEP}
"""


def spec(tmp_path, code):
    return ProcessSpec(
        name="engine-a",
        command=(sys.executable, "-c", code),
        env={"GREETING": "hello"},
        log_path=tmp_path / "logs" / "engine-a.log",
    )


def log_probe(spec, text=b"\n"):
    async def has_logged():
        return text in spec.log_path.read_bytes()

    return has_logged


async def never():
    return False


def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_ready_process_gets_its_environment_and_logs(tmp_path):
    shout = spec(tmp_path, f"import os; print(os.environ['GREETING'], flush=True); {SLEEP}")
    lines = []
    async with running(shout) as process:
        await wait_until_ready(
            process, log_probe(shout), deadline_seconds=20, progress=lines.append
        )
        assert process.exit_status is None
    assert shout.log_path.read_text() == "hello\n"
    assert lines[-1].startswith("engine-a: ready after ")
    assert process.exit_status == -signal.SIGTERM


async def test_progress_tells_the_stage_that_the_log_shows(tmp_path):
    shout = spec(tmp_path, f"print('loading', flush=True); {SLEEP}")
    lines = []

    async def stage_was_told():
        return any("stage loading" in line for line in lines)

    async with running(shout) as process:
        await wait_until_ready(
            process,
            stage_was_told,
            deadline_seconds=20,
            stage_of=lambda log: f"stage {log}",
            progress=lines.append,
        )


async def test_death_shows_status_and_end_of_log(tmp_path):
    failing = spec(tmp_path, "print('no such model'); raise SystemExit(7)")
    async with running(failing) as process:
        with pytest.raises(LaunchError, match=r"(?s)engine-a: ended with status 7.*no such model"):
            await wait_until_ready(process, never, deadline_seconds=20)


async def test_slow_process_is_given_up_at_the_deadline(tmp_path):
    async with running(spec(tmp_path, SLEEP)) as process:
        with pytest.raises(LaunchError, match="not ready after 0 s"):
            await wait_until_ready(process, never, deadline_seconds=0.1)
    assert process.exit_status is not None


async def test_stopping_ends_children_that_ignore_the_request(tmp_path):
    family = spec(tmp_path, STUBBORN_CHILD)
    process = await launch(family)
    await wait_until_ready(process, log_probe(family), deadline_seconds=20)
    child_pid = int(family.log_path.read_text())
    assert exists(child_pid)
    await process.stop(deadline_seconds=0.3)
    assert not exists(child_pid)


async def test_process_that_died_can_be_stopped(tmp_path):
    process = await launch(spec(tmp_path, SLEEP))
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    await process.stop()


async def test_cancelled_block_stops_its_process(tmp_path):
    started = asyncio.get_running_loop().create_future()

    async def run_for_ever():
        async with running(spec(tmp_path, SLEEP)) as process:
            started.set_result(process)
            await asyncio.Event().wait()

    task = asyncio.ensure_future(run_for_ever())
    process = await started
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert process.exit_status == -signal.SIGTERM


async def test_missing_program_is_named(tmp_path):
    missing = ProcessSpec(
        name="engine-a", command=("/nowhere/python",), env={}, log_path=tmp_path / "log"
    )
    with pytest.raises(LaunchError, match="cannot start /nowhere/python"):
        await launch(missing)
