"""An engine without a model whose connector is the real one, both sides of it.

Scheduler and worker are driven as vLLM drives them: ask for matched tokens until there is an
answer, allocate, begin the step's loads, take those that ended, compute what did not come,
finish, and free the blocks of a lease when it is handed back. What a block must hold follows
from the tokens, so every answer can be checked; blocks that nobody has hold a pattern, so
whoever writes into them later is found out.

As a program (``python -m tests.doubles.connector_engine SETUP``) it takes calls as lines of
JSON, ``{"id": 1, "call": "prefill", "tokens": [..]}``, and answers ``{"id": 1, "result": ..}``;
it ends with its standard input.
"""

import hashlib
import itertools
import os
import queue
import secrets
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from nearkv.transfer.agent_client import AgentClient
from nearkv.transfer.connector.allocation import SharedMemory
from nearkv.transfer.connector.scheduler_side import Params, RequestFacts, SchedulerSide
from nearkv.transfer.connector.settings import read_settings
from nearkv.transfer.connector.steps import StepPlan
from nearkv.transfer.connector.worker_side import LoadsEnded, WorkerSide
from nearkv.transfer.errors import TransferError
from nearkv.transfer.lease import SlotTable
from nearkv.transfer.memory import Memory, create_memory, create_slots
from tests.doubles.kv_engine import KvShape, pack

