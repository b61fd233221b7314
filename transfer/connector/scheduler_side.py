"""The connector in vLLM's scheduler: leases for others, lookups for our own requests.

It speaks to the agent through a client that never blocks, and to the worker's side through
one :class:`StepPlan` per engine step.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nearkv.transfer.agent_client import AgentClient, Hello
from nearkv.transfer.connector.leasing import LeaseDesk
from nearkv.transfer.connector.lookups import LookupDesk
from nearkv.transfer.connector.params import lease_params, read_address, wants_lease
from nearkv.transfer.connector.settings import ConnectorSettings
from nearkv.transfer.connector.steps import StepPlan
from nearkv.transfer.connector.tally import Tally
from nearkv.transfer.errors import Reason
from nearkv.transfer.lease import SlotTable
from nearkv.transfer.manifest import Prefix
from nearkv.transfer.messages import (
    PROTOCOL,
    LeaseAddress,
    LeaseClosed,
    LookupDone,
    RegisterScheduler,
    ReleaseLease,
    RenewLease,
    ToEngine,
    in_store,
)

Params = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What the connector needs to know of a vLLM request.

    ``token_ids`` are the tokens whose KV is computed, packed as little-endian u32.
    ``plain`` says that token ids, salt and adapter determine the KV: no images, no
    embeddings.
    """

    id: str
    token_ids: bytes
    cache_salt: str = ""
    lora: str = ""
    plain: bool = True


