"""Which kinds of KV cache keep every block of a prefix (pure; no vLLM is imported).

A sliding window, chunked attention or a state-space model lets go of blocks that no later token
of the *same request* looks at, and puts one empty block in their place. A lease on such blocks
would give them out as the KV of their tokens, and the shared store would keep them as that.
"""

from typing import Any

from nearkv.transfer.errors import PullError, Reason

_KEEPS_ALL = "FullAttentionSpec"
_BUT_NOT = "RSWASpec"
"""It keeps all of the prompt, but not all of what was generated."""


def why_not_kept(spec: Any) -> PullError | None:  # noqa: ANN401 (vLLM's ``KVCacheSpec``)
    """Return why prefixes of a cache cannot be given to others, if so.

    Layers that differ in size are one spec of several. With the hybrid manager off, vLLM gives
    windowed layers the spec of full attention, and keeps all of their blocks.
    """
    several = getattr(spec, "kv_cache_specs", None)
    for each in several.values() if isinstance(several, dict) else [spec]:
        names = {kind.__name__ for kind in type(each).__mro__}
        if _KEEPS_ALL not in names or _BUT_NOT in names:
            return PullError(
                Reason.KV_GROUPS,
                f"{type(each).__name__}: only a cache that keeps every block of a prefix can be "
                "transferred; --disable-hybrid-kv-cache-manager makes windowed ones do so",
            )
    return None
