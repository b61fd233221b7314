"""Following an InferencePool and its pods for ever.

While the pool cannot be read, its last membership stays. A pool that is deleted, or that
selects nothing it could mean, has no members: nothing is picked, and the reason is told.
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import msgspec
import structlog

from nearkv.ingress.api_access import api_access
from nearkv.ingress.extproc.endpoints import Membership
from nearkv.ingress.extproc.pool import (
    InferencePool,
    members,
    pods_path,
    pools_path,
    why_unusable,
)
from nearkv.ingress.extproc.settings import PoolSettings
from nearkv.kube.access import ApiAccess
from nearkv.kube.events import ChangeKind
from nearkv.kube.keeping import KeptObjects
from nearkv.kube.objects import Pod
from nearkv.kube.watching import Watch, WatchLimits

_NOBODY = Membership()

log = structlog.get_logger(__name__)


class PoolWatch:
    """Keeps the membership of one pool."""

    def __init__(
        self,
        access: ApiAccess,
        *,
        name: str,
        namespace: str,
        count_failure: Callable[[str], None],
        limits: WatchLimits | None = None,
    ) -> None:
        self._access = access
        self._name = name
        self._namespace = namespace
        self._count_failure = count_failure
        self._limits = limits
        self._pool: InferencePool | None = None
        self._pods: KeptObjects[Pod] = KeptObjects(self._take_pods)
        self._membership = _NOBODY
        self._pool_changed = asyncio.Event()
        self.problem = f"the pool {namespace}/{name} was not read yet"
        """Why there are no members, empty where there may be."""
        self.was_read = False
        """Whether the pool and its pods were ever read, or it was told that there is no pool."""

    def membership(self) -> Membership:
        """Return the members; the same object for as long as nothing changes."""
        return self._membership

    async def run(self) -> NoReturn:
        """Follow until cancelled."""
        pools = Watch(
            self._access,
            pools_path(self._namespace),
            decode=msgspec.json.Decoder(InferencePool).decode,
            on_replace=self._replace_pool,
            on_change=self._change_pool,
            field_selector=f"metadata.name={self._name}",
            count_failure=self._count_failure,
            limits=self._limits,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pools.run())
            await self._follow_pods(tasks)
        raise AssertionError("unreachable")

    async def _follow_pods(self, tasks: asyncio.TaskGroup) -> NoReturn:
        """Watch the pods that the pool selects, anew whenever it selects others."""
        following: asyncio.Task[NoReturn] | None = None
        selector = ""
        while True:
            await self._pool_changed.wait()
            self._pool_changed.clear()
            wanted = "" if self._pool is None else self._pool.label_selector
            if wanted != selector:
                if following is not None:
                    following.cancel()
                    await asyncio.wait([following])
                selector = wanted
                following = tasks.create_task(self._pod_watch(wanted).run()) if wanted else None
            self._work_out()

    def _pod_watch(self, selector: str) -> Watch[Pod]:
        return Watch(
            self._access,
            pods_path(self._namespace),
            decode=msgspec.json.Decoder(Pod).decode,
            on_replace=self._pods.replace,
            on_change=self._pods.change,
            label_selector=selector,
            count_failure=self._count_failure,
            limits=self._limits,
        )

    # -- What the watches say ----------------------------------------------------------

    def _replace_pool(self, pools: list[InferencePool]) -> None:
        named = [pool for pool in pools if pool.metadata.name == self._name]
        self._take_pool(named[0] if named else None)

    def _change_pool(self, kind: ChangeKind, pool: InferencePool) -> None:
        if pool.metadata.name == self._name:
            self._take_pool(None if kind == "DELETED" else pool)

    def _take_pool(self, pool: InferencePool | None) -> None:
        name = f"{self._namespace}/{self._name}"
        why = "it does not exist" if pool is None else why_unusable(pool)
        self.problem = f"the pool {name} has no members: {why}" if why else ""
        if why:
            log.warning("pool_unusable", pool=name, why=why)
        self._pool = None if why else pool
        self.was_read |= bool(why)
        self._pool_changed.set()

    def _take_pods(self) -> None:
        self.was_read = True
        self._work_out()

    def _work_out(self) -> None:
        found = _NOBODY if self._pool is None else members(self._pool, self._pods)
        if found != self._membership:
            self._membership = found
            log.info("pool_members", pool=self._name, endpoints=found.endpoints()[:20])


def make_pool_watch(
    pool: PoolSettings,
    count_failure: Callable[[str], None],
) -> tuple[PoolWatch | None, ApiAccess | None]:
    """Return the watch of the pool that settings name, and the access that it needs open."""
    if not pool.name:
        return None, None
    access = api_access(pool.kubeconfig, pool.api_server)
    return (
        PoolWatch(access, name=pool.name, namespace=pool.namespace, count_failure=count_failure),
        access,
    )
