"""How each engine's KV can move, as it is published with the engine (pure).

A registered engine moves by our own connector and movers. An engine that the settings call
``nixl`` moves by vLLM's own connector: the agent knows no more of it than what it serves.
"""

from collections.abc import Mapping

from nearkv.agent.transfer.compatibility import digest_compatibility, digest_facts
from nearkv.agent.transfer.registry import Registration
from nearkv.state.model import EngineInfo, EngineState, TransferInfo

AGENT_MODE = "agent"
NIXL_MODE = "nixl"
OFF_MODE = "off"


def configured_name(engine: str) -> str:
    """Return the configured id behind an engine's id: without the data-parallel rank."""
    name, separator, rank = engine.rpartition("/dp")
    return name if separator and rank.isdecimal() else engine


def kv_bytes_per_token(registration: Registration) -> int:
    """Return the bytes that a token takes over all layers and ranks."""
    memory = registration.workers[0].layout
    compatibility = registration.workers[0].compatibility
    ranks = compatibility.parallelism.tp_size
    return memory.layers * memory.block_bytes * ranks // compatibility.layout.block_size


class TransferAbilities:
    """Knows for each engine how its KV can move; ``modes`` are the configured ones by id.

    Engines of pods come and go while the agent runs.
    """

    def __init__(self, modes: Mapping[str, str]) -> None:
        self._modes = dict(modes)
        self._registered: dict[str, TransferInfo] = {}

    @property
    def names(self) -> list[str]:
        """The configured engines that are to register with the agent."""
        return [name for name, mode in self._modes.items() if mode == AGENT_MODE]

    def mode_of(self, engine: str) -> str:
        """Return the mode of an engine; one that nobody configured may register."""
        return self._modes.get(engine) or self._modes.get(configured_name(engine)) or AGENT_MODE

    def set_mode(self, engine: str, mode: str) -> None:
        """Note how an engine's KV is to move: agent, nixl or off."""
        self._modes[engine] = mode

    def forget_mode(self, engine: str) -> None:
        """Forget an engine that is gone."""
        self._modes.pop(engine, None)

    def set_registered(self, registration: Registration, *, agent_url: str) -> None:
        """Note that an engine can move KV by this agent."""
        self._registered[registration.engine] = TransferInfo(
            mode=AGENT_MODE,
            compat=digest_compatibility(registration.compatibility),
            kv_bytes_per_token=kv_bytes_per_token(registration),
            agent=agent_url,
        )

    def set_gone(self, engine: str) -> None:
        """Note that an engine cannot move KV any more."""
        self._registered.pop(engine, None)

    def is_registered(self, engine: str) -> bool:
        """Tell whether an engine can move KV by this agent."""
        return engine in self._registered

    def of(self, info: EngineInfo) -> TransferInfo | None:
        """Return what to publish with an engine; ``None`` while its KV cannot move."""
        if self.mode_of(info.id) == NIXL_MODE:
            return _nixl(info)
        return self._registered.get(info.id)


def _nixl(info: EngineInfo) -> TransferInfo | None:
    """Describe an engine with vLLM's own connector, which insists on equal versions."""
    known = info.engine_version and info.model and info.block_size
    if info.state is not EngineState.READY or not known:
        return None
    facts = (info.engine_version, info.model, info.block_size)
    return TransferInfo(mode=NIXL_MODE, compat=digest_facts(facts))