class SchedulerSide:
    """All that the scheduler's connector does; methods run on the engine's thread.

    ``store_blocks`` may be kept after their requests have ended, until they are stored.
    """

    def __init__(  # noqa: PLR0913 (all but the settings are keyword-only)
        self,
        settings: ConnectorSettings,
        *,
        epoch: str,
        block_size: int,
        slots_fd: int,
        slots: SlotTable,
        now_ms: Callable[[], int],
        store_blocks: int = 0,
    ) -> None:
        self._settings = settings
        self._epoch = epoch
        self._block_size = block_size
        self._slots_fd = slots_fd
        self.tally = Tally()
        self._leases = LeaseDesk(
            slots,
            ttl_ms=int(settings.lease_seconds * 1000),
            now_ms=now_ms,
            tally=self.tally,
            store_blocks=store_blocks,
        )
        self._lookups = LookupDesk(
            block_size=block_size,
            lookup_ms=int(settings.lookup_seconds * 1000),
            pull_ms=int(settings.pull_seconds * 1000),
            now_ms=now_ms,
            tally=self.tally,
        )
        self._slot_count = len(slots)
        self._plan = StepPlan()
        self._loading: dict[str, LeaseAddress] = {}
        self._client = AgentClient(
            settings.socket_path,
            self._hello,
            on_message=self._on_message,
            on_lost=self._agent_lost,
        )

    def start(self) -> None:
        """Start looking for the agent."""
        self._client.start()

    def close(self) -> None:
        """End the connection."""
        self._client.close()
        os.close(self._slots_fd)

    def _hello(self) -> Hello:
        message = RegisterScheduler(
            protocol=PROTOCOL,
            engine=self._settings.engine,
            epoch=self._epoch,
            slots=self._slot_count,
            leases=self._leases.open_leases(),
        )
        return Hello(message, (self._slots_fd,))

    def _agent_lost(self, _agent_ended_it: bool) -> None:  # noqa: FBT001 (the client's form)
        self._lookups.agent_lost()
        self._leases.end_kept()

    def _on_message(self, message: ToEngine) -> None:
        if isinstance(message, LookupDone):
            self._lookups.answer(message)
        elif isinstance(message, ReleaseLease):
            closed = self._leases.end(message.lease, message.why)
            # Closed before or unknown: say so again, the agent waits for it.
            self._client.send(closed or LeaseClosed(lease=message.lease, why="unknown"))
        elif isinstance(message, RenewLease):
            self._leases.renew(message.lease, message.expires_at_ms)

    # -- D: requests that bring a lease ------------------------------------------------

    def request_added(self, request: RequestFacts, params: Params | None) -> None:
        """Ask the agent about the lease that a new request brings, if it brings one."""
        address = read_address(params)
        if address is not None:
            self._ask(request, address)

    def _ask(self, request: RequestFacts, address: LeaseAddress, first_block: int = 0) -> None:
        lookup = self._lookups.ask(
            request.id,
            address,
            request.token_ids,
            salt=request.cache_salt,
            lora=request.lora,
            first_block=first_block,
        )
        if not request.plain:
            self._lookups.note(request.id, Reason.PREFIX)
        elif not self._client.send(lookup):
            self._lookups.note(request.id, Reason.NO_AGENT)

    def matched_tokens(
        self,
        request_id: str,
        computed: int,
        prompt_tokens: int,
        describe: Callable[[], RequestFacts] | None = None,
    ) -> int | None:
        """Return how many more tokens can be loaded; ``None``: ask again next step.

        A request that brought no lease may be in the shared store, where there is one and
        enough of the prompt is missing here: then ``describe`` says what the request is.
        """
        if describe is not None and self._may_be_stored(request_id, prompt_tokens - computed):
            self._ask(describe(), in_store(request_id), computed // self._block_size)
        return self._lookups.matched_tokens(request_id, computed, prompt_tokens)

    def _may_be_stored(self, request_id: str, missing_tokens: int) -> bool:
        registered = self._client.registered
        least = 0 if registered is None else registered.store_min_tokens
        return 0 < least <= missing_tokens and not self._lookups.knows(request_id)

    def allocated(self, request_id: str, block_ids: Sequence[int], external: int) -> None:
        """Plan the load into freshly allocated blocks; without one, let the lease go."""
        job = self._lookups.load(request_id, block_ids, external)
        if job is not None:
            self._plan.loads.append(job)
            self._loading[request_id] = job.address
        elif request_id not in self._loading:
            self._give_back(self._lookups.drop(request_id), "unused")

    def loads_finished(self, request_ids: Sequence[str]) -> None:
        """Let the leases of finished loads go: every rank has taken its part, or failed."""
        for request_id in request_ids:
            self._give_back(self._loading.pop(request_id, None), "pulled")

    def _give_back(self, address: LeaseAddress | None, why: str) -> None:
        """Say that a lease is not needed any more, once none of our requests needs it."""
        if address is None or self._is_needed(address.lease):
            return
        if (address.engine, address.epoch) == (self._settings.engine, self._epoch):
            # Our own lease came back to us: the word would be taken for that of its owner.
            self._leases.end(address.lease, why)
        self._client.send(LeaseClosed(lease=address.lease, why=why))

    def _is_needed(self, lease: str) -> bool:
        loading = self._loading.values()
        return self._lookups.needs(lease) or any(other.lease == lease for other in loading)

    # -- P: prefills for others --------------------------------------------------------

    def request_finished(
        self,
        request: RequestFacts,
        params: Params | None,
        block_ids: Sequence[int],
        *,
        completed: bool,
    ) -> tuple[bool, Params | None]:
        """Return whether vLLM must keep the blocks, and what P answers.

        ``completed`` is false for aborted requests. Without an agent nothing is kept: D will
        compute.
        """
        self._drop_request(request.id)
        registered = self._client.registered
        if not completed:
            return False, None
        if not wants_lease(params):
            return self._keep_for_store(request, block_ids), None
        blocks = len(request.token_ids) // 4 // self._block_size
        if not blocks or not request.plain or registered is None:
            why = "no_agent" if registered is None else "nothing_to_lease"
            self.tally.add("lease", why)
            return False, None
        prefix = self._prefix(request, blocks)
        opened = self._leases.open(request.id, block_ids[:blocks], prefix)
        if opened is None:
            return False, None
        if not self._client.send(opened):
            self._leases.end(opened.lease, "agent_lost")
            return True, None  # handed back with the next step
        address = LeaseAddress(
            lease=opened.lease,
            engine=self._settings.engine,
            epoch=self._epoch,
            node=registered.node,
            agent=registered.agent,
        )
        return True, lease_params(address, prefix.num_tokens)

    @property
    def keeps_for_store(self) -> bool:
        """Whether requests that nobody asked to be kept go to the shared store, too."""
        registered = self._client.registered
        return registered is not None and registered.store_all

    def _keep_for_store(self, request: RequestFacts, block_ids: Sequence[int]) -> bool:
        """Return whether vLLM must keep the blocks until they are stored."""
        registered = self._client.registered
        if registered is None or not registered.store_all or not request.plain:
            return False
        blocks = len(request.token_ids) // 4 // self._block_size
        if blocks * self._block_size < max(1, registered.store_min_tokens):
            return False
        prefix = self._prefix(request, blocks)
        opened = self._leases.open(request.id, block_ids[:blocks], prefix, for_store=True)
        if opened is None:
            return False
        if not self._client.send(opened):
            self._leases.end(opened.lease, "agent_lost")
        return True

    def end_leases(self, why: str) -> None:
        """End all leases of this engine's blocks."""
        for opened in self._leases.open_leases():
            closed = self._leases.end(opened.lease, why)
            if closed is not None:
                self._client.send(closed)

    def _prefix(self, request: RequestFacts, blocks: int) -> Prefix:
        return Prefix(
            token_ids=request.token_ids[: blocks * self._block_size * 4],
            num_tokens=blocks * self._block_size,
            block_keys=b"",
            cache_salt=request.cache_salt,
            lora=request.lora,
        )

    def _drop_request(self, request_id: str) -> None:
        """Forget a request that ended; a load still under way is cancelled."""
        address = self._lookups.drop(request_id)
        if request_id in self._loading:
            self._plan.cancels.append(request_id)
        else:
            self._give_back(address, "unused")

    # -- Each step ---------------------------------------------------------------------

    def take_plan(self) -> StepPlan:
        """Return the orders for this step; expired leases are ended on the way."""
        for closed in self._leases.expire():
            self._client.send(closed)
        plan, self._plan = self._plan, StepPlan()
        plan.released = self._leases.take_released()
        return plan
