"""What about an engine's configuration keeps its device memory from being shared (pure)."""

from typing import Any

from nearkv.transfer.errors import PullError, Reason

Theirs = Any
"""vLLM's configuration, of which only the attributes named here are used."""


def why_not_shared(vllm_config: Theirs) -> PullError | None:
    """Return why an engine on a CUDA device must not share its KV memory, if so.

    Sleep mode takes the KV cache's memory away and gives it back later, at any time and
    without a word to those who have it mapped; memory that is shared could not be taken, so
    that a sleeping engine would go on filling the device. Torch's expandable segments are no
    obstacle: the KV cache is then none of torch's memory.
    """
    device = getattr(vllm_config.device_config, "device_type", "")
    model = vllm_config.model_config
    for name in ("enable_sleep_mode", "enable_cumem_allocator"):
        if device == "cuda" and getattr(model, name, False):
            return PullError(
                Reason.MEMORY, f"{name}: the engine moves its KV memory, it cannot be shared"
            )
    return None
