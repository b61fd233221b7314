"""How KV moves, by engine, where engines come and go while the agent runs."""

from nearkv.agent.transfer.abilities import TransferAbilities


class TransferModes(TransferAbilities):
    """Abilities of engines that are not all known from the start."""

    def set_mode(self, engine: str, mode: str) -> None:
        """Note how an engine's KV is to move: agent, nixl or off."""
        self._modes[engine] = mode

    def forget_mode(self, engine: str) -> None:
        """Forget an engine that is gone."""
        self._modes.pop(engine, None)
