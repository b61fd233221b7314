"""Asking transports whether they work, each in a process of its own.

Native libraries may hang or crash when loaded; here that is a finding. They are reached by
their modules, because importing the agent would bring more than a probe needs.
"""

import asyncio
import contextlib
import signal
import sys

import msgspec

from nearkv.cli.doctor_checks import Finding, Verdict

BACKENDS = {
    "tcp": ("nearkv.transfer.backends.tcp", "TcpBackend"),
    "ucx": ("nearkv.transfer.backends.ucx", "UcxBackend"),
    "nixl": ("nearkv.transfer.backends.nixl", "NixlBackend"),
}
PROBE_SECONDS = 15.0
_MARK = b"nearkv-probe:"
# It ends as movers do, without the interpreter's end: NIXL 1.5.1 crashes there (SIGSEGV, seen
# after each probe that had answered), which says nothing about its transfers.
_PROGRAM = """
import importlib, os, sys
import msgspec
module, attribute = sys.argv[1:]
probe = getattr(importlib.import_module(module), attribute)().probe()
print("nearkv-probe:" + msgspec.json.encode(probe).decode(), flush=True)
os._exit(0)
"""
_ADVICE = {
    "ucx": "pip install ucxx-cu12",
    "nixl": "pip install --no-deps nixl-cu12==1.5.1 nixl==1.5.1",
}
_MISBEHAVES = "leave it out of transfer.paths, or try another version of its library"
_LONGEST_DETAIL = 300


class _Probe(msgspec.Struct, frozen=True):
    usable: bool
    rdma: bool = False
    detail: str = ""


async def probe_all(*, timeout_seconds: float = PROBE_SECONDS) -> list[Finding]:
    """Probe all transports at the same time; never raises."""
    probes = (
        probe_backend(name, *where, timeout_seconds=timeout_seconds)
        for name, where in BACKENDS.items()
    )
    return list(await asyncio.gather(*probes))


async def probe_backend(
    name: str, module: str, attribute: str, *, timeout_seconds: float
) -> Finding:
    """Probe one transport; a crash or silence of ``timeout_seconds`` makes it unusable."""
    try:
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PROGRAM, module, attribute),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        return _unusable(name, f"no process can be started: {error.strerror}")
    try:
        out, err = await asyncio.wait_for(program.communicate(), timeout_seconds)
    except TimeoutError:
        return _unusable(name, f"no answer within {timeout_seconds:g} s", advice=_MISBEHAVES)
    finally:
        if program.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                program.kill()
            await program.wait()
    return _judge(name, program.returncode, out, err)


def _judge(name: str, code: int | None, out: bytes, err: bytes) -> Finding:
    if code is not None and code < 0:
        return _unusable(name, f"the probe was killed by {_signal_name(-code)}", advice=_MISBEHAVES)
    # Libraries may print lines of their own.
    answers = [line for line in out.splitlines() if line.startswith(_MARK)]
    if code or not answers:
        last = err.decode(errors="replace").strip().rpartition("\n")[2] or f"exit status {code}"
        return _unusable(name, last)
    probe = msgspec.json.decode(answers[-1].removeprefix(_MARK), type=_Probe)
    if not probe.usable:
        return _unusable(name, probe.detail)
    rdma = "RDMA; " if probe.rdma else ""
    return Finding(check=f"transport {name}", verdict=Verdict.OK, finding=rdma + probe.detail)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _unusable(name: str, detail: str, *, advice: str = "") -> Finding:
    # Without TCP there is no way to other nodes at all; the others are faster ways.
    return Finding(
        check=f"transport {name}",
        verdict=Verdict.FAIL if name == "tcp" else Verdict.WARN,
        finding=f"not usable: {detail[:_LONGEST_DETAIL]}",
        advice=advice or _ADVICE.get(name, "install nearkv again"),
    )
