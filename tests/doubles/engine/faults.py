"""Misbehaviour a test can switch on while the double runs."""

import msgspec

GENERATION_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
)


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults in force; the default is none. Replacing the whole set is how one is cleared.

    ``hang_seconds`` waits before the headers, ``close_before_first_byte`` hangs up instead of
    answering, ``die_after_chunks`` cuts the connection after that many streamed events,
    ``answer_status`` answers with that status, ``withhold_transfer_params`` keeps no KV for
    anybody, ``reject_transfer_params`` answers 400 to whoever brings parameters to pull with.
    These hit ``paths`` only, and ``times`` requests at most when given.
    ``refuse_connections_seconds`` closes the port and every connection, and reopens after that
    time or when faults are replaced. ``slow_factor`` multiplies the time model. The next
    ``drop_event_batches`` of each rank are numbered and kept for replay but not sent; the next
    ``garbage_event_batches`` are sent as bytes that are not msgpack.
    """

    refuse_connections_seconds: float = 0.0
    hang_seconds: float = 0.0
    close_before_first_byte: bool = False
    die_after_chunks: int | None = None
    answer_status: int | None = None
    withhold_transfer_params: bool = False
    reject_transfer_params: bool = False
    paths: tuple[str, ...] = GENERATION_PATHS
    times: int | None = None
    slow_factor: float = 1.0
    drop_event_batches: int = 0
    garbage_event_batches: int = 0


NO_FAULTS = Faults()


class FaultState:
    """The faults in force and how many requests they may still hit."""

    def __init__(self) -> None:
        self.current = NO_FAULTS
        self._left: int | None = None

    def replace(self, faults: Faults) -> None:
        """Put ``faults`` in force instead of the present ones."""
        self.current = faults
        self._left = faults.times

    def for_request(self, path: str) -> Faults:
        """Return the faults that hit a request to ``path``, counting it."""
        faults = self.current
        if faults is NO_FAULTS or path not in faults.paths or self._left == 0:
            return NO_FAULTS
        if self._left is not None:
            self._left -= 1
        return faults