STEP_SECONDS = 0.002
_DIGEST_BYTES = 64


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is: ``extra`` is what vLLM would find in kv_connector_extra_config."""

    extra: dict[str, Any]
    shape: dict[str, Any] = {}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request.

    ``right`` says that the KV is what the tokens make it. ``loaded`` blocks came from a lease;
    ``refused`` ones were reported as failed, and ``torn`` of those did not hold the right KV
    at that time. ``late_ms`` is how long after its deadline a load ended, negative when before.
    """

    right: bool
    loaded: int = 0
    refused: int = 0
    torn: int = 0
    late_ms: int = 0
    aborted: bool = False
    params: Params | None = None


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is. ``scribbled`` are free blocks into which somebody has written."""

    blocks: int
    free: int
    scribbled: int
    registered: bool
    requests: int
    off: str
    inodes: tuple[int, ...]
    descriptors: int
    tally: dict[str, int]


@dataclass(slots=True)
class _Request:
    id: str
    tokens: tuple[int, ...]
    params: Params | None
    pull_seconds: float | None
    salt: str
    done: Future[Outcome] = field(default_factory=Future)
    blocks: list[int] = field(default_factory=list)
    external: int = 0
    deadline_ms: int = 0
    ranks_to_come: int = 0
    failed: set[int] = field(default_factory=set)
    aborted: bool = False

    @property
    def facts(self) -> RequestFacts:
        return RequestFacts(id=self.id, token_ids=pack(self.tokens), cache_salt=self.salt)


def content(tokens: Sequence[int], layer: int, rank: int, size_bytes: int) -> bytes:
    """Return what the block that ends with these tokens holds."""
    digest = hashlib.blake2b(pack(tokens), digest_size=_DIGEST_BYTES, salt=bytes([layer, rank]))
    return digest.digest() * (size_bytes // _DIGEST_BYTES)


class BlockMemory:
    """The KV memory of all ranks: shared where that can be had, else private."""

    def __init__(self, shape: KvShape, epoch: str) -> None:
        self._shape = shape
        # Each boot has a pattern of its own: copied from another engine's, it would not show.
        pattern = hashlib.blake2b(epoch.encode(), digest_size=_DIGEST_BYTES).digest()
        self._pattern = pattern * (shape.block_bytes // _DIGEST_BYTES)
        self.shared: list[Memory] = []
        self.off = ""
        try:
            for _ in range(shape.tp_size):
                self.shared.append(create_memory(shape.memory.size))
            self._views = [memory.view for memory in self.shared]
        except TransferError as error:
            self.off = f"{error.reason}: {error}"
            self.close()
            self._views = [memoryview(bytearray(shape.memory.size)) for _ in range(shape.tp_size)]
        for block in range(shape.blocks):
            self.mark_free(block)

    def compute(self, tokens: Sequence[int], blocks: Sequence[int], first: int = 0) -> None:
        """Write the KV of tokens into their blocks, from the ``first`` block on."""
        for i, part, layer, rank in self._parts(blocks, first):
            part[:] = content(self._until(tokens, i), layer, rank, len(part))

    def wrong(self, tokens: Sequence[int], blocks: Sequence[int]) -> set[int]:
        """Return which of the blocks do not hold the KV of the tokens."""
        return {
            blocks[i]
            for i, part, layer, rank in self._parts(blocks, 0)
            if bytes(part) != content(self._until(tokens, i), layer, rank, len(part))
        }

    def mark_free(self, block: int) -> None:
        """Fill a block that nobody has."""
        for _, part, _, _ in self._parts([block], 0):
            part[:] = self._pattern

    def is_marked(self, block: int) -> bool:
        """Tell whether a free block was left alone."""
        # Not compared as memoryviews, which goes byte by byte.
        return all(bytes(part) == self._pattern for _, part, _, _ in self._parts([block], 0))

    def close(self) -> None:
        """Let go of what is shared."""
        for memory in self.shared:
            memory.close()
        self.shared = []

    def _until(self, tokens: Sequence[int], i: int) -> Sequence[int]:
        return tokens[: (i + 1) * self._shape.block_size]

    def _parts(self, blocks: Sequence[int], first: int) -> list[tuple[int, memoryview, int, int]]:
        place = self._shape.memory
        ranks, layers = range(self._shape.tp_size), range(self._shape.layers)
        parts = []
        for i, layer, rank in itertools.product(range(first, len(blocks)), layers, ranks):
            start = layer * place.layer_stride + blocks[i] * place.block_stride
            view = self._views[rank][start : start + place.block_bytes]
            parts.append((i, view, layer, rank))
        return parts


class ConnectorEngine:
    """One boot of an engine; its steps run on a thread of its own, from :meth:`start` on."""

    def __init__(self, extra: dict[str, Any], shape: KvShape | None = None) -> None:
        self.shape = shape or KvShape()
        self.settings = read_settings(extra)
        self.epoch = secrets.token_hex(4)
        self.memory = BlockMemory(self.shape, self.epoch)
        self._slots = create_slots(64)
        self._skipped_ms = 0
        self._side = SchedulerSide(
            self.settings,
            epoch=self.epoch,
            block_size=self.shape.block_size,
            slots_fd=self._slots.fd,
            slots=SlotTable(self._slots.view),
            now_ms=self._now_ms,
            store_blocks=self.shape.blocks // 2,
        )
        self._workers = [WorkerSide(self.settings, now_ms=self._now_ms) for _ in self.memory.shared]
        self._free = deque(range(self.shape.blocks))
        self._waiting: list[_Request] = []
        self._loading: dict[str, _Request] = {}
        self._kept: dict[str, list[int]] = {}
        self._tally: Counter[str] = Counter()
        self._ids = itertools.count(1)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.close()

    def start(self) -> None:
        """Register with the agent, now or when there is one, and begin to take requests."""
        self._side.start()
        for rank, worker in enumerate(self._workers):
            worker.register(
                epoch=self.epoch,
                shared=SharedMemory((self.memory.shared[rank].fd,)),
                memory=self.shape.memory,
                compatibility=self.shape.compatibility(rank),
            )
        self._thread.start()

    def close(self) -> None:
        """End; requests that are under way are lost."""
        self._stopping = True
        self._thread.join()
        for worker in self._workers:
            worker.close()
        fd, self._slots.fd = self._slots.fd, -1
        del fd  # the side closes it
        self._side.close()
        self.memory.close()

    # -- Calls, from any thread ----------------------------------------------------------

    def prefill(self, tokens: Sequence[int], *, salt: str = "") -> Future[Outcome]:
        """Compute a prompt for somebody else; the outcome's ``params`` are what P answers."""
        return self._submit(tokens, {"do_remote_decode": True}, None, salt)

    def decode(
        self,
        tokens: Sequence[int],
        params: Params | None,
        *,
        pull_seconds: float | None = None,
        salt: str = "",
    ) -> Future[Outcome]:
        """Serve a prompt, taking from a lease what can be had within ``pull_seconds``."""
        return self._submit(tokens, params, pull_seconds, salt)

    def abort(self) -> Future[int]:
        """Abort all requests that wait or load; the answer is how many."""
        return self._call(self._abort)

    def expire(self) -> Future[int]:
        """Let this engine's clock jump for one step, so that its leases run out; how many did."""
        return self._call(self._expire)

    def status(self) -> Future[EngineStatus]:
        """Tell how the engine is."""
        return self._call(self._status)

    def _submit(
        self,
        tokens: Sequence[int],
        params: Params | None,
        pull_seconds: float | None,
        salt: str,
    ) -> Future[Outcome]:
        request = _Request(f"r{next(self._ids)}", tuple(tokens), params, pull_seconds, salt)
        self._calls.put(lambda: self._add(request))
        return request.done

    def _call(self, work: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001 - whoever called gets it
                done.set_exception(error)

        self._calls.put(run)
        return done

    # -- Steps ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            with suppress(queue.Empty):
                self._calls.get(timeout=STEP_SECONDS)()
            self._step()

    def _step(self) -> None:
        for request in list(self._waiting):
            self._schedule(request)
        plan = self._side.take_plan()
        self._patient(plan)
        finished = self._run_workers(plan)
        for request_id in plan.released:
            self._release(self._kept.pop(request_id))
        if finished:
            self._side.loads_finished(tuple(request.id for request in finished))
        for request in finished:
            self._after_load(request)
        for tally in (self._side.tally, *(worker.tally for worker in self._workers)):
            self._tally.update(tally.take())

    def _patient(self, plan: StepPlan) -> None:
        """Give loads the time that the caller wanted."""
        for i, job in enumerate(plan.loads):
            request = self._loading[job.request_id]
            if request.pull_seconds is not None:
                deadline_ms = self._now_ms() + int(request.pull_seconds * 1000)
                plan.loads[i] = replace(job, deadline_ms=deadline_ms)
            request.deadline_ms = plan.loads[i].deadline_ms

    def _run_workers(self, plan: StepPlan) -> list[_Request]:
        """Return the requests whose loads have ended on every rank."""
        for worker in self._workers:
            worker.begin(plan)
        ends = [worker.take_ended() for worker in self._workers] or [
            LoadsEnded(
                {job.request_id for job in plan.loads},
                {block for job in plan.loads for block in job.target_blocks},
            )
        ]
        finished = []
        for ended in ends:
            for request_id in ended.request_ids:
                request = self._loading[request_id]
                request.failed |= ended.failed_blocks & set(request.blocks)
                request.ranks_to_come -= 1
                if request.ranks_to_come == 0:
                    finished.append(self._loading.pop(request_id))
        return finished

    def _add(self, request: _Request) -> None:
        self._side.request_added(request.facts, request.params)
        self._waiting.append(request)

    def _schedule(self, request: _Request) -> None:
        matched = self._side.matched_tokens(
            request.id, 0, len(request.tokens), lambda: request.facts
        )
        wanted = -(-len(request.tokens) // self.shape.block_size)
        if matched is None or wanted > len(self._free):
            return
        self._waiting.remove(request)
        request.blocks = [self._free.popleft() for _ in range(wanted)]
        request.external = matched
        self._side.allocated(request.id, request.blocks, matched)
        if matched:
            request.ranks_to_come = max(1, len(self._workers))
            self._loading[request.id] = request
        else:
            self.memory.compute(request.tokens, request.blocks)
            self._finish(request, Outcome(right=True))

    def _after_load(self, request: _Request) -> None:
        """Compute what did not come, and what comes after it."""
        loaded = request.external // self.shape.block_size
        late_ms = self._now_ms() - request.deadline_ms
        refused = {i for i in range(loaded) if request.blocks[i] in request.failed}
        if request.aborted:
            self._release(request.blocks)
            request.done.set_result(Outcome(right=True, aborted=True, late_ms=late_ms))
            return
        wrong = self.memory.wrong(request.tokens, request.blocks[:loaded])
        first = min(refused, default=loaded)
        self.memory.compute(request.tokens, request.blocks, first)
        outcome = Outcome(
            right=True,
            loaded=loaded - len(refused),
            refused=len(refused),
            torn=len(wrong & request.failed),
            late_ms=late_ms,
        )
        self._finish(request, outcome)

    def _finish(self, request: _Request, outcome: Outcome) -> None:
        right = outcome.aborted or not self.memory.wrong(request.tokens, request.blocks)
        keep, params = self._side.request_finished(
            request.facts, request.params, request.blocks, completed=not outcome.aborted
        )
        if keep:
            self._kept[request.id] = request.blocks
        else:
            self._release(request.blocks)
        request.done.set_result(msgspec.structs.replace(outcome, right=right, params=params))

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.memory.mark_free(block)
        self._free.extend(blocks)

    def _abort(self) -> int:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._finish(request, Outcome(right=True, aborted=True))
        for request in self._loading.values():
            request.aborted = True
            self._side.request_finished(
                request.facts, request.params, request.blocks, completed=False
            )
        return len(waiting) + len(self._loading)

    def _expire(self) -> int:
        self._skipped_ms = int(self.settings.lease_seconds * 1000) + 1
        before = len(self._kept)
        plan = self._side.take_plan()
        self._skipped_ms = 0
        for request_id in plan.released:
            self._release(self._kept.pop(request_id))
        return before - len(self._kept)

    def _status(self) -> EngineStatus:
        return EngineStatus(
            blocks=self.shape.blocks,
            free=len(self._free),
            scribbled=sum(not self.memory.is_marked(block) for block in self._free),
            registered=all(
                client is not None and client.registered is not None for client in self._clients
            ),
            requests=len(self._waiting) + len(self._loading),
            off=self.memory.off,
            inodes=tuple(
                os.fstat(memory.fd).st_ino for memory in (*self.memory.shared, self._slots)
            ),
            descriptors=len(list(Path("/proc/self/fd").iterdir())),
            tally=dict(self._tally),
        )

    @property
    def _clients(self) -> list[AgentClient | None]:
        return [self._side._client, *(worker._client for worker in self._workers)]

    def _now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000 + self._skipped_ms


# -- The program -------------------------------------------------------------------------------


class _Program:
    """Serves one engine over standard input and output."""

    def __init__(self, engine: ConnectorEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()

    def run(self) -> None:
        """Serve until the input ends."""
        self._say({"id": 0, "result": None})
        for line in sys.stdin:
            message = msgspec.json.decode(line, type=dict[str, Any])
            number, call = message.pop("id"), message.pop("call")
            done: Future[Any] = getattr(self._engine, call)(**message)
            done.add_done_callback(lambda done, number=number: self._answer(number, done))  # type: ignore[misc] # bound now

    def _answer(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            self._say({"id": number, "result": done.result()})
        else:
            self._say({"id": number, "error": repr(error)})

    def _say(self, answer: dict[str, Any]) -> None:
        with self._lock:
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()


def main() -> None:
    """Run an engine as the file named by the argument says."""
    setup = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineSetup)
    engine = ConnectorEngine(setup.extra, KvShape(**setup.shape))
    engine.start()
    _Program(engine).run()
    # Not closed in good order: what was registered ends with the process, as it does for vLLM.
    os._exit(0)


if __name__ == "__main__":
    main()
