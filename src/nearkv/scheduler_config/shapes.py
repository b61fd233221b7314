"""The keys of ``kubescheduler.config.k8s.io/v1`` and the types of their values (pure).

The names are those of the API's reference page. Arguments of plugins are not looked into.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

API_VERSION = "kubescheduler.config.k8s.io/v1"
KIND = "KubeSchedulerConfiguration"


class Kind(Enum):
    """Types of values, as people call them."""

    TEXT = "a string"
    INTEGER = "an integer"
    NUMBER = "a number"
    SWITCH = "true or false"
    DURATION = "a duration with its unit, such as 200ms"
    OBJECT = "an object"
    LIST = "a list"
    ANYTHING = "anything"


_NO_FIELDS: Mapping[str, "Shape"] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Shape:
    """What a value looks like; ``item`` is that of a list's items."""

    kind: Kind
    fields: Mapping[str, "Shape"] = field(default_factory=lambda: _NO_FIELDS)
    item: "Shape | None" = None


def _fields(**kinds: str) -> dict[str, Shape]:
    return {name: Shape(kind) for kind in Kind for name in kinds.get(kind.name.lower(), "").split()}


def _object(fields: Mapping[str, Shape]) -> Shape:
    return Shape(Kind.OBJECT, fields)


def _list(item: Shape) -> Shape:
    return Shape(Kind.LIST, item=item)


_ANYTHING = Shape(Kind.ANYTHING)
_PLUGIN = _object(_fields(text="name", integer="weight"))
_PLUGIN_SET = _object({"enabled": _list(_PLUGIN), "disabled": _list(_PLUGIN)})
EXTENSION_POINTS = (
    "preEnqueue",
    "queueSort",
    "preFilter",
    "filter",
    "postFilter",
    "preScore",
    "score",
    "reserve",
    "permit",
    "preBind",
    "bind",
    "postBind",
    "multiPoint",
)
_PROFILE = _object(
    {
        **_fields(text="schedulerName", integer="percentageOfNodesToScore"),
        "plugins": _object(dict.fromkeys(EXTENSION_POINTS, _PLUGIN_SET)),
        "pluginConfig": _list(_object({**_fields(text="name"), "args": _ANYTHING})),
    }
)
_EXTENDER = _object(
    {
        **_fields(
            text="urlPrefix filterVerb preemptVerb prioritizeVerb bindVerb",
            integer="weight",
            switch="enableHTTPS nodeCacheCapable ignorable",
            duration="httpTimeout",
        ),
        "tlsConfig": _object(
            _fields(
                switch="insecure",
                text="serverName certFile keyFile caFile certData keyData caData",
            )
        ),
        "managedResources": _list(_object(_fields(text="name", switch="ignoredByScheduler"))),
    }
)
CONFIGURATION = _object(
    {
        **_fields(
            text="apiVersion kind",
            integer="parallelism percentageOfNodesToScore podInitialBackoffSeconds "
            "podMaxBackoffSeconds",
            switch="enableProfiling enableContentionProfiling delayCacheUntilActive",
        ),
        "leaderElection": _object(
            _fields(
                switch="leaderElect",
                duration="leaseDuration renewDeadline retryPeriod",
                text="resourceLock resourceName resourceNamespace",
            )
        ),
        "clientConnection": _object(
            _fields(text="kubeconfig acceptContentTypes contentType", number="qps", integer="burst")
        ),
        "profiles": _list(_PROFILE),
        "extenders": _list(_EXTENDER),
    }
)
EXTENDER_KEYS = tuple(_EXTENDER.fields)

GONE: Mapping[str, str] = MappingProxyType(
    {
        "healthzBindAddress": "it went with v1beta2; use the flag --secure-port",
        "metricsBindAddress": "it went with v1beta2; use the flag --secure-port",
        "algorithmSource": "policies went with 1.23; write profiles and extenders here",
        "schedulerName": "it belongs to an entry of profiles",
        "enableHttps": "since v1 it is enableHTTPS",
    }
)
"""Keys of older versions, and what became of them."""
