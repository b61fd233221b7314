"""The fleet: every engine that agents speak of, and their blocks in the index (pure).

Frames of agents' streams go in; what each engine is, does and holds comes out, each reading
with the time it was taken. A lost agent's engines stay, with growing ages: the article's
"mark unknown, but keep what was known" (8.2).

A new snapshot is built beside the old state in slots of its own and takes over in one step
at its end, so that there is neither a gap nor a ghost.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nearkv.block_keys import unpack_keys
from nearkv.errors import NearkvError
from nearkv.ingress.path_knowledge import AgentPaths, path_between
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.ingress.tiers import DEVICE, faster_depths, rank_of
from nearkv.state.model import (
    BlockChange,
    Blocks,
    Cursor,
    Delta,
    EngineGauges,
    EngineInfo,
    EngineState,
    Frame,
    Heartbeat,
    PathReading,
    SnapshotBegin,
    SnapshotEnd,
)

_ANY_MODEL = "*"
_PATH_AGED_SECONDS = 900.0


class StreamProtocolError(NearkvError):
    """An agent's frames contradict each other; the stream must start over."""


@dataclass(slots=True)
class EngineView:
    """One engine as this replica knows it."""

    info: EngineInfo
    agent: str
    gauges: EngineGauges | None = None
    gauges_at: float | None = None
    slots: dict[str, int] = field(default_factory=dict)
    ladder: tuple[tuple[int, int], ...] = ()
    """Slots that stand for a tier and all faster ones, by tier rank; empty: device alone."""

    def age_seconds(self, now: float) -> float | None:
        """Return the age of the last reading; ``None`` when there was none."""
        return None if self.gauges_at is None else now - self.gauges_at


