"""Which transports two nodes can use between them: probed once, then chosen by preference."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from nearkv.transfer.backends.contract import Probe
from nearkv.transfer.errors import PullError, Reason


class BackendProbes:
    """The transports of this node; each is probed once, in a throw-away mover."""

    def __init__(self, names: Sequence[str], probe: Callable[[str], Awaitable[Probe]]) -> None:
        self._names = tuple(names)
        self._probe = probe
        self._found: dict[str, Probe] = {}
        self._run: asyncio.Task[None] | None = None

    @property
    def found(self) -> Mapping[str, Probe]:
        """What is known so far."""
        return self._found

    async def get(self) -> Mapping[str, Probe]:
        """Return all probes by name, waiting for the first run to end.

        Giving up on it (a deadline, a cancelled pull) leaves the run to others.
        """
        if self._run is None:
            self._run = asyncio.create_task(self._probe_all())
        await asyncio.shield(self._run)
        return self._found

    async def close(self) -> None:
        """End a run that is under way."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)

    async def _probe_all(self) -> None:
        for name in self._names:
            self._found[name] = await self._probe(name)


def usable_backends(
    preferred: Iterable[str], probes: Mapping[str, Probe], *, require_rdma: bool
) -> list[str]:
    """Return the transports to try, best first; raises :class:`PullError` when none is left.

    The message says of each what is against it.
    """
    usable = [name for name in preferred if name in probes and probes[name].usable]
    allowed = [name for name in usable if probes[name].rdma or not require_rdma]
    if allowed:
        return allowed
    if usable:
        raise PullError(
            Reason.RDMA_REQUIRED, f"RDMA is required, and is not what {', '.join(usable)} uses"
        )
    against = "; ".join(f"{name}: {probe.detail}" for name, probe in probes.items())
    raise PullError(Reason.NO_PATH, f"no transport is usable on both nodes ({against})")


def retry_backends(tried: Sequence[str], failed: str, reason: Reason) -> list[str]:
    """Return what to try after a failed pull; empty where another try cannot help.

    A broken connection or data may be chance, so the last transport gets a second try.
    """
    if reason not in (Reason.PEER_LOST, Reason.NO_PATH, Reason.CORRUPT):
        return []
    after = list(tried[tried.index(failed) + 1 :]) if failed in tried else []
    return after or ([] if reason is Reason.NO_PATH else [failed])
