"""The KV connector that vLLM loads (``kv_connector_module_path``); tested with vLLM 0.32.

A thin shell over ``connector``: it turns vLLM's objects into plain values and back. Loads are
asynchronous only; whatever goes wrong, vLLM is told that there is nothing to load, or which
blocks did not arrive, and computes them (``kv_load_failure_policy: recompute`` is insisted
on). See docs/transfer.md for how to configure it.
"""

import logging
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.logger import init_logger

from nearkv.transfer.connector.allocation import KvAllocation, locate_blocks
from nearkv.transfer.connector.identity import (
    attention_kernels,
    describe_engine,
    name_of_rank,
)
from nearkv.transfer.connector.kv_kinds import why_not_kept
from nearkv.transfer.connector.scheduler_side import RequestFacts, SchedulerSide
from nearkv.transfer.connector.settings import read_settings
from nearkv.transfer.connector.steps import StepPlan
from nearkv.transfer.connector.worker_side import WorkerSide
from nearkv.transfer.cuda.engine_checks import why_not_shared
from nearkv.transfer.errors import PullError, Reason, TransferError
from nearkv.transfer.lease import SlotTable
from nearkv.transfer.memory import create_slots
from nearkv.transfer.messages import MemoryMap

if TYPE_CHECKING:
    from prometheus_client import Counter

logger = init_logger(f"vllm.{__name__}")

_STORE_SHARE = 8
"""One block of so many may be kept for the shared store after its request has ended."""

Theirs = Any
"""An object of vLLM's, of which only the attributes named here are used."""
VllmRequest = Any
"""vLLM's ``Request``."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler's side tells the worker's with a step."""

    plan: StepPlan = field(default_factory=StepPlan)


