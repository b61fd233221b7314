"""An agent as the ingress hears it: frames with a cursor that is counted on."""

from nearkv.block_keys import pack_keys
from nearkv.state.model import (
    BlockChange,
    Blocks,
    Cursor,
    Delta,
    EngineInfo,
    EngineState,
    Heartbeat,
    SnapshotBegin,
    SnapshotEnd,
)

A, B = "http://agent-a", "http://agent-b"
CHAIN = tuple(range(100, 110))


class Agent:
    """Speaks for one agent, counting its cursor."""

    def __init__(self, fleet, url=A, boot="b1", node="n1"):
        self.fleet = fleet
        self.url = url
        self.node = node
        self.cursor = Cursor(boot, 0, 0)
        fleet.add_agent(url)

    def send(self, frame, now=0.0):
        self.fleet.apply(self.url, frame, now)

    def begin(self, *engines, gauges=(), paths=(), now=0.0):
        begin = SnapshotBegin(
            cursor=self.cursor,
            node=self.node,
            version="1",
            engines=engines,
            gauges=tuple(gauges),
            paths=tuple(paths),
        )
        self.send(begin, now)

    def blocks(self, engine, keys, tier="GPU"):
        self.send(Blocks(engine=engine, tier=tier, keys=pack_keys(keys)))

    def end(self):
        self.send(SnapshotEnd(cursor=self.cursor))

    def snapshot(self, held, **more):
        """Send a whole snapshot: engine to keys."""
        self.begin(*map(engine_info, held), **more)
        for engine, keys in held.items():
            self.blocks(engine, keys)
        self.end()

    def delta(self, now=0.0, **changes):
        self.cursor = Cursor(self.cursor.boot, self.cursor.epoch, self.cursor.seq + 1)
        self.send(Delta(cursor=self.cursor, **changes), now)

    def change(self, engine, *, added=(), removed=(), tier="GPU", cleared=False):
        self.delta(
            blocks=(
                BlockChange(
                    engine=engine,
                    tier=tier,
                    cleared=cleared,
                    added=pack_keys(added),
                    removed=pack_keys(removed),
                ),
            )
        )

    def beat(self, ages, now):
        self.send(Heartbeat(cursor=self.cursor, ages_seconds=ages), now)


def engine_info(engine, **more):
    fields = {"incarnation": "i1", "url": f"http://{engine}", "state": EngineState.READY} | more
    return EngineInfo(id=engine, **fields)
