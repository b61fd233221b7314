"""What makes a mover die in time (docs/adr/0006): the kernel does it, not the mover.

A mover that was stopped (SIGSTOP, a frozen cgroup) cannot look at a clock, and goes on writing
into the engine's blocks where it left off when somebody lets it run again. So before a pull
begins, the kernel is told to kill the process at the pull's deadline and some grace: a POSIX
timer on CLOCK_MONOTONIC, with an absolute time, whose signal is SIGKILL. SIGKILL takes stopped
processes as well, and none of their threads runs another instruction.

Why not SIGALRM with its default action: it waits in a stopped process until SIGCONT, and then
one thread takes it off the queue before it tells the others to end; they may run meanwhile.
Native libraries may also have handlers for it (UCX can), nobody can have one for SIGKILL.
"""

import ctypes
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_CLOCK_MONOTONIC = 1
_TIMER_ABSTIME = 1
_SIGEV_SIGNAL = 0
_SIGEVENT_BYTES = 64
_COREDUMP_FILTER = Path("/proc/self/coredump_filter")
_ELF_HEADERS_ONLY = "0x10"


class _SignalEvent(ctypes.Structure):
    """``struct sigevent``; the rest of it is padding for what is not used here."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * (_SIGEVENT_BYTES - 16)),
    )


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _Time), ("value", _Time))


class KillTimer:
    """Kills this process at a time; raises ``OSError`` where the kernel has no such timer."""

    def __init__(self) -> None:
        self._library = _library_with("timer_create")
        self._timer = ctypes.c_void_p()
        event = _SignalEvent(signal=signal.SIGKILL, notify=_SIGEV_SIGNAL)
        self._call("timer_create", _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer))

    def arm(self, at_ms: int) -> None:
        """Set the time, in milliseconds of CLOCK_MONOTONIC; one in the past kills at once."""
        seconds, milliseconds = divmod(max(at_ms, 1), 1000)
        self._set(_Time(seconds, milliseconds * 1_000_000))

    def disarm(self) -> None:
        """Let the process live."""
        self._set(_Time(0, 0))

    def _set(self, time: _Time) -> None:
        spec = _TimerSpec(_Time(0, 0), time)
        self._call("timer_settime", self._timer, _TIMER_ABSTIME, ctypes.byref(spec), None)

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._library, name)(*arguments):
            code = ctypes.get_errno()
            raise OSError(code, f"{name}: {os.strerror(code)}")


def _library_with(function: str) -> ctypes.CDLL:
    """Return the C library; before glibc 2.34 timers had a library of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, function) else ctypes.CDLL("librt.so.1", use_errno=True)


def die_with_parent() -> None:
    """Be killed when the thread that started this process ends, however it does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl: {os.strerror(code)}")


def leave_signals_to_parent() -> None:
    """Pass over what a terminal or service manager sends to the whole group.

    The agent decides in which order things end; a mover ends with it in any case.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def dump_no_memory() -> None:
    """Keep KV, which is prompts, out of core dumps, and a crash from waiting for one.

    Where dumps go to a program the size limit does not count, but the filter does.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        _COREDUMP_FILTER.write_text(_ELF_HEADERS_ONLY)
