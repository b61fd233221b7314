"""The checks with other software: torch and the hook, NIXL, and the agent's movers."""

import asyncio
from contextlib import closing

from nearkv.agent.movers.jobs import EngineMemory, PullJob
from nearkv.agent.movers.messages import MemoryForm
from nearkv.agent.movers.pool import MoverPool
from nearkv.transfer.backends.contract import Fence, PullReport, PullRequest, monotonic_ms
from nearkv.transfer.errors import TransferError
from nearkv.transfer.lease import SlotTable
from nearkv.transfer.memory import Memory, create_slots
from nearkv.transfer.messages import CUDA_IPC, CUDA_VMM
from tests.gpu.checks import (
    Sizes,
    allocate,
    digest,
    expect,
    free_bytes,
    hand_over,
    require,
    wait_for,
)
from tests.gpu.patterns import as_layout, digest_of, pattern
from tests.gpu.results import Finding, WrongError
from tests.gpu.stage import Stage
from tests.gpu.wire import close_fds

_MOVER_SECONDS = 30
_SLOTS = 4
_ROUNDS = 3


def check_torch_hook(stage: Stage, sizes: Sizes) -> Finding:
    """Let torch allocate in the hook; what it writes is seen elsewhere, and the other way."""
    size = sizes.shared_bytes
    with stage.player("torch") as engine, stage.player() as reader:
        version = engine.ask("describe_torch")["torch"]
        registered = engine.ask("allocate_torch", name="kv", size_bytes=size, seed=1)
        kind = registered["kind"]
        hand_over(registered, reader, "theirs", writable=True)
        expect(reader, "theirs", 1, size, "the reader sees what torch wrote")
        reader.ask("fill", name="theirs", seed=2)
        seen = engine.ask("digest_torch", name="kv")["digest"]
        require(seen == digest_of(pattern(2, size)), "torch does not see what was written")
        reader.ask("close", name="theirs")
    return Finding(f"torch {version}, {kind}")


def check_readiness(stage: Stage, sizes: Sizes) -> Finding:
    """Read a step's memory as soon as its token was read on the host, and not before.

    The first look is the test of the test: while the device computes, old bytes are there.
    """
    size = sizes.shared_bytes
    with stage.player("torch") as engine, stage.player() as reader:
        registered = engine.ask("allocate_torch", name="kv", size_bytes=size, seed=1)
        hand_over(registered, reader, "theirs", writable=False)
        reader.ask("digest", name="theirs")
        engine.ask("launch_step", name="kv", seed=2)
        early = digest(reader, "theirs")
        waited = engine.ask("read_token")["waited_seconds"]
        expect(reader, "theirs", 2, size, "the reader sees after the token was read")
        reader.ask("close", name="theirs")
    was_early = early != digest_of(pattern(2, size))
    detail = (
        "before the token, other bytes were there"
        if was_early
        else ("the step was over before the first look: this says little")
    )
    return Finding(detail, {"waited_ms": waited * 1000})


def check_nixl(stage: Stage, sizes: Sizes) -> Finding:
    """See how fast NIXL reads device memory within one PID namespace."""
    return _ask_about_nixl(stage, sizes, isolated=False)


def check_nixl_split(stage: Stage, sizes: Sizes) -> Finding:
    """See the same across PID namespaces, as pods have them."""
    return _ask_about_nixl(stage, sizes, isolated=True)


def _ask_about_nixl(stage: Stage, sizes: Sizes, *, isolated: bool) -> Finding:
    figures, troubles = {}, []
    for kind in (CUDA_IPC, CUDA_VMM):
        try:
            figures[f"{kind}_gb_per_s"] = _nixl_speed(stage, sizes, kind, isolated=isolated) / 1e9
        except WrongError as error:
            troubles.append(f"{kind}: {error}")
    return Finding("; ".join(troubles), figures, is_question=True)


def _nixl_speed(stage: Stage, sizes: Sizes, kind: str, *, isolated: bool) -> float:
    size = sizes.shared_bytes
    with (
        stage.player("nixl", isolated=isolated) as source,
        stage.player("nixl", isolated=isolated) as reader,
    ):
        for player, seed in ((source, 1), (reader, 2)):
            close_fds(allocate(player, kind, size, seed=seed)["fds"])
        offered = source.ask("nixl_begin", agent="source", name="own")
        reader.ask("nixl_begin", agent="reader", name="own")
        read = reader.ask(
            "nixl_read",
            name="own",
            metadata=offered["metadata"],
            place=offered["place"],
            rounds=_ROUNDS,
        )
        expect(reader, "own", 1, size, "the reader holds")
    return float(read["bytes_per_second"])


def check_movers(stage: Stage, sizes: Sizes) -> Finding:
    """Pull with the agent's own movers, and have them let go of an engine that leaves."""
    size = sizes.shared_bytes
    with (
        stage.player() as watcher,
        stage.player() as p,
        stage.player() as d,
        closing(create_slots(_SLOTS)) as slots,
    ):
        ours, theirs = (allocate(engine, "", size, seed) for engine, seed in ((d, 2), (p, 1)))
        try:
            report = asyncio.run(
                _pull(
                    _memory_of(ours, "d", slots, sizes),
                    _memory_of(theirs, "p", slots, sizes),
                    _fence(slots),
                )
            )
        except TransferError as error:
            raise WrongError(f"{error.reason}: {error}") from error
        finally:
            close_fds(ours["fds"])
            close_fds(theirs["fds"])
        expect(d, "own", 1, size, "D holds after the pull")
        before = free_bytes(watcher)
        p.ask("close", name="own")
        wait_for(watcher, before + size // 2, "after P's memory was closed")
    require(report.path.name == "cuda", f"the path was {report.path.name}")
    return Finding(report.path.detail, {"gb_per_s": report.size_bytes / report.seconds / 1e9})


def _fence(slots: Memory) -> Fence:
    expires_at_ms = monotonic_ms() + 2000 * _MOVER_SECONDS
    return Fence(0, SlotTable(slots.view).open(0, expiry_ms=expires_at_ms))


def _memory_of(
    registered: dict[str, object], key: str, slots: Memory, sizes: Sizes
) -> EngineMemory:
    fds = registered["fds"]
    assert isinstance(fds, list)  # for the type checker
    return EngineMemory(
        key=key,
        fd=fds[0] if fds else slots.fd,  # memory with a handle has no descriptor
        layout=as_layout(sizes.shared_bytes, sizes.layers, sizes.block_bytes),
        slots_fd=slots.fd,
        slots=_SLOTS,
        form=MemoryForm(
            kind=str(registered["kind"]),
            device=str(registered["device"]),
            handle=bytes.fromhex(str(registered["handle"])),
        ),
    )


async def _pull(target: EngineMemory, source: EngineMemory, fence: Fence) -> PullReport:
    """Pull everything twice, so that a warm pull is reported; then drop the source."""
    blocks = tuple(range(source.layout.blocks))
    request = PullRequest(
        ticket=b"", first_block=0, source_blocks=blocks, source_layout=source.layout,
        target_blocks=blocks, fence=fence,
    )  # fmt: skip
    pool = MoverPool()
    try:
        for _ in range(2):
            report = await pool.pull(
                PullJob(
                    target=target,
                    request=request,
                    deadline_ms=monotonic_ms() + 1000 * _MOVER_SECONDS,
                    source=source,
                    backend="cuda",
                )
            )
        await pool.drop(source.key)
        if pool.counts.ended.total():
            raise WrongError("a mover was killed, as it did not let go of the memory in time")
        return report
    finally:
        await pool.close()
