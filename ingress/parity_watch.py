"""Feeding the parity check from answers, and telling what it finds."""

import structlog

from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.parity import ParityCheck
from nearkv.state.model import EngineInfo, EventsState

log = structlog.get_logger(__name__)


class ParityWatch:
    """Compares what engines report with what was predicted of them."""

    def __init__(self, parity: ParityCheck, metrics: IngressMetrics, guesses: ParityCheck) -> None:
        self._parity = parity
        self._metrics = metrics
        self._guesses = guesses

    def compare(
        self, info: EngineInfo, *, predicted: int, reported: int | None, guessed_as: str = ""
    ) -> None:
        """Take one answer; one that reports nothing, or an engine without events, is no check.

        Where the tokens were a guess, that is what is checked, and not the engine.
        """
        if reported is None or info.events is EventsState.OFF:
            return
        if guessed_as:
            self._compare_guess(guessed_as, predicted, reported)
            return
        self._metrics.parity.add("equal" if reported == predicted else "different")
        changed = self._parity.observe(
            info.id, info.incarnation, predicted=predicted, reported=reported
        )
        if changed:
            mode = self._parity.mode(info.id, info.incarnation)
            log.warning("parity_mode_changed", engine=info.id, mode=mode.value)

    def _compare_guess(self, guess: str, predicted: int, reported: int) -> None:
        self._metrics.guesses.add("equal" if reported == predicted else "different")
        if self._guesses.observe(guess, "", predicted=predicted, reported=reported):
            log.warning("guess_mode_changed", guess=guess, mode=self._guesses.mode(guess, "").value)
