"""Errors of the agent.

AgentError
├── EventDecodeError   an engine's KV event message cannot be read
├── EngineProbeError   an engine does not answer, or answers nonsense
└── PeerTlsError       certificate, key or CA for other agents cannot be used
"""

from nearkv.errors import NearkvError


class AgentError(NearkvError):
    """Base of everything the agent raises."""


class EventDecodeError(AgentError):
    """An engine's KV event message cannot be read."""


class EngineProbeError(AgentError):
    """An engine does not answer, or answers nonsense; ``status`` is HTTP's, if it came to that."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class PeerTlsError(AgentError):
    """The certificate, the key or the CA for other agents cannot be used."""
