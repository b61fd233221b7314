"""Rules for one entry of ``extenders`` (pure)."""

import re
from collections.abc import Iterator
from urllib.parse import SplitResult, urlsplit

from nearkv.scheduler_config.checking_shapes import REFUSES
from nearkv.scheduler_config.durations import parse_go_duration
from nearkv.scheduler_config.findings import Finding, Severity
from nearkv.scheduler_config.reading import Document, Path, format_path, list_of, mapping_of

DEFAULT_TIMEOUT_SECONDS = 5.0
_SHORT_TIMEOUT_SECONDS = 0.05
_LONG_TIMEOUT_SECONDS = 1.0
_LARGEST_WEIGHT = (2**63 - 1) // 100
"""Above it, a score of 10 times weight times 10 is more than 64 bits hold."""
_OUTRANKS_ALL = 13
_HINT = 2
_QUALIFIED = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_VERB_PATHS = ("/v1/filter", "/v1/prioritize", "/v1/preempt")


class Entry:
    """An entry with its place in the file."""

    def __init__(
        self, document: Document, index: int, value: object, *, is_only: bool = True
    ) -> None:
        self.document = document
        self.path: Path = ("extenders", index)
        self.value = mapping_of(value)
        self._is_only = is_only

    @property
    def is_ours(self) -> bool:
        """Whether the entry surely means nearkv-extender."""
        return self._is_only or "nearkv" in self.text("urlPrefix")

    def text(self, key: str) -> str:
        """Return a string, empty where it is missing or no string."""
        value = self.value.get(key)
        return value if isinstance(value, str) else ""

    def is_on(self, key: str) -> bool:
        """Tell whether a switch is on."""
        return self.value.get(key) is True

    @property
    def timeout_seconds(self) -> float:
        """The deadline that kube-scheduler would use for each call."""
        try:
            return parse_go_duration(self.text("httpTimeout")) or DEFAULT_TIMEOUT_SECONDS
        except ValueError:
            return DEFAULT_TIMEOUT_SECONDS

    @property
    def resources(self) -> list[str]:
        """Names of managed resources."""
        items = map(mapping_of, list_of(self.value.get("managedResources")))
        return [name for item in items if isinstance(name := item.get("name"), str)]

    def finding(self, severity: Severity, key: str, what: str, fix: str) -> Finding:
        """Return a finding about a key of the entry, or about the entry."""
        path = (*self.path, key) if key else self.path
        return Finding(
            severity=severity,
            where=format_path(path),
            line=self.document.line(path),
            what=what,
            fix=fix,
        )


def check_entry(entry: Entry) -> Iterator[Finding]:
    """Yield what is wrong with one extender, or worth knowing."""
    yield from _check_url(entry)
    yield from _check_tls(entry)
    yield from _check_verbs(entry)
    yield from _check_weight(entry)
    yield from _check_timeout(entry)
    yield from _check_modes(entry)
    yield from _check_resources(entry)


def _check_url(entry: Entry) -> Iterator[Finding]:
    url = _split_url(entry.text("urlPrefix"))
    if url is None:
        yield entry.finding(
            Severity.ERROR,
            "urlPrefix",
            "kube-scheduler starts, but every call fails: this is no http:// or https:// URL",
            "write it as https://<service>.<namespace>.svc:<port>/v1",
        )
        return
    if url.scheme == "http" and (entry.value.get("tlsConfig") or entry.is_on("enableHTTPS")):
        yield entry.finding(
            Severity.WARNING,
            "urlPrefix",
            "calls go out without TLS: the scheme decides, enableHTTPS and tlsConfig do not",
            "write https://",
        )
    prefix = url.path.rstrip("/")
    for key in ("filterVerb", "prioritizeVerb", "preemptVerb"):
        verb = entry.text(key)
        if verb and not f"{prefix}/{verb}".endswith(_VERB_PATHS):
            yield entry.finding(
                Severity.ERROR if entry.is_ours else Severity.WARNING,
                key,
                f"kube-scheduler posts to {prefix}/{verb}, which nearkv-extender answers with 404",
                f"let urlPrefix end in /v1 and the verb be {key.removesuffix('Verb').lower()}",
            )


