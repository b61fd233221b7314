"""An extender that serves over a snapshot made by hand, and a client like kube-scheduler."""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from nearkv.extender.app import TRANSPORT, build_app
from nearkv.extender.model import Snapshot
from nearkv.extender.settings import ExtenderSettings
from nearkv.extender.view.cluster import ViewStats
from nearkv.serving import running
from nearkv.settings import Address
from tests.extender.snapshots import Group, Node, make_snapshot

CAPTURED = Path(__file__).parents[1] / "data" / "kube-scheduler"
DEADLINE_SECONDS = 30.0
ANY_PORT = Address("127.0.0.1", 0)
OURS = {"nearkv.io/group": "g", "nearkv.io/role": "decode"}


class FixedView:
    """A view that knows one snapshot, or none."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self.known = snapshot

    def snapshot(self) -> Snapshot | None:
        return self.known

    def stats(self) -> ViewStats | None:
        return None

    async def wait_until_synced(self) -> None:
        return None

    async def run(self) -> None:
        return None


def captured(name: str) -> bytes:
    """Return a body that a real kube-scheduler sent."""
    return (CAPTURED / f"{name}.body.json").read_bytes()


def small_cluster(**changes: Any) -> Snapshot:
    """Return racks r1 (gpu-00000, gpu-00001) and r2 (gpu-00002, gpu-00003); the KV is on 00000."""
    nodes = [
        Node(
            name=f"gpu-0000{i}",
            labels=(f"r{1 + i // 2}", "z", "e"),
            rdma=1,
            reported_at=time.monotonic(),
            **changes.get(f"gpu-0000{i}", {}),
        )
        for i in range(4)
    ]
    groups = {
        "g": Group(
            held={"gpu-00000": 4e9},
            held_at=time.monotonic(),
            prefill={"gpu-00000": 1},
            kv_bytes_per_token=131072.0,
            prefill_tokens_per_second=8000.0,
        )
    }
    return make_snapshot(nodes, groups=groups)


def question(
    names: Sequence[str] | None = None,
    *,
    nodes: Sequence[dict[str, Any]] | None = None,
    labels: dict[str, str] | None = None,
    gpus: int = 1,
    uid: str = "u1",
    name: str = "decode-1",
) -> bytes:
    """Return the body of filter and prioritize for a pod of ours."""
    pod = {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid,
            "labels": OURS if labels is None else labels,
        },
        "spec": {"containers": [{"resources": {"requests": {"nvidia.com/gpu": str(gpus)}}}]},
    }
    listed = None if nodes is None else {"metadata": {}, "items": list(nodes)}
    return json.dumps({"Pod": pod, "Nodes": listed, "NodeNames": names}).encode()


@dataclass(slots=True)
class RunningExtender:
    """An extender that serves, with a client's session."""

    url: str
    app: web.Application
    view: FixedView
    session: aiohttp.ClientSession

    async def post(self, verb: str, body: bytes, **headers: str) -> tuple[int, Any]:
        """Post a body as kube-scheduler does; return status and answer."""
        async with self.session.post(
            f"{self.url}/v1/{verb}",
            data=io.BytesIO(body),
            headers={"Content-Type": "application/json", "Content-Length": str(len(body))}
            | headers,
        ) as response:
            return response.status, await response.json(content_type=None)

    async def scores(self, body: bytes) -> dict[str, int]:
        """Return the scores of prioritize by node."""
        status, answer = await self.post("prioritize", body)
        assert status == 200
        assert all(type(entry["Score"]) is int for entry in answer)
        return {entry["Host"]: entry["Score"] for entry in answer}

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Get JSON; return status and answer."""
        async with self.session.get(self.url + path, headers=headers) as response:
            text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text

    async def series(self, name: str) -> dict[str, float]:
        """Return the samples of a series by what stands between its braces."""
        async with self.session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        found = {}
        for line in lines:
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == f"nearkv_extender_{name}":
                found[head.partition("{")[2].rstrip("}")] = float(value)
        return found


async def until(check: Callable[[], Awaitable[object]], *, what: str) -> None:
    """Wait until what is asked over HTTP comes true; fails with ``what`` when the time is up."""
    give_up_at = time.monotonic() + DEADLINE_SECONDS
    while not await check():
        assert time.monotonic() < give_up_at, f"never came true: {what}"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def running_extender(
    snapshot: Snapshot | None, *, view_class: type[FixedView] = FixedView, **settings: Any
) -> AsyncIterator[RunningExtender]:
    """Serve an extender over a snapshot."""
    view = view_class(snapshot)
    app = build_app(ExtenderSettings.model_validate(settings), view=view)
    async with (
        running(app, ANY_PORT, transport=app[TRANSPORT]) as address,
        aiohttp.ClientSession() as session,
    ):
        yield RunningExtender(app[TRANSPORT].url_of(address), app, view, session)