class ConnectorStats(KVConnectorStats):
    """Counts by ``kind/outcome``, as they go to vLLM's metrics."""

    def reset(self) -> None:
        """Forget all counts."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's counts."""
        for key, count in other.data.items():
            self.data[key] = self.data.get(key, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for the log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Tell whether nothing was counted."""
        return not self.data


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """The connector's own series on vLLM's ``/metrics``."""

    def __init__(self, *arguments: Theirs) -> None:
        super().__init__(*arguments)
        labels = [*self._labelnames, "kind", "outcome"]
        self._events: Counter = self._counter_cls(
            name="vllm:nearkv_connector_events",
            documentation="Loads, lookups and leases of the nearkv connector, by outcome.",
            labelnames=labels,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one step."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, count in transfer_stats_data.items():
            kind, _, outcome = key.partition("/")
            self._events.labels(*values, kind, outcome).inc(count)


class NodeAgentConnector(KVConnectorBase_V1, SupportsHMA):
    """Leaves the moving of KV to the node's agent."""

    def __init__(self, vllm_config: Theirs, role: KVConnectorRole, kv_cache_config: Theirs) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_with_vllm()
        transfer = vllm_config.kv_transfer_config
        settings = read_settings(transfer.kv_connector_extra_config)
        self._settings = msgspec.structs.replace(
            settings,
            engine=name_of_rank(
                settings.engine, str(transfer.engine_id), vllm_config.parallel_config
            ),
        )
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError('kv_load_failure_policy: must be "recompute" for this connector')
        # Both processes of an engine have this in common, and no two starts of it.
        self._epoch = f"{transfer.engine_id}.{vllm_config.instance_id}"
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._allocation = KvAllocation()
        self._failed: set[int] = set()
        # Of an engine that only produces, vLLM may give out blocks that a step on its way still
        # writes: nothing else may write into them.
        self._may_load = bool(transfer.is_kv_consumer)
        reason = self._why_off()
        if reason is not None:
            logger.warning("nearkv: transfers are off (%s): %s", reason.reason, reason)
        elif role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._start_scheduler_side()
        else:
            self._worker = WorkerSide(self._settings, now_ms=_now_ms)

    def _why_off(self) -> TransferError | None:
        """Return why this engine cannot transfer at all; it serves as if alone then."""
        groups = len(self._kv_cache_config.kv_cache_groups)
        if groups != 1:
            return PullError(Reason.KV_GROUPS, f"{groups} groups of KV layers, one is supported")
        lets_go = why_not_kept(self._kv_cache_config.kv_cache_groups[0].kv_cache_spec)
        if lets_go is not None:
            return lets_go
        for name in (
            "pipeline_parallel_size",
            # A block of these is spread over ranks: it has more tokens than the layout says.
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ):
            if getattr(self._vllm_config.parallel_config, name, 1) != 1:
                return PullError(Reason.TOPOLOGY, f"{name}: only 1 is supported")
        if str(self._vllm_config.cache_config.cache_dtype).startswith("fp8") and getattr(
            self._vllm_config.cache_config, "calculate_kv_scales", False
        ):
            return PullError(Reason.DTYPE, "fp8 scales computed at run time do not travel")
        return why_not_shared(self._vllm_config)

    @property
    def _block_size(self) -> int:
        (group,) = self._kv_cache_config.kv_cache_groups
        return int(group.kv_cache_spec.block_size)

    def _start_scheduler_side(self) -> SchedulerSide:
        self._slots = create_slots(self._settings.lease_slots)
        side = SchedulerSide(
            self._settings,
            epoch=self._epoch,
            block_size=self._block_size,
            slots_fd=self._slots.fd,
            slots=SlotTable(self._slots.view),
            now_ms=_now_ms,
            store_blocks=self._kv_cache_config.num_blocks // _STORE_SHARE,
        )
        side.start()
        return side

    # -- Worker's side -----------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Have the KV cache allocated in shared memory."""
        return None if self._worker is None else self._allocation.context()

    def register_kv_caches(self, kv_caches: dict[str, Theirs]) -> None:
        """Register the memory with the agent, or turn transfers off, said once."""
        if self._worker is None:
            return
        config = self._kv_cache_config
        try:
            layout = locate_blocks(
                kv_caches, config.kv_cache_tensors, config.num_blocks, self._allocation
            )
        except TransferError as error:
            logger.warning("nearkv: transfers are off (%s): %s", error.reason, error)
            self._worker = None
            return
        first = next(iter(kv_caches.values()))
        self._worker.register(
            epoch=self._epoch,
            shared=self._allocation.shared,
            memory=MemoryMap(
                **{name: getattr(layout, name) for name in MemoryMap.__struct_fields__}
            ),
            compatibility=describe_engine(
                self._vllm_config,
                layout,
                block_size=self._block_size,
                kv_dtype=str(first.dtype).removeprefix("torch."),
                tp_rank=self._vllm_config.parallel_config.rank,
                kernels=attention_kernels(self._vllm_config, kv_caches),
                model_id=self._settings.model_id,
            ),
        )

    def start_load_kv(self, forward_context: Theirs, **_kwargs: Theirs) -> None:  # noqa: ARG002 (vLLM's signature)
        """Hand this step's loads to the agent; returns at once."""
        if self._worker is not None:
            self._worker.begin(self._plan)

    @property
    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)  # noqa: S101 - made by our own other side
        return metadata.plan

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are complete before a request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Theirs, attn_metadata: Theirs, **kwargs: Theirs
    ) -> None:
        """Do nothing: readers pull from the KV cache itself."""

    def wait_for_save(self) -> None:
        """Do nothing, see ``save_kv_layer``."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002 (vLLM's)
        """Report leases that ended and loads that ended."""
        plan = self._plan if self.has_connector_metadata() else StepPlan()
        released = set(plan.released)
        if self._worker is None:
            # Nothing can be loaded here: what was planned all the same has failed.
            ended = {job.request_id for job in plan.loads}
            self._failed = {block for job in plan.loads for block in job.target_blocks}
            return released, ended
        loads = self._worker.take_ended()
        self._failed = loads.failed_blocks
        return released, loads.request_ids

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that did not arrive; vLLM calls this right after ``get_finished``."""
        failed, self._failed = self._failed, set()
        return failed

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what was counted since the last step."""
        side = self._scheduler or self._worker
        counts = {} if side is None else side.tally.take()
        return ConnectorStats(data=counts) if counts else None

    # -- Scheduler's side --------------------------------------------------------------

    def on_new_request(self, request: VllmRequest) -> None:
        """Ask about the lease that a request brings."""
        if self._scheduler is not None and self._may_load and request.kv_transfer_params:
            tokens = request.prompt_token_ids or ()
            self._scheduler.request_added(_facts(request, tokens), request.kv_transfer_params)

    def get_num_new_matched_tokens(
        self,
        request: VllmRequest,
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        """Return how many tokens a lease, or the shared store, supplies beyond those here."""
        if self._scheduler is None:
            return 0, False

        def describe() -> RequestFacts:
            return _facts(request, request.prompt_token_ids or ())

        # A request that must compute its whole prompt (for its log-probabilities, say) is given
        # nothing: vLLM would throw it away.
        may_load = self._may_load and not request.skip_reading_prefix_cache
        matched = self._scheduler.matched_tokens(
            request.request_id,
            num_computed_tokens,
            request.num_prompt_tokens,
            describe if may_load else None,
        )
        return matched, bool(matched)

    def update_state_after_alloc(
        self, request: VllmRequest, blocks: Theirs, num_external_tokens: int
    ) -> None:
        """Plan the load into the blocks allocated."""
        if self._scheduler is None:
            return
        (block_ids,) = blocks.get_block_ids()
        self._scheduler.allocated(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Theirs) -> KVConnectorMetadata:  # noqa: ARG002 (vLLM's signature)
        """Return this step's orders for the workers."""
        plan = StepPlan() if self._scheduler is None else self._scheduler.take_plan()
        return StepMetadata(plan)

    def update_connector_output(self, connector_output: Theirs) -> None:
        """Let the leases of finished loads go."""
        if self._scheduler is not None and connector_output.finished_recving:
            self._scheduler.loads_finished(tuple(connector_output.finished_recving))

    def request_finished(
        self,
        request: VllmRequest,
        block_ids: list[int],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a prefill for somebody else; say how to find them."""
        if self._scheduler is None:
            return False, None
        params = request.kv_transfer_params
        # With asynchronous scheduling a later step may be on its way to the device already:
        # its tokens count as computed, but their KV is not written yet.
        written = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        wanted = params or self._scheduler.keeps_for_store
        computed = request.all_token_ids[: max(0, written)] if wanted else ()
        completed = request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        return self._scheduler.request_finished(
            _facts(request, computed), params, block_ids, completed=completed
        )

    def request_finished_all_groups(
        self,
        request: VllmRequest,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do as ``request_finished``; with several groups transfers are off."""
        if self._scheduler is None:
            return False, None
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        """Give no KV from before to anybody: the weights have changed, say."""
        if self._scheduler is not None:
            self._scheduler.end_leases("reset")
        return True

    def shutdown(self) -> None:
        """End the connection with the agent, which ends the registration."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # -- Class methods that vLLM asks --------------------------------------------------

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Put counts that travelled between processes back into their class."""
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Theirs) -> KVConnectorPromMetrics:
        """Return the connector's series."""
        return ConnectorPromMetrics(*arguments)


def _facts(request: VllmRequest, token_ids: Iterable[int]) -> RequestFacts:
    lora = request.lora_request
    return RequestFacts(
        id=request.request_id,
        token_ids=np.fromiter(token_ids, dtype="<u4").tobytes(),
        cache_salt=request.cache_salt or "",
        lora="" if lora is None else f"{lora.lora_name}:{lora.lora_path}",
        plain=not request.mm_features and request.prompt_embeds is None,
    )


def _log_with_vllm() -> None:
    """Have our loggers write where vLLM's do, at the same level."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("nearkv")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
