"""Runs the command line as its users do: in a process of its own, output piped."""

import asyncio
import os
import sys

DEADLINE_SECONDS = 50


async def run_cli(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run ``nearkv``; return exit status, standard output and standard error.

    The environment holds no ``NEARKV_*`` but those given.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("NEARKV_")}
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nearkv.cli", *arguments),
        env=inherited | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(program.communicate(), DEADLINE_SECONDS)
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    return program.returncode or 0, out.decode(), err.decode()