@dataclass(slots=True)
class AgentView:
    """One agent's stream: where it stands, and the snapshot it is sending, if any."""

    url: str
    node: str = ""
    cursor: Cursor | None = None
    connected: bool = False
    synced: bool = False
    listed: bool = True
    """Whether it is to be followed; one that is not is kept for what it said, for a while."""
    heard_at: float | None = None
    error: str | None = None
    staging: dict[str, EngineView] | None = None
    refused: set[str] = field(default_factory=set)
    """Engines that it speaks of and another agent speaks for."""
    paths: AgentPaths = field(default_factory=AgentPaths)
    staged_paths: AgentPaths = field(default_factory=AgentPaths)


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What routing has to look at beyond the ordinary for one model.

    ``movers`` are the engines whose KV another one of them can use, by equal mode and compat.
    """

    movers: tuple[EngineView, ...] = ()
    has_roles: bool = False


ORDINARY = ModelTraits()
"""The traits of most models: no KV can move, every engine does all the work."""


class Fleet:
    """All agents and engines, by the agents' word."""

    def __init__(
        self, index: PrefixIndex, *, path_aged_seconds: float = _PATH_AGED_SECONDS
    ) -> None:
        self.index = index
        self._path_aged_seconds = path_aged_seconds
        self._heard_at = 0.0
        self.agents: dict[str, AgentView] = {}
        self.engines: dict[str, EngineView] = {}
        self._engine_of_slot: dict[int, str] = {}
        self._serving: dict[str, list[EngineView]] | None = None
        self._traits: dict[str | None, ModelTraits] = {}
        self._laddered: set[str] = set()
        self._configured: dict[str, EngineInfo] = {}

    def add_agent(self, url: str) -> AgentView:
        """Start knowing an agent."""
        return self.agents.setdefault(url, AgentView(url))

    def add_static_engine(self, engine: str, url: str) -> None:
        """Know an engine from the configuration: a fallback until an agent speaks of its URL."""
        info = EngineInfo(id=engine, incarnation="", url=url, state=EngineState.READY)
        self._configured[engine] = info
        self.engines[engine] = EngineView(info, agent="")
        self._forget_models()

    def forget_agent(self, url: str) -> None:
        """Know an agent no more, nor its engines; configured ones are a fallback again."""
        agent = self.agents.pop(url, None)
        if agent is None:
            return
        self._let_others_speak(url)
        self._drop_staging(agent)
        for engine in [e for e, view in self.engines.items() if view.agent == url]:
            self._drop_engine(engine)
        known = {view.info.url for view in self.engines.values()}
        for engine, info in self._configured.items():
            if engine not in self.engines and info.url not in known:
                self.engines[engine] = EngineView(info, agent="")
                self._forget_models()

    def serving(self, model: str) -> list[EngineView]:
        """Return the engines that answer to a model or adapter name.

        An engine of which only the address is known may serve any model.
        """
        served = self._models()
        return served.get(model) or served.get(_ANY_MODEL, [])

    def traits(self, model: str | None) -> ModelTraits:
        """Return what is out of the ordinary about a model; ``None`` means any.

        Looked at once after each change of the fleet, so that ordinary requests pay next
        to nothing.
        """
        traits = self._traits
        if not traits:
            traits[None] = traits_of(self.engines.values())
            traits |= {name: traits_of(views) for name, views in self._models().items()}
        found = traits.get(model)
        return traits.get(_ANY_MODEL, ORDINARY) if found is None else found

    @property
    def models(self) -> Mapping[str, Sequence[EngineView]]:
        """The engines by each name that they answer to."""
        return self._models()

    def path_between(self, source: EngineView, target: EngineView) -> PathReading | None:
        """Return what moving KV between two engines' nodes costs, as agents measured it.

        The target's agent, which pulls, knows best. Ages are those at the last frame of any.
        """
        there, here = self.agents.get(source.agent), self.agents.get(target.agent)
        return path_between(
            (source.info.node, target.info.node),
            None if there is None else there.paths,
            None if here is None else here.paths,
            since=self._heard_at - self._path_aged_seconds,
        )

    def _models(self) -> dict[str, list[EngineView]]:
        if self._serving is None:
            self._serving = models_served(self.engines.values())
        return self._serving

    def _forget_models(self) -> None:
        self._serving = None
        self._traits.clear()

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """Return how many leading blocks of ``keys`` each engine holds."""
        owners = self._engine_of_slot
        return {
            owners[slot]: depth
            for slot, depth in self.index.match(keys).items()
            if slot in owners  # a tier's own slot is folded into its engine's
        }

    def match_tiers(self, keys: Sequence[int]) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
        """Return what :meth:`match` does, and how much of it lies on faster tiers.

        The latter is (leading blocks on the device, leading blocks on device or host), for
        engines that keep blocks elsewhere than on the device.
        """
        if not self._laddered:
            return self.match(keys), {}
        found = self.index.match(keys)
        owners = self._engine_of_slot
        depths = {owners[slot]: depth for slot, depth in found.items() if slot in owners}
        faster = {
            engine: faster_depths(self.engines[engine].ladder, found)
            for engine in self._laddered & depths.keys()
        }
        return depths, faster

    # -- Frames ------------------------------------------------------------------------

    def apply(self, url: str, frame: Frame, now: float) -> None:
        """Apply one frame of an agent's stream; raises :class:`StreamProtocolError`."""
        agent = self.agents[url]
        agent.heard_at = self._heard_at = now
        if isinstance(frame, Delta):
            self._apply_delta(agent, frame, now)
        elif isinstance(frame, Blocks):
            self._stage_blocks(agent, frame)
        elif isinstance(frame, Heartbeat):
            self._apply_heartbeat(agent, frame, now)
        elif isinstance(frame, SnapshotBegin):
            self._begin_snapshot(agent, frame, now)
        else:
            self._end_snapshot(agent, frame)

    def connection_lost(self, url: str, error: str) -> None:
        """Note that an agent's stream broke; what it said so far stays, and ages."""
        agent = self.agents[url]
        agent.connected = False
        agent.error = error
        self._drop_staging(agent)
        self._let_others_speak(url)

    def _begin_snapshot(self, agent: AgentView, frame: SnapshotBegin, now: float) -> None:
        self._drop_staging(agent)
        agent.node = frame.node
        agent.staged_paths = AgentPaths()
        agent.staged_paths.take(frame.paths, now)
        agent.staged_paths.take_classes(frame.path_classes, now)
        gauges = {reading.id: reading for reading in frame.gauges}
        agent.staging = {}
        for info in frame.engines:
            reading = gauges.get(info.id)
            agent.staging[info.id] = EngineView(
                info,
                agent.url,
                gauges=reading,
                gauges_at=None if reading is None else now - reading.age_seconds,
            )

    def _stage_blocks(self, agent: AgentView, frame: Blocks) -> None:
        view = (agent.staging or {}).get(frame.engine)
        if view is None:
            raise StreamProtocolError(f"blocks of {frame.engine!r} outside its snapshot")
        slot = view.slots.get(frame.tier)
        if slot is None:
            slot = view.slots[frame.tier] = self.index.open_slot()
        self.index.add(slot, _keys(frame.keys))

    def _end_snapshot(self, agent: AgentView, frame: SnapshotEnd) -> None:
        staged = agent.staging
        if staged is None:
            raise StreamProtocolError("a snapshot ended that never began")
        agent.staging = None
        for engine in [e for e, view in self.engines.items() if view.agent == agent.url]:
            self._drop_engine(engine)
        agent.error = None
        agent.refused.clear()
        for view in staged.values():
            if self._is_spoken_for(view.info.id, agent):
                for slot in view.slots.values():
                    self.index.close_slot(slot)
            else:
                self._install(view)
        agent.paths, agent.staged_paths = agent.staged_paths, AgentPaths()
        agent.cursor = frame.cursor
        agent.synced = True
        agent.connected = True

    def _apply_heartbeat(self, agent: AgentView, frame: Heartbeat, now: float) -> None:
        self._check_cursor(agent, frame.cursor, step=0)
        for engine, age_seconds in frame.ages_seconds.items():
            view = self.engines.get(engine)
            if view is not None and view.agent == agent.url and view.gauges is not None:
                view.gauges_at = now - age_seconds

    def _apply_delta(self, agent: AgentView, frame: Delta, now: float) -> None:
        self._check_cursor(agent, frame.cursor, step=1)
        for engine in frame.gone:
            self._drop_engine(engine, agent.url)
        for info in frame.engines:
            self._upsert(agent, info)
        for change in frame.blocks:
            self._change_blocks(agent, change)
        for reading in frame.gauges:
            view = self.engines.get(reading.id)
            if view is not None and view.agent == agent.url:
                view.gauges = reading
                view.gauges_at = now - reading.age_seconds
        if frame.paths:
            agent.paths.take(frame.paths, now)
        agent.paths.take_classes(frame.path_classes, now)
        agent.cursor = frame.cursor
        agent.connected = True

    @staticmethod
    def _check_cursor(agent: AgentView, cursor: Cursor, *, step: int) -> None:
        """Make sure that nothing was missed; a gap means to start over."""
        known = agent.cursor
        if known is None or cursor != Cursor(known.boot, known.epoch, known.seq + step):
            agent.cursor = None
            raise StreamProtocolError(f"the stream is at {cursor}, expected after {known}")

    # -- Engines -----------------------------------------------------------------------

    def _upsert(self, agent: AgentView, info: EngineInfo) -> None:
        view = self.engines.get(info.id)
        if view is None or view.agent != agent.url:
            if not self._is_spoken_for(info.id, agent):
                self._install(EngineView(info, agent.url))
            return
        if view.info.incarnation != info.incarnation:
            self._close_slots(view)
            view.gauges = None
            view.gauges_at = None
        view.info = info
        self._forget_models()

    def _is_spoken_for(self, engine: str, agent: AgentView) -> bool:
        """Tell, and note, whether another node's agent speaks for an engine; it goes on to."""
        view = self.engines.get(engine)
        owner = None if view is None else self.agents.get(view.agent)
        if owner is None or owner is agent or not owner.connected or owner.node == agent.node:
            agent.refused.discard(engine)
            return False
        agent.refused.add(engine)
        agent.error = f"engine {engine} is spoken for by {owner.url}"
        return True

    def _let_others_speak(self, url: str) -> None:
        """Have agents begin anew that were refused an engine of one that says no more."""
        for other in self.agents.values():
            if any((v := self.engines.get(e)) and v.agent == url for e in other.refused):
                other.cursor = None

    def _install(self, view: EngineView) -> None:
        """Put a view in place of whatever held its id, or its URL without an agent."""
        self._drop_engine(view.info.id)
        for engine in [
            e for e, v in self.engines.items() if not v.agent and v.info.url == view.info.url
        ]:
            self._drop_engine(engine)
        self.engines[view.info.id] = view
        self._forget_models()
        slots = view.slots
        view.slots = {}
        for tier, slot in slots.items():
            view.slots[tier] = slot
            self.index.activate(slot)
        self._arrange(view)

    def _drop_engine(self, engine: str, agent: str | None = None) -> None:
        view = self.engines.get(engine)
        if view is None or (agent is not None and view.agent != agent):
            return
        self._close_slots(view)
        del self.engines[engine]
        self._forget_models()

    def _drop_staging(self, agent: AgentView) -> None:
        for view in (agent.staging or {}).values():
            for slot in view.slots.values():
                self.index.close_slot(slot)
        agent.staging = None

    # -- Blocks ------------------------------------------------------------------------

    def _change_blocks(self, agent: AgentView, change: BlockChange) -> None:
        if change.engine in agent.refused:
            return
        view = self.engines.get(change.engine)
        if view is None or view.agent != agent.url:
            raise StreamProtocolError(f"blocks of unknown engine {change.engine!r}")
        if change.cleared:
            self._close_slots(view)
        if change.removed and change.tier in view.slots:
            self.index.remove(view.slots[change.tier], _keys(change.removed))
        if change.added:
            self.index.add(self._slot(view, change.tier), _keys(change.added))

    def _slot(self, view: EngineView, tier: str) -> int:
        slot = view.slots.get(tier)
        if slot is None:
            slot = view.slots[tier] = self.index.open_slot()
            self.index.activate(slot)
            self._arrange(view)
        return slot

    def _arrange(self, view: EngineView) -> None:
        """Say which slot stands for the engine: that of its only tier, or one over all tiers.

        With several tiers there is one such slot for each, over itself and the faster ones,
        so that a match tells how much of a prefix is how near.
        """
        self._take_down(view)
        ranks = sorted({rank_of(tier) for tier in view.slots})
        if not ranks:
            return
        ladder = tuple((rank, self._slot_over(view, rank)) for rank in ranks)
        self._engine_of_slot[ladder[-1][1]] = view.info.id
        if ranks != [DEVICE]:
            self._laddered.add(view.info.id)
        view.ladder = ladder

    def _slot_over(self, view: EngineView, rank: int) -> int:
        """Return a slot that holds what all tiers up to a rank hold."""
        slots = [slot for tier, slot in view.slots.items() if rank_of(tier) <= rank]
        if len(slots) == 1:
            return slots[0]
        over = self.index.open_slot()
        for slot in slots:
            self.index.link_tier(over, slot)
        self.index.activate(over)
        return over

    def _take_down(self, view: EngineView) -> None:
        own = set(view.slots.values())
        for _, slot in view.ladder:
            self._engine_of_slot.pop(slot, None)
            if slot not in own:
                self.index.close_slot(slot)
        view.ladder = ()
        self._laddered.discard(view.info.id)

    def _close_slots(self, view: EngineView) -> None:
        self._take_down(view)
        for slot in view.slots.values():
            self.index.close_slot(slot)
        view.slots.clear()


