"""How many bytes of KV cache a token takes, from a model's configuration (pure).

``2 * layers * KV heads * head dimension * bytes per element``: keys and values, for each
layer. It is the number of *KV* heads that counts, not of attention heads; for a model with
multi-head latent attention it is the compressed row instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nearkv.errors import NearkvError

_ELEMENT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


class ModelConfigError(NearkvError):
    """A model's configuration lacks what the size depends on, or contradicts itself."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the sizes and costs of a model depend on.

    ``latent_size`` is set for multi-head latent attention: the elements kept per token and
    layer instead of keys and values.
    """

    layers: int
    hidden_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int = 2
    latent_size: int | None = None
    parameters: int | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes, over all layers."""
        if self.latent_size is not None:
            return self.layers * self.latent_size * self.element_bytes
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes


def read_shape(config: Mapping[str, Any], *, kv_dtype: str | None = None) -> ModelShape:
    """Read a Hugging Face ``config.json``; raises :class:`ModelConfigError` naming the field.

    ``kv_dtype`` is the cache's element type where it differs from the weights'.
    """
    text = config.get("text_config")
    fields = {**config, **text} if isinstance(text, Mapping) else config
    layers = _whole(fields, "num_hidden_layers")
    hidden_size = _whole(fields, "hidden_size")
    heads = _whole(fields, "num_attention_heads")
    latent = fields.get("kv_lora_rank")
    return ModelShape(
        layers=layers,
        hidden_size=hidden_size,
        attention_heads=heads,
        kv_heads=_whole(fields, "num_key_value_heads", default=heads),
        head_dim=_whole(fields, "head_dim", default=hidden_size // heads),
        element_bytes=_element_bytes(fields, kv_dtype),
        latent_size=None if latent is None else latent + _whole(fields, "qk_rope_head_dim"),
        parameters=_estimate_parameters(fields, layers, hidden_size, heads),
    )


def _whole(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelConfigError(f"{name}: expected a positive integer, got {value!r}")
    return value


def _element_bytes(fields: Mapping[str, Any], kv_dtype: str | None) -> int:
    name = kv_dtype or fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
    size = _ELEMENT_BYTES.get(str(name).removeprefix("torch."))
    if size is None:
        known = ", ".join(sorted(_ELEMENT_BYTES))
        raise ModelConfigError(f"dtype: {name!r} is not known; known: {known}")
    return size


def _estimate_parameters(
    fields: Mapping[str, Any], layers: int, hidden_size: int, heads: int
) -> int | None:
    """Estimate the weights of a dense transformer with gated MLP; ``None`` for others."""
    if any(name in fields for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    inner, vocabulary = fields.get("intermediate_size"), fields.get("vocab_size")
    if not isinstance(inner, int) or not isinstance(vocabulary, int):
        return None
    head_dim = fields.get("head_dim") or hidden_size // heads
    kv_heads = fields.get("num_key_value_heads") or heads
    attention = 2 * hidden_size * head_dim * (heads + kv_heads)
    embeddings = vocabulary * hidden_size * (1 if fields.get("tie_word_embeddings") else 2)
    return layers * (attention + 3 * hidden_size * inner) + embeddings
