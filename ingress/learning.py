"""What answers teach: hits, first tokens, kept promises, sessions. The same for every entry.

The proxy sees answers itself, the endpoint picker is shown them by Envoy; either calls this.
"""

from nearkv.ingress.cost_planning import Expected
from nearkv.ingress.hints import PrefixHint
from nearkv.ingress.keying import Job
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.parity_watch import ParityWatch
from nearkv.state.model import EngineInfo


class Learner:
    """Takes what is seen of answers into what the replica knows, and counts it."""

    def __init__(self, knowledge: Knowledge, metrics: IngressMetrics) -> None:
        self._know = knowledge
        self._metrics = metrics
        self._parity = ParityWatch(knowledge.parity, metrics, knowledge.guesses)

    def served(self, job: Job, info: EngineInfo, *, reused_tokens: int) -> None:
        """Learn that an engine answers: of the prompt ``reused_tokens`` were not computed.

        What the client calls its prompt or session leads to this engine from now on.
        """
        know, prompt = self._know, job.prompt
        if prompt is not None:
            self._metrics.prompt_tokens.add(by=prompt.token_count)
            self._metrics.predicted_tokens.add(by=reused_tokens)
            know.totals.prompt_tokens += prompt.token_count
            know.totals.predicted_tokens += reused_tokens
        if job.adapter:
            hint = PrefixHint((), info.id, info.incarnation)
            know.adapter_homes.learn(job.adapter, hint)
        if not job.prefix_ids:
            return
        keys = prompt.keys if prompt is not None else ()
        if not keys and job.hint is not None:
            keys = job.hint.keys  # what was learnt before is better than nothing
        for prefix_id in job.prefix_ids:
            know.hints.learn(prefix_id, PrefixHint(keys, info.id, info.incarnation))

    def first_token(self, engine: str, expected: Expected, seconds: float) -> None:
        """Learn from the time to the first token, and tell how well it was predicted."""
        if seconds <= 0:
            return
        self._metrics.first_token_ratio.observe(expected.first_token_ms / 1000 / seconds)
        if expected.undisturbed:
            self._know.fits.observe(engine, expected.missing_tokens, seconds)

    def cached(
        self, info: EngineInfo, *, predicted: int, reported: int | None, guessed_as: str = ""
    ) -> None:
        """Compare what an engine says it had cached with what was predicted.

        Not for KV that was pulled: it counts as cached too, which says nothing about our view.
        """
        self._parity.compare(info, predicted=predicted, reported=reported, guessed_as=guessed_as)
