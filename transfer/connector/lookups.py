"""What D's scheduler knows of leases that requests brought: asked, answered, used (pure).

The shared store is asked in the same way, in place of a lease, for requests that bring none.

A request that brings a lease waits for the agent's word on it, at most until a deadline; then
it counts as nothing and D computes all itself. A request uses its lease once: when its load
failed, or the request was preempted, D computes. Several requests may bring one lease (the
prompts of one call do): it is needed until the last of them is done with it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nearkv.transfer.connector.steps import LoadJob
from nearkv.transfer.connector.tally import Tally
from nearkv.transfer.errors import Reason
from nearkv.transfer.messages import LeaseAddress, Lookup, LookupDone

LOOKUP, STORE = "lookup", "store"


@dataclass(slots=True)
class _Asked:
    id: int
    address: LeaseAddress
    deadline_ms: int
    num_tokens: int | None = None
    computed: int = 0
    done: bool = False
    needs_lease: bool = True

    @property
    def kind(self) -> str:
        """What is counted."""
        return STORE if self.address.is_store else LOOKUP


class LookupDesk:
    """Keeps one lookup per request; called by the engine's thread and by the client's."""

    def __init__(
        self,
        *,
        block_size: int,
        lookup_ms: int,
        pull_ms: int,
        now_ms: Callable[[], int],
        tally: Tally,
    ) -> None:
        self._block_size = block_size
        self._lookup_ms = lookup_ms
        self._pull_ms = pull_ms
        self._now_ms = now_ms
        self._tally = tally
        self._lock = threading.Lock()
        self._asked: dict[str, _Asked] = {}
        self._request_of: dict[int, str] = {}
        self._needed: Counter[str] = Counter()
        self._next_id = 0
        self._agent_is_silent = False

    def __len__(self) -> int:
        """Return how many requests with a lease are known."""
        return len(self._asked)

    def knows(self, request_id: str) -> bool:
        """Tell whether a question about a request was made, whatever became of it."""
        return request_id in self._asked

    def needs(self, lease: str) -> bool:
        """Tell whether a request that has not begun to load may still use a lease."""
        return lease in self._needed

    def ask(
        self,
        request_id: str,
        address: LeaseAddress,
        token_ids: bytes,
        *,
        salt: str,
        lora: str,
        first_block: int = 0,
    ) -> Lookup:
        """Note a request's lease, or the store; returns the question for the agent.

        While the agent leaves questions unanswered, requests do not wait for it.
        """
        now_ms = self._now_ms()
        with self._lock:
            self._next_id += 1
            wait_ms = 0 if self._agent_is_silent else self._lookup_ms
            asked = _Asked(self._next_id, address, now_ms + wait_ms)
            self._forget(request_id)
            self._asked[request_id] = asked
            self._needed[address.lease] += 1
            self._request_of[asked.id] = request_id
            return Lookup(
                id=asked.id,
                address=address,
                token_ids=token_ids,
                cache_salt=salt,
                lora=lora,
                deadline_ms=now_ms + self._lookup_ms,
                first_block=first_block,
            )

    def note(self, request_id: str, reason: Reason) -> None:
        """Settle a request's lease as unusable before anybody was asked."""
        with self._lock:
            asked = self._asked.get(request_id)
            if asked is not None:
                asked.num_tokens = 0
                self._tally.add(asked.kind, reason)

    def answer(self, done: LookupDone) -> None:
        """Take the agent's word."""
        with self._lock:
            self._agent_is_silent = False
            request_id = self._request_of.pop(done.id, None)
            asked = self._asked.get(request_id) if request_id is not None else None
            self._tally.add(asked.kind if asked else LOOKUP, done.reason or "found")
            if asked is not None and asked.num_tokens is None:
                asked.num_tokens = max(0, done.num_tokens)

    def agent_lost(self) -> None:
        """Settle all open questions: nobody will answer them."""
        with self._lock:
            self._request_of.clear()
            for asked in self._asked.values():
                if asked.num_tokens is None:
                    asked.num_tokens = 0
                    self._tally.add(asked.kind, Reason.AGENT_LOST)

    def matched_tokens(self, request_id: str, computed: int, prompt_tokens: int) -> int | None:
        """Return how many tokens beyond ``computed`` the lease can supply; ``None``: not yet.

        At least the prompt's last token is always left to compute, and only whole blocks
        count.
        """
        with self._lock:
            asked = self._asked.get(request_id)
            if asked is None or asked.done:
                return 0
            if asked.num_tokens is None:
                if self._now_ms() < asked.deadline_ms:
                    return None
                self._agent_is_silent = True
                asked.num_tokens = 0
                self._tally.add(asked.kind, Reason.DEADLINE)
            asked.computed = computed
            usable = min(asked.num_tokens, prompt_tokens - 1)
            return max(0, usable // self._block_size * self._block_size - computed)

    def load(self, request_id: str, block_ids: Sequence[int], external: int) -> LoadJob | None:
        """Return what to load into the blocks that vLLM allocated; ``None`` for nothing.

        ``external`` tokens come from the lease, behind those that were here when
        :meth:`matched_tokens` was last asked: only the blocks that are missing are pulled.
        """
        with self._lock:
            asked = self._asked.get(request_id)
            if asked is None or asked.done:
                return None
            asked.done = True
            if external <= 0:
                return None
            self._let_go(asked)
            first = asked.computed // self._block_size
            count = external // self._block_size
            return LoadJob(
                request_id=request_id,
                address=asked.address,
                first_block=first,
                target_blocks=tuple(block_ids[first : first + count]),
                deadline_ms=self._now_ms() + self._pull_ms,
                lookup=asked.id,
            )

    def drop(self, request_id: str) -> LeaseAddress | None:
        """Forget a request; returns its lease if it did not come to be loaded."""
        with self._lock:
            return self._forget(request_id)

    def _forget(self, request_id: str) -> LeaseAddress | None:
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return None
        self._request_of.pop(asked.id, None)
        return asked.address if self._let_go(asked) else None

    def _let_go(self, asked: _Asked) -> bool:
        """Count a lease as needed no more by a request; False when it was not before."""
        if not asked.needs_lease:
            return False
        asked.needs_lease = False
        lease = asked.address.lease
        self._needed[lease] -= 1
        if not self._needed[lease]:
            del self._needed[lease]
        return True
