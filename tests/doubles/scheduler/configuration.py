"""What the double is configured with: extenders as in a KubeSchedulerConfiguration."""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import yaml

from nearkv.scheduler_config.durations import parse_go_duration

DEFAULT_TIMEOUT_SECONDS = 5.0
DEFAULT_NAME = "default-scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtenderConfig:
    """One entry of ``extenders``; names and defaults are kube-scheduler's."""

    url_prefix: str
    filter_verb: str = ""
    prioritize_verb: str = ""
    preempt_verb: str = ""
    bind_verb: str = ""
    weight: int = 0
    timeout_seconds: float = 0.0
    node_cache_capable: bool = False
    ignorable: bool = False
    managed_resources: frozenset[str] = frozenset()
    ignored_resources: frozenset[str] = frozenset()
    tls: ssl.SSLContext | None = None

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Self:
        """Read an entry as written in the file."""
        managed = entry.get("managedResources") or []
        timeout = entry.get("httpTimeout")
        return cls(
            url_prefix=entry.get("urlPrefix", ""),
            filter_verb=entry.get("filterVerb", ""),
            prioritize_verb=entry.get("prioritizeVerb", ""),
            preempt_verb=entry.get("preemptVerb", ""),
            bind_verb=entry.get("bindVerb", ""),
            weight=entry.get("weight", 0),
            timeout_seconds=parse_go_duration(timeout) if timeout else 0.0,
            node_cache_capable=entry.get("nodeCacheCapable", False),
            ignorable=entry.get("ignorable", False),
            managed_resources=frozenset(item["name"] for item in managed),
            ignored_resources=frozenset(
                item["name"] for item in managed if item.get("ignoredByScheduler")
            ),
            tls=_tls(entry),
        )

    @property
    def timeout(self) -> float:
        """The deadline of a call in seconds: 0 stands for 5 s."""
        return self.timeout_seconds or DEFAULT_TIMEOUT_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """A scheduler with one profile; ``scored_resources`` are those that least allocated counts."""

    extenders: Sequence[ExtenderConfig] = ()
    scheduler_name: str = DEFAULT_NAME
    percentage_of_nodes_to_score: int = 0
    initial_backoff_seconds: float = 1.0
    longest_backoff_seconds: float = 10.0
    scored_resources: tuple[str, ...] = ("cpu", "memory")

    @classmethod
    def load(cls, path: Path, *, url_prefix: str | None = None) -> Self:
        """Read a configuration file; ``url_prefix`` replaces that of every extender."""
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        profile = (document.get("profiles") or [{}])[0]
        extenders = [ExtenderConfig.from_entry(entry) for entry in document.get("extenders") or ()]
        if url_prefix is not None:
            extenders = [replace(one, url_prefix=url_prefix, tls=None) for one in extenders]
        share = profile.get("percentageOfNodesToScore")
        if share is None:
            share = document.get("percentageOfNodesToScore", 0)
        return cls(
            extenders=extenders,
            scheduler_name=profile.get("schedulerName", DEFAULT_NAME),
            percentage_of_nodes_to_score=share,
            initial_backoff_seconds=document.get("podInitialBackoffSeconds", 1.0),
            longest_backoff_seconds=document.get("podMaxBackoffSeconds", 10.0),
        )

    @property
    def ordered_extenders(self) -> list[ExtenderConfig]:
        """The extenders in the order of calls: ignorable ones come last."""
        return sorted(self.extenders, key=lambda extender: extender.ignorable)


def _tls(entry: Mapping[str, Any]) -> ssl.SSLContext | None:
    options = entry.get("tlsConfig") or {}
    if not options and not entry.get("enableHTTPS"):
        return None
    context = ssl.create_default_context(cafile=options.get("caFile"))
    if options.get("insecure") or not options.get("caFile"):
        # With enableHTTPS and no CA, kube-scheduler does not verify.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if options.get("certFile"):
        context.load_cert_chain(options["certFile"], options.get("keyFile"))
    return context
