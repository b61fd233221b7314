"""Rules for what is around the extenders: profiles, sampling, leader election, backoff (pure)."""

from collections.abc import Iterator, Sequence

from nearkv.scheduler_config.checking_shapes import REFUSES
from nearkv.scheduler_config.extender_rules import Entry
from nearkv.scheduler_config.findings import Finding, Severity
from nearkv.scheduler_config.reading import Document, Path, format_path, list_of, mapping_of
from nearkv.scheduler_config.sampling import sampled_nodes

DEFAULT_SCHEDULER = "default-scheduler"
_SHARE = "percentageOfNodesToScore"
_WHOLE = 100
_DEFAULT_LEASE = "kube-scheduler"
_INITIAL_BACKOFF_SECONDS = 1
_LONGEST_BACKOFF_SECONDS = 10


def check_scheduler(document: Document, entries: Sequence[Entry]) -> Iterator[Finding]:
    """Yield what is wrong around the extenders."""
    value = mapping_of(document.value)
    if not entries:
        yield _finding(
            document,
            ("extenders",),
            Severity.ERROR,
            "kube-scheduler asks no extender: pods do not move towards their KV",
            "add an entry under extenders; docs/scheduling.md shows one",
        )
    yield from _check_profiles(document, entries)
    yield from _check_sampling(document, has_extender=bool(entries))
    yield from _check_election(document)
    yield from _check_backoff(document)
    parallelism = value.get("parallelism")
    if isinstance(parallelism, int) and parallelism <= 0:
        yield _finding(
            document,
            ("parallelism",),
            Severity.ERROR,
            f"{REFUSES}: it must be above 0",
            "delete it: the default is 16",
        )
    yield from _check_together(entries)


def profile_names(document: Document) -> list[str]:
    """Return the names of schedulers that a document sets up."""
    profiles = list_of(mapping_of(document.value).get("profiles"))
    names = [mapping_of(profile).get("schedulerName") for profile in profiles]
    return [name if isinstance(name, str) else DEFAULT_SCHEDULER for name in names] or [
        DEFAULT_SCHEDULER
    ]


def share_of(document: Document, index: int) -> int | None:
    """Return the percentage that counts for a profile: its own, or the one at the top."""
    value = mapping_of(document.value)
    profiles = list_of(value.get("profiles"))
    own = mapping_of(profiles[index]).get(_SHARE) if index < len(profiles) else None
    share = value.get(_SHARE) if own is None else own
    return share if isinstance(share, int) else None


def _check_profiles(document: Document, entries: Sequence[Entry]) -> Iterator[Finding]:
    names = profile_names(document)
    for index, name in enumerate(names):
        path: Path = ("profiles", index, "schedulerName")
        if name in names[:index]:
            yield _finding(
                document,
                path,
                Severity.ERROR,
                f"{REFUSES}: two profiles are called {name}",
                "give each profile a schedulerName of its own",
            )
        elif name == DEFAULT_SCHEDULER and entries:
            yield _finding(
                document,
                path,
                Severity.WARNING,
                "the extender is asked for pods of the cluster's default scheduler, and turns "
                "its batching of like pods off",
                "run a second kube-scheduler with schedulerName: llm-scheduler, and name that in "
                "the pods' spec.schedulerName",
            )
    if len(names) > 1 and entries:
        yield _finding(
            document,
            ("profiles",),
            Severity.WARNING,
            f"extenders are shared by all profiles: {', '.join(names)}",
            "keep one profile in this file, and run other schedulers as processes of their own",
        )


