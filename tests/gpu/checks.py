"""The checks that need nothing but a GPU and its driver: sharing, copying, letting go."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nearkv.transfer.messages import CUDA_IPC, CUDA_VMM
from tests.gpu.patterns import digest_of, pattern
from tests.gpu.results import Finding, WrongError
from tests.gpu.stage import Peer, Stage
from tests.gpu.wire import close_fds

GIB = 1 << 30
_RETURN_SECONDS = 5.0
_ROUNDS = 3
_MOST = 0.9
"""The part of some memory that must come or go to be seen among all else that happens."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much memory the checks take; whole layers of whole blocks."""

    shared_bytes: int = 256 << 20
    held_bytes: int = GIB
    layers: int = 8
    block_bytes: int = 32 << 10


Check = Callable[[Stage, Sizes], Finding]


def require(condition: object, otherwise: str) -> None:
    """Raise :class:`WrongError` where something is not so."""
    if not condition:
        raise WrongError(otherwise)


def allocate(owner: Peer, kind: str, size_bytes: int, seed: int = 1) -> dict[str, Any]:
    """Have a player allocate memory called ``own``; ``fds`` of the answer are to be closed."""
    return owner.ask("allocate", name="own", kind=kind, size_bytes=size_bytes, seed=seed)


def hand_over(
    registered: dict[str, Any], reader: Peer, name: str, *, writable: bool
) -> dict[str, Any]:
    """Have a player open what another registered; the check keeps no descriptor of it."""
    fields = {key: registered[key] for key in ("kind", "device", "handle", "size_bytes")}
    try:
        return reader.ask("open", registered["fds"], name=name, writable=writable, **fields)
    finally:
        close_fds(registered["fds"])


def digest(peer: Peer, name: str) -> str:
    """Return the digest of a player's memory."""
    return str(peer.ask("digest", name=name)["digest"])


def expect(peer: Peer, name: str, seed: int, size_bytes: int, what: str) -> None:
    """Make sure that a player sees a pattern."""
    require(digest(peer, name) == digest_of(pattern(seed, size_bytes)), f"{what}: other bytes")


def check_sharing(stage: Stage, _sizes: Sizes) -> Finding:
    """See which way of sharing the probe finds."""
    with stage.player() as one:
        described = one.ask("describe")
    require(described["sharing"], f"device memory cannot be shared: {described['detail']}")
    return Finding(f"{described['sharing']}: {described['detail']}")


def see_each_other(stage: Stage, kind: str, size_bytes: int, *, isolated: bool) -> str:
    """Have two processes write and read one memory; returns what the reader may do with it."""
    with stage.player(isolated=isolated) as owner, stage.player(isolated=isolated) as reader:
        registered = allocate(owner, kind, size_bytes, seed=1)
        opened = hand_over(registered, reader, "theirs", writable=kind != CUDA_VMM)
        expect(reader, "theirs", 1, size_bytes, "the reader sees")
        owner.ask("fill", name="own", seed=2)
        expect(reader, "theirs", 2, size_bytes, "the reader sees after a change")
        reader.ask("close", name="theirs")
        return str(opened["access"])


def write_into_each_other(stage: Stage, size_bytes: int, *, isolated: bool) -> None:
    """Have one process write into another's memory."""
    with stage.player(isolated=isolated) as owner, stage.player(isolated=isolated) as writer:
        registered = allocate(owner, CUDA_VMM, size_bytes, seed=1)
        hand_over(registered, writer, "theirs", writable=True)
        writer.ask("fill", name="theirs", seed=3)
        expect(owner, "own", 3, size_bytes, "the owner sees")
        writer.ask("close", name="theirs")


def check_descriptors(stage: Stage, sizes: Sizes) -> Finding:
    """Share memory by descriptor between two processes."""
    access = see_each_other(stage, CUDA_VMM, sizes.shared_bytes, isolated=False)
    write_into_each_other(stage, sizes.shared_bytes, isolated=False)
    return Finding(f"sources are mapped {access}")


def check_descriptors_split(stage: Stage, sizes: Sizes) -> Finding:
    """Do the same with processes in PID namespaces of their own, as pods are."""
    access = see_each_other(stage, CUDA_VMM, sizes.shared_bytes, isolated=True)
    write_into_each_other(stage, sizes.shared_bytes, isolated=True)
    return Finding(f"sources are mapped {access}")


def check_handles(stage: Stage, sizes: Sizes) -> Finding:
    """See whether legacy IPC handles work."""
    return _ask_about_handles(stage, sizes, isolated=False)


def check_handles_split(stage: Stage, sizes: Sizes) -> Finding:
    """See whether legacy IPC handles cross PID namespaces: sources disagree."""
    return _ask_about_handles(stage, sizes, isolated=True)


def _ask_about_handles(stage: Stage, sizes: Sizes, *, isolated: bool) -> Finding:
    try:
        see_each_other(stage, CUDA_IPC, sizes.shared_bytes, isolated=isolated)
    except WrongError as error:
        return Finding(f"does not work: {error}", is_question=True)
    return Finding("works", is_question=True)