def _split_url(text: str) -> SplitResult | None:
    """Return the parts of an address that can be called, else ``None``."""
    try:
        url = urlsplit(text)
        is_callable = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
    except ValueError:  # an open bracket, a port above 65535
        return None
    return url if is_callable else None


def _check_tls(entry: Entry) -> Iterator[Finding]:
    tls = mapping_of(entry.value.get("tlsConfig"))
    has_ca = bool(tls.get("caFile") or tls.get("caData"))
    insecure = tls.get("insecure") is True
    if insecure and has_ca:
        yield entry.finding(
            Severity.ERROR,
            "tlsConfig",
            f"{REFUSES}: a CA and insecure exclude each other",
            "delete insecure",
        )
    elif insecure or (entry.is_on("enableHTTPS") and not has_ca):
        yield entry.finding(
            Severity.WARNING,
            "tlsConfig" if insecure else "enableHTTPS",
            "kube-scheduler does not verify the extender's certificate: anybody can answer for it",
            "give tlsConfig.caFile" + (" and delete insecure" if insecure else ""),
        )
    for one, other in (("certFile", "keyFile"), ("certData", "keyData")):
        if bool(tls.get(one)) != bool(tls.get(other)):
            yield entry.finding(
                Severity.ERROR,
                "tlsConfig",
                f"the client certificate cannot be used: {one} and {other} come as a pair",
                f"give both {one} and {other}, or neither",
            )


def _check_verbs(entry: Entry) -> Iterator[Finding]:
    if not entry.text("filterVerb") and not entry.text("prioritizeVerb"):
        yield entry.finding(
            Severity.ERROR,
            "",
            "kube-scheduler never asks this extender for nodes: it has neither verb",
            "add prioritizeVerb: prioritize, and filterVerb: filter if pods are to be kept off "
            "nodes that cannot work",
        )
    elif not entry.text("prioritizeVerb"):
        yield entry.finding(
            Severity.WARNING,
            "prioritizeVerb",
            "nodes are filtered but not scored: pods do not move towards their KV",
            "add prioritizeVerb: prioritize and a weight",
        )
    if entry.text("bindVerb"):
        yield entry.finding(
            Severity.ERROR,
            "bindVerb",
            "kube-scheduler leaves binding to the extender; nearkv-extender does not bind, so "
            "that pods of managed resources stay Pending",
            "delete bindVerb",
        )
    if entry.text("preemptVerb"):
        broken = "is skipped" if entry.is_on("ignorable") else "makes preemption fail"
        yield entry.finding(
            Severity.WARNING,
            "preemptVerb",
            f"nearkv-extender answers preempt only where that is enabled; else the call {broken}",
            "delete preemptVerb, or enable preempt in the extender's settings",
        )


def _check_weight(entry: Entry) -> Iterator[Finding]:
    weight = entry.value.get("weight")
    if not entry.text("prioritizeVerb"):
        if weight:
            yield entry.finding(
                Severity.WARNING, "weight", "it has no effect without prioritizeVerb", "delete it"
            )
        return
    if weight is None or (isinstance(weight, int) and weight <= 0):
        yield entry.finding(
            Severity.ERROR,
            "weight",
            f"{REFUSES}: prioritizeVerb needs a weight above 0",
            "write weight: 8",
        )
    elif isinstance(weight, int) and weight > _LARGEST_WEIGHT:
        yield entry.finding(
            Severity.ERROR,
            "weight",
            "score x weight x 10 is more than 64 bits hold: the best nodes get the worst points",
            "write weight: 8",
        )
    elif isinstance(weight, int):
        yield from _describe_weight(entry, weight)


def _describe_weight(entry: Entry, weight: int) -> Iterator[Finding]:
    points = f"a score of 10 adds {weight * 100} points; the default plugins add up to 1200"
    if weight >= _OUTRANKS_ALL:
        yield entry.finding(
            Severity.INFO,
            "weight",
            f"{points}: this extender outranks all of them together",
            "write 3 to 12 where spreading and affinity should count, too",
        )
    elif weight <= _HINT:
        yield entry.finding(
            Severity.WARNING,
            "weight",
            f"{points}: one preferred node affinity (200) is as strong or stronger",
            "write weight: 8",
        )


