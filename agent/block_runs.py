"""Which blocks of a table were used least, with children before their parents (pure).

A block without its parents matches nothing, so what goes first are the ends of chains. Blocks are
kept in *runs*: chains that no other chain branches off but at their end. Engines tell of a block
when it is stored, not when it is hit; a run is used when blocks are stored below or into it. Runs
that nothing hangs below stand in the order of their last use, so that evicting costs no search.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from nearkv.agent.kv_events import Handle

_LONGEST_RUN = 1024
"""Taking a block out of a run costs as much as the run is long, and SGLang, whose blocks may be
single tokens, removes whole documents from their start: longer chains are several runs."""


class _Run:
    __slots__ = ("children", "handles", "parent", "used_at")

    def __init__(self, handles: list[Handle], parent: "_Run | None", used_at: float) -> None:
        self.handles = handles
        self.parent = parent
        # Most runs are ends of chains: a set for each would be most of their memory.
        self.children: set[_Run] | None = None
        self.used_at = used_at

    def adopt(self, runs: "Collection[_Run]") -> None:
        """Note that runs hang below the end of this one."""
        if self.children is None:
            self.children = set(runs)
        else:
            self.children.update(runs)


class BlockRuns:
    """The blocks of one engine, by chain and by last use; times are the caller's."""

    __slots__ = ("_leaves", "_run_of")

    def __init__(self) -> None:
        self._run_of: dict[Handle, _Run] = {}
        self._leaves: OrderedDict[_Run, None] = OrderedDict()

    def __len__(self) -> int:
        """Return how many blocks there are."""
        return len(self._run_of)

    @property
    def oldest_use_at(self) -> float | None:
        """When the run was used that would go first; ``None`` where there is nothing."""
        first = next(iter(self._leaves), None)
        return None if first is None else first.used_at

    def clear(self) -> None:
        """Forget all."""
        self._run_of.clear()
        self._leaves.clear()

    def add(self, handles: Sequence[Handle], parent: Handle | None, now: float) -> None:
        """Note that blocks are held, each below the one before it, the first below ``parent``."""
        run_of = self._run_of
        fresh = handles
        if not run_of.keys().isdisjoint(handles):
            fresh = []
            for handle in handles:
                known = run_of.get(handle)
                if known is None:
                    fresh.append(handle)
                elif not fresh:
                    parent = handle
            if not fresh:
                self._use(run_of[handles[-1]], now)
                return
        above = None if parent is None else run_of.get(parent)
        if above is not None and parent is not None and above.handles[-1] != parent:
            above = self._split(above, parent)
        if above is not None and not above.children and _fits(above, fresh):
            above.handles.extend(fresh)
            run_of.update(dict.fromkeys(fresh, above))
            self._use(above, now)
        else:
            self._append(fresh, above, now)

    def _append(self, handles: Sequence[Handle], above: _Run | None, now: float) -> None:
        """Put a chain below a run, as runs of its own."""
        for start in range(0, len(handles), _LONGEST_RUN):
            part = list(handles[start : start + _LONGEST_RUN])
            run = _Run(part, above, now)
            if above is not None:
                above.adopt((run,))
                self._leaves.pop(above, None)
            self._run_of.update(dict.fromkeys(part, run))
            above = run
        if above is not None:
            self._use(above, now)

    def remove(self, handle: Handle, now: float) -> None:
        """Note that a block is not held any more; its neighbours stay."""
        run = self._run_of.pop(handle, None)
        if run is None:
            return
        handles = run.handles
        if handles[-1] == handle:
            handles.pop()  # engines evict from the end
        else:
            handles.remove(handle)
        if not handles:
            self._unlink(run, parent_used_at=now, is_evicted=False)

    def evict(self, count: int) -> list[Handle]:
        """Take out up to ``count`` blocks of the run used least, from its end; returns them."""
        run = next(iter(self._leaves), None)
        if run is None:
            return []
        evicted = run.handles[-count:]
        del run.handles[-count:]
        for handle in evicted:
            del self._run_of[handle]
        if not run.handles:
            self._unlink(run, parent_used_at=run.used_at, is_evicted=True)
        return evicted

    def _use(self, run: _Run, now: float) -> None:
        run.used_at = now
        if not run.children:
            self._leaves[run] = None
            self._leaves.move_to_end(run)

    def _split(self, run: _Run, at: Handle) -> _Run:
        """Cut a run in two behind a block; returns the first part, which is a new run.

        The second part keeps what hangs below the run, and its place in the order of use.
        """
        cut = run.handles.index(at) + 1
        head = _Run(run.handles[:cut], run.parent, run.used_at)
        del run.handles[:cut]
        if run.parent is not None and run.parent.children is not None:
            run.parent.children.discard(run)
            run.parent.children.add(head)
        run.parent = head
        head.adopt((run,))
        self._run_of.update(dict.fromkeys(head.handles, head))
        return head

    def _unlink(self, run: _Run, *, parent_used_at: float, is_evicted: bool) -> None:
        """Take an empty run out; its children hang below its parent from now on."""
        self._leaves.pop(run, None)
        parent = run.parent
        for child in run.children or ():
            child.parent = parent
        if parent is None:
            return
        parent.adopt(run.children or ())
        if parent.children:
            parent.children.discard(run)
        if not parent.children:
            parent.used_at = parent_used_at
            self._leaves[parent] = None
            # An evicted run was the oldest of all, so nothing is older than its parent.
            self._leaves.move_to_end(parent, last=not is_evicted)


def _fits(run: _Run, handles: Sequence[Handle]) -> bool:
    return len(run.handles) + len(handles) <= _LONGEST_RUN