def check_device_copies(stage: Stage, sizes: Sizes) -> Finding:
    """Pull between two engines' memories as a mover does, and measure it."""
    size = sizes.shared_bytes
    blocks = {"layers": sizes.layers, "block_bytes": sizes.block_bytes}
    with stage.player() as p, stage.player() as d, stage.player() as mover:
        hand_over(allocate(p, CUDA_VMM, size, seed=1), mover, "p", writable=False)
        hand_over(allocate(d, CUDA_VMM, size, seed=2), mover, "d", writable=True)
        raw = mover.ask("raw_copy", source="p", target="d", rounds=_ROUNDS)
        figures = {"raw_gb_per_s": raw["bytes_per_second"] / 1e9}
        for in_order in (True, False):
            d.ask("clear", name="own")
            pulled = mover.ask(
                "pull", source="p", target="d", path="cuda", in_order=in_order, rounds=_ROUNDS,
                **blocks,
            )  # fmt: skip
            expect(d, "own", 1, size, "D holds after a pull")
            name = "in_order" if in_order else "scattered"
            figures[f"{name}_gb_per_s"] = pulled["bytes_per_second"] / 1e9
            figures[f"{name}_copies"] = pulled["pieces"]
    return Finding(f"{pulled['path']}, {pulled['detail']}", figures)


def check_staged_stream(stage: Stage, sizes: Sizes) -> Finding:
    """Pull over TCP on the loopback, through pinned memory at both ends."""
    size = sizes.shared_bytes
    with stage.player() as mover:
        for name, seed in (("own", 1), ("target", 2)):
            made = mover.ask("allocate", name=name, kind=CUDA_VMM, size_bytes=size, seed=seed)
            close_fds(made["fds"])
        pulled = mover.ask(
            "pull", source="own", target="target", path="tcp", in_order=False, rounds=_ROUNDS,
            layers=sizes.layers, block_bytes=sizes.block_bytes,
        )  # fmt: skip
        expect(mover, "target", 1, size, "the target holds")
    return Finding(pulled["detail"], {"gb_per_s": pulled["bytes_per_second"] / 1e9})


def check_pinned(stage: Stage, sizes: Sizes) -> Finding:
    """Copy between the device and a pinned memfd, as a host cache would."""
    with stage.player() as one:
        found = one.ask("pinned", size_bytes=sizes.shared_bytes, rounds=_ROUNDS)
    require(found["right"], "the host holds other bytes than were sent to the device and back")
    return Finding(
        figures={f"{way}_gb_per_s": found[way] / 1e9 for way in ("to_device", "to_host")}
    )


def free_bytes(watcher: Peer) -> int:
    """Return the device's free memory."""
    return int(watcher.ask("free_bytes")["free_bytes"])


def wait_for(watcher: Peer, at_least: int, what: str) -> float:
    """Wait until so much is free; returns the seconds it took."""
    began = time.monotonic()
    while (free := free_bytes(watcher)) < at_least:
        if time.monotonic() - began > _RETURN_SECONDS:
            raise WrongError(f"{what}: {free / GIB:.2f} GiB free, wanted {at_least / GIB:.2f}")
        time.sleep(0.02)
    return time.monotonic() - began


def check_killed_engine(stage: Stage, sizes: Sizes) -> Finding:
    """Kill an engine: its memory stays with its reader, and is free once that lets go."""
    size, most = sizes.held_bytes, int(sizes.held_bytes * _MOST)
    with stage.player() as watcher, stage.player() as reader:
        reader.ask("hold_context")
        at_first = free_bytes(watcher)
        with stage.player() as owner:
            hand_over(allocate(owner, CUDA_VMM, size), reader, "theirs", writable=False)
            owner.kill()
        require(at_first - free_bytes(watcher) >= most, "the memory went with its engine")
        expect(reader, "theirs", 1, size, "the reader sees after the engine's death")
        reader.ask("close", name="theirs")
        seconds = wait_for(watcher, at_first - (size - most), "after the reader let go")
    return Finding(figures={"gib": size / GIB, "seconds": seconds})


def check_held_descriptor(stage: Stage, sizes: Sizes) -> Finding:
    """Hold nothing but a descriptor of a dead engine's memory, as the agent's process does."""
    size, most = sizes.held_bytes, int(sizes.held_bytes * _MOST)
    with stage.player() as watcher:
        at_first = free_bytes(watcher)
        with stage.player() as owner:
            registered = allocate(owner, CUDA_VMM, size)
            owner.kill()
        try:
            time.sleep(0.5)  # the driver clears away after a process in its own time
            kept = at_first - free_bytes(watcher) >= most
        finally:
            close_fds(registered["fds"])
        seconds = wait_for(watcher, at_first - (size - most), "after the descriptor was closed")
    detail = "the descriptor alone keeps the memory" if kept else "it does not keep the memory"
    return Finding(detail, {"seconds": seconds})


def check_context_cost(stage: Stage, _sizes: Sizes) -> Finding:
    """See how much of the device one more process takes that does nothing."""
    with stage.player() as watcher:
        before = free_bytes(watcher)
        with stage.player() as idle:
            idle.ask("hold_context")
            taken = before - free_bytes(watcher)
    return Finding(figures={"mib_per_process": taken / (1 << 20)}, is_question=True)