def _check_timeout(entry: Entry) -> Iterator[Finding]:
    seconds = entry.timeout_seconds
    given = entry.value.get("httpTimeout")
    if given is None or (isinstance(given, str) and given in {"0", "0s"}):
        yield entry.finding(
            Severity.WARNING,
            "httpTimeout",
            "kube-scheduler waits up to 5 s for each call, and schedules nothing meanwhile",
            "write httpTimeout: 200ms",
        )
    elif not isinstance(given, str):
        return
    elif seconds < 0:
        yield entry.finding(
            Severity.ERROR,
            "httpTimeout",
            "every call fails at once: the deadline has passed before it",
            "write httpTimeout: 200ms",
        )
    elif seconds > _LONG_TIMEOUT_SECONDS:
        yield entry.finding(
            Severity.WARNING,
            "httpTimeout",
            f"a silent extender stops all scheduling for {seconds:g} s with each call, ignorable "
            "or not",
            "write 200ms to 1s",
        )
    elif seconds < _SHORT_TIMEOUT_SECONDS:
        yield entry.finding(
            Severity.WARNING,
            "httpTimeout",
            f"calls that take more than {seconds * 1e3:g} ms are given up, their scores lost "
            "without a word",
            "write httpTimeout: 200ms",
        )


def _check_modes(entry: Entry) -> Iterator[Finding]:
    if not entry.is_on("nodeCacheCapable"):
        yield entry.finding(
            Severity.WARNING,
            "nodeCacheCapable",
            "kube-scheduler sends whole Node objects twice for each pod (3.8 MB for 500 nodes, "
            "148 ms a pod) instead of names (7 kB, 12 ms)",
            "write nodeCacheCapable: true",
        )
    if not entry.is_on("ignorable"):
        yield entry.finding(
            Severity.WARNING,
            "ignorable",
            "while the extender is down, no pod of its managed resources is scheduled",
            "write ignorable: true",
        )


def _check_resources(entry: Entry) -> Iterator[Finding]:
    if not entry.resources:
        yield entry.finding(
            Severity.WARNING,
            "managedResources",
            "every pod of this scheduler is sent to the extender",
            "write managedResources: [{name: nvidia.com/gpu}]",
        )
    items = list_of(entry.value.get("managedResources"))
    for index, item in enumerate(map(mapping_of, items)):
        yield from _check_resource(entry, index, item.get("name"))
        if item.get("ignoredByScheduler") is True:
            yield _finding_at(
                entry,
                index,
                f"kube-scheduler stops counting {item.get('name')}, and nearkv-extender does not "
                "count it in its place: pods are bound to nodes without free devices",
                "delete ignoredByScheduler",
            )


def _check_resource(entry: Entry, index: int, name: object) -> Iterator[Finding]:
    if name is None or name == "":
        wrong = "the resource has no name"
    elif isinstance(name, str) and not _is_extended(name):
        wrong = f"{name!r} is not the name of an extended resource"
    else:
        return
    fix = "write it as the device plugin announces it, such as nvidia.com/gpu"
    yield _finding_at(entry, index, f"{REFUSES}: {wrong}", fix)


def _is_extended(name: str) -> bool:
    """Tell whether kube-scheduler takes a name for an extended resource: domain/name."""
    domain, _, rest = name.partition("/")
    native = domain == "kubernetes.io" or domain.endswith(".kubernetes.io")
    requests = name.startswith("requests.")
    return bool(_QUALIFIED.fullmatch(name)) and bool(rest) and not native and not requests


def _finding_at(entry: Entry, index: int, what: str, fix: str) -> Finding:
    path = (*entry.path, "managedResources", index)
    return Finding(
        severity=Severity.ERROR,
        where=format_path(path),
        line=entry.document.line(path),
        what=what,
        fix=fix,
    )
