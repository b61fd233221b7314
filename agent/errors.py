"""Errors of the agent.

AgentError
├── EventDecodeError   an engine's KV event message cannot be read
├── EngineProbeError   an engine does not answer, or answers nonsense
├── PeerTlsError       certificate, key or CA for other agents cannot be used
└── SnapshotBusyError  too many different snapshots are being read
"""

from nearkv.errors import NearkvError


class AgentError(NearkvError):
    """Base of everything the agent raises."""


class EventDecodeError(AgentError):
    """An engine's KV event message cannot be read."""


class EngineProbeError(AgentError):
    """An engine does not answer, or answers nonsense; ``status`` is HTTP's, if it came to that.

    ``nobody_listens`` says that its port is closed: the process is not there.
    """

    def __init__(
        self, message: str, *, status: int | None = None, nobody_listens: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.nobody_listens = nobody_listens


class PeerTlsError(AgentError):
    """The certificate, the key or the CA for other agents cannot be used."""


class SnapshotBusyError(AgentError):
    """Too many different snapshots are being read; the consumer may come again."""