def _keys(packed: bytes) -> tuple[int, ...]:
    try:
        return unpack_keys(packed)
    except ValueError as error:
        raise StreamProtocolError(str(error)) from error


def compat_of(view: EngineView) -> tuple[str, str] | None:
    """Return what two engines must have in common for one to use the other's KV."""
    transfer = view.info.transfer
    return None if transfer is None else (transfer.mode, transfer.compat)


def traits_of(views: Iterable[EngineView]) -> ModelTraits:
    """Return what is out of the ordinary about engines that serve one model."""
    views = list(views)
    by_compat: dict[tuple[str, str], list[EngineView]] = {}
    for view in views:
        compat = compat_of(view)
        if compat is not None:
            by_compat.setdefault(compat, []).append(view)
    movers = tuple(v for group in by_compat.values() if len(group) > 1 for v in group)
    has_roles = any(view.info.role != "both" for view in views)
    return ModelTraits(movers, has_roles) if movers or has_roles else ORDINARY


def models_served(views: Iterable[EngineView]) -> dict[str, list[EngineView]]:
    """Return the engines by each name that they answer to; ``*`` for those that name none.

    The latter may serve any model, but not an adapter that others have loaded.
    """
    served: dict[str, list[EngineView]] = {}
    adapters: set[str] = set()
    anonymous = []
    for view in views:
        for name in (*view.info.models, *view.info.adapters):
            served.setdefault(name, []).append(view)
        adapters.update(view.info.adapters)
        if not view.info.models:
            anonymous.append(view)
    for name, serving in served.items():
        if name not in adapters:
            serving.extend(anonymous)
    if anonymous:
        served[_ANY_MODEL] = anonymous
    return served