def _check_sampling(document: Document, *, has_extender: bool) -> Iterator[Finding]:
    value = mapping_of(document.value)
    profiles = list_of(value.get("profiles"))
    places: list[Path] = [(_SHARE,)]
    places += [("profiles", index, _SHARE) for index in range(len(profiles))]
    for path in places:
        share = _at(document.value, path)
        if isinstance(share, int) and not 0 <= share <= _WHOLE:
            yield _finding(
                document,
                path,
                Severity.ERROR,
                f"{REFUSES}: {share} is not between 0 and 100",
                f"write {_SHARE}: 100",
            )
    for index in range(max(1, len(profiles))):
        share = share_of(document, index)
        if has_extender and (share is None or 0 <= share < _WHOLE):
            sizes = ", ".join(
                f"{sampled_nodes(nodes, share):,} of {nodes:,}" for nodes in (500, 1000, 5000)
            )
            path = ("profiles", index, _SHARE) if profiles else (_SHARE,)
            yield _finding(
                document,
                path,
                Severity.WARNING,
                f"kube-scheduler stops its search at {sizes} feasible nodes; the extender never "
                "sees the others, where the KV may be",
                f"write {_SHARE}: 100 in the profile for LLM pods (at 5,000 feasible nodes about "
                "41 ms a pod instead of 12)",
            )


def _check_election(document: Document) -> Iterator[Finding]:
    names = profile_names(document)
    election = mapping_of(mapping_of(document.value).get("leaderElection"))
    elects = election.get("leaderElect") is not False
    lease = election.get("resourceName") or _DEFAULT_LEASE
    namespace = election.get("resourceNamespace") or "kube-system"
    shared = lease == _DEFAULT_LEASE and namespace == "kube-system"
    if elects and shared and DEFAULT_SCHEDULER not in names:
        yield _finding(
            document,
            ("leaderElection", "resourceName"),
            Severity.ERROR,
            "this scheduler waits for the lease kube-system/kube-scheduler, which the cluster's "
            "own scheduler holds, and schedules nothing",
            f"write leaderElection: {{resourceName: {names[0]}}}, or leaderElect: false for a "
            "single replica",
        )
    lock = election.get("resourceLock")
    if elects and isinstance(lock, str) and lock not in {"", "leases"}:
        yield _finding(
            document,
            ("leaderElection", "resourceLock"),
            Severity.ERROR,
            f"{REFUSES}: {lock} is not leases",
            "delete resourceLock",
        )


def _check_backoff(document: Document) -> Iterator[Finding]:
    value = mapping_of(document.value)
    initial = value.get("podInitialBackoffSeconds", _INITIAL_BACKOFF_SECONDS)
    longest = value.get("podMaxBackoffSeconds", _LONGEST_BACKOFF_SECONDS)
    if not isinstance(initial, int) or not isinstance(longest, int):
        return
    if initial <= 0 or longest < initial:
        yield _finding(
            document,
            ("podInitialBackoffSeconds",) if initial <= 0 else ("podMaxBackoffSeconds",),
            Severity.ERROR,
            f"{REFUSES}: backoff must begin above 0 and not end below its beginning",
            "delete both: the defaults are 1 and 10 seconds",
        )


def _check_together(entries: Sequence[Entry]) -> Iterator[Finding]:
    """Yield what is wrong between extenders."""
    binders = [entry for entry in entries if entry.text("bindVerb")]
    for entry in binders[1:]:
        yield entry.finding(
            Severity.ERROR,
            "bindVerb",
            f"{REFUSES}: more than one extender binds",
            "delete bindVerb",
        )
    seen: dict[str, Entry] = {}
    for entry in entries:
        for index, name in enumerate(entry.resources):
            if name in seen:
                path = (*entry.path, "managedResources", index)
                yield _finding(
                    entry.document,
                    path,
                    Severity.ERROR,
                    f"{REFUSES}: {name} is managed by two entries",
                    f"name it in {format_path(seen[name].path)} only",
                )
            seen.setdefault(name, entry)


def _at(value: object, path: Path) -> object:
    for part in path:
        if isinstance(part, int):
            items = list_of(value)
            value = items[part] if part < len(items) else None
        else:
            value = mapping_of(value).get(part)
    return value


def _finding(document: Document, path: Path, severity: Severity, what: str, fix: str) -> Finding:
    return Finding(
        severity=severity,
        where=format_path(path),
        line=document.line(path),
        what=what,
        fix=fix,
    )
