"""Many simulated agents on one server, each below a path of its own: ``python -m ... 1000``.

Each has one engine that holds some thousand blocks, a third of them the same on all nodes, and
says once a second what a busy engine says: blocks that came and went, its load, a heartbeat. Its
summary changes every half minute. ``/bench/bytes`` answers what was sent so far, by kind.
"""

import asyncio
import random
import sys
from collections.abc import Iterator

import msgspec
from aiohttp import web

from nearkv.agent.state_log import StateLog
from nearkv.node_summary import SUMMARY_PATH, GroupSummary, NodeSummary
from nearkv.serving import run, running
from nearkv.settings import Address
from nearkv.state.model import EngineGauges, EngineInfo, EngineState, EventsState

BLOCKS = 2000
_SHARED_BLOCKS = 700
_CHANGED_BLOCKS = 10
_SUMMARY_SECONDS = 30.0


class SimulatedAgent:
    """One agent: a real log of changes, without engines behind it."""

    def __init__(self, number: int, sent: dict[str, int]) -> None:
        self._random = random.Random(number)
        self._sent = sent
        self._name = f"node-{number}"
        self._log = StateLog(boot="b", node=self._name, version="1", ring_limit_bytes=1 << 16)
        self._keys = [random.Random(i).getrandbits(64) for i in range(_SHARED_BLOCKS)]
        self._keys += [self._random.getrandbits(64) for _ in range(BLOCKS - _SHARED_BLOCKS)]
        self._news = asyncio.Event()
        self._seq = 1
        self._engine = f"engine-{number}"
        self._log.put_info(
            EngineInfo(
                id=self._engine,
                incarnation="1",
                url=f"http://10.0.{number >> 8}.{number & 255}:8000",
                node=self._name,
                model="m",
                models=("m",),
                state=EngineState.READY,
                events=EventsState.LIVE,
                block_size=16,
                key_model="m",
            )
        )
        self._put_gauges()
        self._log.seal()

    def add_routes(self, app: web.Application, prefix: str) -> None:
        """Add the routes that an ingress and an extender ask."""
        app.router.add_get(f"{prefix}/v1/state/stream", self.stream)
        app.router.add_get(prefix + SUMMARY_PATH, self.summary)

    def _put_gauges(self) -> None:
        self._log.put_gauges(
            EngineGauges(
                id=self._engine,
                kv_used_ratio=self._random.random(),
                kv_total_tokens=1 << 19,
                kv_total_bytes=60 << 30,
                requests_running=self._random.randrange(32),
                requests_waiting=0,
            )
        )

    async def live(self) -> None:
        """Change once a second, out of step with the others."""
        await asyncio.sleep(self._random.random())
        turn = 0
        while True:
            turn += 1
            gone = self._keys[_SHARED_BLOCKS : _SHARED_BLOCKS + _CHANGED_BLOCKS]
            del self._keys[_SHARED_BLOCKS : _SHARED_BLOCKS + _CHANGED_BLOCKS]
            came = [self._random.getrandbits(64) for _ in range(_CHANGED_BLOCKS)]
            self._keys += came
            changes = self._log.blocks_of(self._engine)
            changes.remove("GPU", gone)
            changes.add("GPU", came)
            self._put_gauges()
            self._log.seal()
            if turn % _SUMMARY_SECONDS == self._random.randrange(int(_SUMMARY_SECONDS)):
                self._seq += 1
            news, self._news = self._news, asyncio.Event()
            news.set()
            await asyncio.sleep(1.0)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Serve a snapshot, then deltas with a heartbeat each."""
        response = web.StreamResponse()
        await response.prepare(request)
        cursor = self._log.cursor
        blocks: Iterator[tuple[str, str, list[int]]] = iter([(self._engine, "GPU", self._keys)])
        await self._write(response, list(self._log.snapshot(blocks, now=0.0)))
        while True:
            frames = self._log.after(cursor)
            assert frames is not None
            if frames:
                cursor = self._log.cursor
                await self._write(response, [*frames, self._log.heartbeat({self._engine: 0.1})])
            else:
                await self._news.wait()

    async def _write(self, response: web.StreamResponse, frames: list[bytes]) -> None:
        data = b"".join(frames)
        self._sent["state"] += len(data)
        await response.write(data)

    async def summary(self, request: web.Request) -> web.Response:
        """Answer the summary, or hold the question back while there is no news."""
        known = request.query.get("after")
        give_up_at = asyncio.get_running_loop().time() + float(request.query["wait_seconds"])
        while known == f"b:{self._seq}":
            left = give_up_at - asyncio.get_running_loop().time()
            if left <= 0:
                self._sent["summary"] += 200
                return web.Response(status=304)
            await asyncio.sleep(min(1.0, left))
        group = GroupSummary(
            group="m",
            engines=1,
            held_bytes=self._random.randrange(60 << 30),
            free_bytes=self._random.randrange(60 << 30),
            total_bytes=60 << 30,
        )
        answer = NodeSummary(
            node=self._name, boot="b", seq=self._seq, interval_seconds=5.0, groups=(group,)
        )
        body = msgspec.json.encode(answer)
        self._sent["summary"] += len(body) + 200
        return web.Response(body=body)


async def _serve(count: int) -> None:
    sent = {"state": 0, "summary": 0}
    app = web.Application()
    agents = [SimulatedAgent(number, sent) for number in range(count)]
    for number, agent in enumerate(agents):
        agent.add_routes(app, f"/n/{number}")

    async def tell(_request: web.Request) -> web.Response:
        return web.json_response(sent)

    app.router.add_get("/bench/bytes", tell)
    async with running(app, Address("127.0.0.1", 0)) as address, asyncio.TaskGroup() as tasks:
        for agent in agents:
            tasks.create_task(agent.live())
        sys.stdout.write(address.url + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    run(_serve(int(sys.argv[1])))
