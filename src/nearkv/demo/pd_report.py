"""What the P/D show says of each turn, and whether it went as it should."""

from collections.abc import Sequence
from dataclasses import dataclass

SPLIT_REASONS = frozenset({"pd", "pull"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PdTurn:
    """One request.

    ``computed_tokens``, ``cached_tokens`` and ``pulled_tokens`` are the decode engine's own
    counts; ``path``, ``size_bytes`` and ``seconds`` are its agent's.
    """

    turn: int
    prefill_engine: str | None
    decode_engine: str
    reason: str
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    pulled_tokens: int
    path: str | None
    size_bytes: int
    seconds: float
    ttft_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PdReport:
    """All turns of a show; ``block_size`` is the engines', in tokens."""

    model: str
    block_size: int
    turns: tuple[PdTurn, ...]

    @property
    def pulled_tokens(self) -> int:
        """Prompt tokens that the decode engine did not compute because they were moved."""
        return sum(turn.pulled_tokens for turn in self.turns)


def pd_shortcomings(report: PdReport) -> list[str]:
    """Tell what did not go as it should; an empty list means that the run passed."""
    return [f"turn {turn.turn}: {what}" for turn in report.turns for what in _wrong(turn, report)]


def _wrong(turn: PdTurn, report: PdReport) -> Sequence[str]:
    if turn.reason not in SPLIT_REASONS or turn.prefill_engine is None:
        return [f"was not split, but answered by {turn.decode_engine} ({turn.reason})"]
    # What does not fill a block is not moved, and the last token is always computed.
    if turn.computed_tokens > report.block_size:
        return [f"{turn.decode_engine} computed {turn.computed_tokens} tokens itself"]
    return []


def pd_report_json(report: PdReport) -> dict[str, object]:
    """Return the report as JSON-like data."""
    reasons = pd_shortcomings(report)
    return {
        "model": report.model,
        "passed": not reasons,
        "shortcomings": reasons,
        "pulled_tokens": report.pulled_tokens,
        "turns": list(report.turns),
    }
