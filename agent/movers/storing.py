"""A shared store inside a mover: what is put there, asked of it, and pulled from it.

Pulls come as those of any backend (``StoreBackend``), so all that holds for pulls into an
engine's memory holds for them. Puts and questions have threads of their own: a put that takes
long delays no question. They write into no engine's memory, so nobody waits for their end: the
pool goes on without them at their deadline, and kills a mover that stays silent.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from nearkv.agent.movers.backends import STORE, Backends
from nearkv.agent.movers.memories import SourceMemory
from nearkv.agent.movers.messages import (
    AddSource,
    AskStore,
    PutFinished,
    PutPrefix,
    StoreAnswered,
    StoreSubject,
    Trouble,
)
from nearkv.block_keys import KeyNamespace, chain_keys, root_key
from nearkv.transfer.backends.contract import (
    Link,
    Path,
    Probe,
    PullReport,
    PullRequest,
    Region,
    Server,
    Source,
    Stop,
    monotonic_ms,
)
from nearkv.transfer.errors import PullError, Reason, TransferError
from nearkv.transfer.store.contract import StoredPrefix, StoreReport, Tier
from nearkv.transfer.store.link import StoreLink
from nearkv.transfer.store.opening import StoreOptions, check_tier, open_tier, tier_of
from nearkv.transfer.store.packing import Packer
from nearkv.transfer.store.searching import count_stored

Send = Callable[[msgspec.Struct], None]

_ASKING_THREADS = 4
_PROBE_MS = 3_000

_decoder = msgspec.msgpack.Decoder(StoreSubject)


class StoreBackend:
    """The store that the options (those of ``StoreOptions``) name; opened when first needed."""

    name = STORE

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - msgspec checks them
        self._given = options
        self._lock = threading.Lock()
        self._opened: tuple[Tier, StoreOptions] | None = None

    def probe(self) -> Probe:
        """Say whether the store works: a small value goes there and back; never raises."""
        try:
            tier, _ = self.open()
            check_tier(tier, Stop(monotonic_ms() + _PROBE_MS))
        except PullError as error:
            # What is in a full store can still be read.
            usable = error.reason is Reason.STORE_FULL
            return Probe(name=self.name, usable=usable, detail=f"{error.reason}: {error}")
        return Probe(name=self.name, usable=True)

    def serve(self, source: Source) -> Server:  # noqa: ARG002 (the contract's)
        """Raise: nobody pulls from a store by way of us."""
        raise PullError(Reason.NO_PATH, "a store is not served")

    def connect(self, offer: bytes, target: Region, stop: Stop) -> Link:  # noqa: ARG002 (same)
        """Return a way from what the offer (a ``StoreSubject``) says into a memory."""
        return _StorePull(self, _decoder.decode(offer), target)

    def open(self) -> tuple[Tier, StoreOptions]:
        """Return the tier and how it is used; raises :class:`PullError`; tried again then."""
        with self._lock:
            if self._opened is None:
                try:
                    options = msgspec.convert(self._given, StoreOptions)
                    self._opened = open_tier(options), options
                except (msgspec.ValidationError, ValueError) as error:
                    raise PullError(Reason.NO_PATH, f"there is no store: {error}") from error
            return self._opened

    def link_of(self, subject: StoreSubject, region: Region) -> StoreLink:
        """Return the way between a memory and the store."""
        tier, options = self.open()
        return StoreLink(
            tier,
            region,
            subject.own,
            subject.source,
            secret=options.secret or None,
            tenant=subject.tenant,
            segment_blocks=options.segment_blocks,
        )

    def prefix_of(self, subject: StoreSubject) -> StoredPrefix:
        """Return what is stored of a subject: its whole blocks.

        The model's name is left out of the block keys, as it is of the store's: it is for
        people, and may differ where the model does not.
        """
        _, options = self.open()
        root = root_key(KeyNamespace("", subject.lora, subject.cache_salt), options.secret)
        keys = chain_keys(root, subject.token_ids, subject.own.layout.block_size)
        return StoredPrefix(
            token_ids=subject.token_ids,
            block_keys=tuple(keys),
            cache_salt=subject.cache_salt,
            lora=subject.lora,
        )

    def count(self, subject: StoreSubject, first_block: int, stop: Stop) -> int:
        """Return how many leading blocks all ranks could have; see ``count_stored``."""
        tier, options = self.open()
        prefix = self.prefix_of(subject)
        least = len(prefix.block_keys)
        for rank in range(subject.own.parallelism.tp_size):
            shares = msgspec.structs.replace(subject.own.parallelism, tp_rank=rank)
            own = msgspec.structs.replace(subject.own, parallelism=shares)
            packer = Packer(own, subject.source, options.secret or None, subject.tenant)
            found = count_stored(
                tier,
                packer,
                prefix,
                stop,
                segment_blocks=options.segment_blocks,
                first_block=first_block,
            )
            least = min(least, found)
        return least


class _StorePull:
    """A link from a store: all blocks that are asked for, or a reason."""

    def __init__(self, store: StoreBackend, subject: StoreSubject, target: Region) -> None:
        self._store = store
        self._subject = subject
        self._target = target
        self._tier = ""

    @property
    def path(self) -> Path:
        """The store, whichever it is."""
        return Path(name=STORE, detail=self._tier)

    def pull(self, request: PullRequest, stop: Stop) -> PullReport:
        """Bring blocks from ``first_block`` on; those before it are there already."""
        stop.check()
        _, options = self._store.open()
        self._tier = tier_of(options.url)
        link = self._store.link_of(self._subject, self._target)
        try:
            report = link.pull(
                self._store.prefix_of(self._subject),
                request.target_blocks,
                stop,
                skip_blocks=request.first_block,
            )
        except ValueError as error:
            raise PullError(Reason.RANGE, str(error)) from error
        if report.reason is not None:
            raise PullError(report.reason, report.detail)
        layout = self._target.layout
        return PullReport(
            size_bytes=len(request.target_blocks) * layout.layers * layout.block_bytes,
            seconds=report.seconds,
            path=self.path,
            pieces=report.segments,
        )

    def close(self) -> None:
        """Do nothing: each call to a tier stands for itself."""


class Storer:
    """Runs puts one after the other, questions beside them; answers with ``send``."""

    def __init__(self, backends: Backends, send: Send) -> None:
        self._backends = backends
        self._send = send
        self._sources: dict[str, SourceMemory] = {}
        self._puts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._questions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for calls, count in ((self._puts, 1), (self._questions, _ASKING_THREADS)):
            for _ in range(count):
                threading.Thread(target=self._work, args=(calls,), daemon=True).start()

    def add_source(self, message: AddSource, fds: list[int]) -> None:
        """Take memory to put blocks of."""
        memory = SourceMemory(fds[0], fds[1], message.layout, message.slots, message.form)
        self._sources[message.key] = memory

    def put(self, message: PutPrefix) -> None:
        """Store a prefix."""
        self._puts.put(lambda: self._send(self._put(message)))

    def ask(self, message: AskStore) -> None:
        """Answer how much of a prefix is stored."""
        self._questions.put(lambda: self._send(self._answer(message)))

    def _work(self, calls: "queue.SimpleQueue[Callable[[], None]]") -> None:
        while True:
            calls.get()()

    def _put(self, message: PutPrefix) -> msgspec.Struct:
        def put(stop: Stop) -> msgspec.Struct:
            return PutFinished(id=message.id, report=self._stored(message, stop))

        return self._guarded(
            message,
            put,
            lambda reason, text: PutFinished(id=message.id, reason=reason, message=text),
        )

    def _answer(self, message: AskStore) -> msgspec.Struct:
        def count(stop: Stop) -> msgspec.Struct:
            blocks = self._store().count(message.subject, message.first_block, stop)
            return StoreAnswered(id=message.id, blocks=blocks)

        return self._guarded(
            message,
            count,
            lambda reason, text: StoreAnswered(id=message.id, reason=reason, message=text),
        )

    def _stored(self, message: PutPrefix, stop: Stop) -> StoreReport:
        memory = self._sources.get(message.key)
        if memory is None:
            raise PullError(Reason.NO_SOURCE, "the source is not known here")
        source = memory.source()
        message.fence.check(source.slots)
        store = self._store()
        return store.link_of(message.subject, source.region).put(
            store.prefix_of(message.subject),
            message.block_ids,
            stop,
            still_valid=lambda: message.fence.check(source.slots),
        )

    def _store(self) -> StoreBackend:
        store = self._backends.get(STORE)
        if not isinstance(store, StoreBackend):
            raise PullError(Reason.NO_PATH, "there is no store")
        return store

    def _guarded(
        self,
        message: PutPrefix | AskStore,
        work: Callable[[Stop], msgspec.Struct],
        refuse: Callable[[Reason, str], msgspec.Struct],
    ) -> msgspec.Struct:
        """Do something until its deadline; whatever goes wrong becomes an answer."""
        stop = Stop(message.deadline_ms)
        try:
            stop.check()
            return work(stop)
        except TransferError as error:
            return refuse(error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - whatever a library throws, the mover answers
            self._send(Trouble(event="store_failed", error=repr(error)))
            return refuse(Reason.INTERNAL, repr(error))
