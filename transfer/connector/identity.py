"""What makes one engine's KV usable by another: read off vLLM's configuration (pure).

Only attributes are read, no vLLM is imported. Weights are told apart by what they contain:
two fine-tunes of one architecture have equal configurations and different KV.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nearkv.transfer.layout import KvMemory
from nearkv.transfer.manifest import (
    BlockLayout,
    Compatibility,
    ModelIdentity,
    Numerics,
    Parallelism,
)

_DIGEST_BYTES = 16
_SAMPLES = 16
_SAMPLE_BYTES = 4096
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".gguf")
_BYTES = ("uint8", "int8")
_SAME_TYPE = {"fp8": "fp8_e4m3"}
_NOT_ABOUT_KV = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")


def describe_engine(  # noqa: PLR0913 (all but two are keyword-only)
    config: Any,  # noqa: ANN401 (vLLM's VllmConfig, which is not imported here)
    memory: KvMemory,
    *,
    block_size: int,
    kv_dtype: str,
    tp_rank: int,
    kernels: str = "",
    model_id: str = "",
) -> Compatibility:
    """Return what another engine must equal to use this one's KV.

    ``kv_dtype`` is the type of the tensors, ``kernels`` what :func:`attention_kernels` says.
    ``model_id`` replaces the digest of the weights (see ``ConnectorSettings``).
    """
    model = config.model_config
    parallel = config.parallel_config
    return Compatibility(
        model=ModelIdentity(
            name=str(model.model),
            config_hash=_digest(
                _config_fields(model.hf_text_config),
                model_id or weights_digest(str(model.model), model.revision),
            ),
            weights_quantisation=str(model.quantization or ""),
        ),
        numerics=Numerics(kv_dtype=_element_type(kv_dtype, config.cache_config.cache_dtype)),
        parallelism=Parallelism(
            tp_size=parallel.tensor_parallel_size,
            tp_rank=tp_rank,
            pp_size=parallel.pipeline_parallel_size,
        ),
        layout=BlockLayout(
            name=":".join(filter(None, (config.cache_config.kv_cache_layout, kernels))),
            block_size=block_size,
            layers=memory.layers,
            # Where layers and blocks lie may differ between two engines (it depends on how
            # many blocks there are); what a block is may not.
            layer_stride=0,
            block_stride=0,
            block_bytes=memory.block_bytes,
        ),
    )


def attention_kernels(config: Any, layers: Iterable[str]) -> str:  # noqa: ANN401 (vLLM's)
    """Return which kernels write the KV of layers.

    Each arranges the elements within a block in its own way, also where the shapes are equal:
    those of CPUs even by what the processor has, AMX or not.
    """
    context = config.compilation_config.static_forward_context
    found = set()
    for layer in map(context.get, layers):
        backend = getattr(layer, "attn_backend", None)
        if backend is not None:
            found.add(".".join(filter(None, (backend.get_name(), getattr(layer, "isa", "")))))
    return "+".join(sorted(found))


def name_of_rank(engine: str, engine_id: str, parallel: Any) -> str:  # noqa: ANN401 (vLLM's)
    """Return an engine's id, with the data-parallel rank where one server has several.

    As the agent names them. vLLM tells ranks apart by the end of ``engine_id`` only: those of
    dense models are configured as if alone. With a balancer outside, each is a server.
    """
    rank = getattr(parallel, "data_parallel_index", 0)
    is_one_of_many = engine_id.endswith(f"_dp{rank}")
    if is_one_of_many and not getattr(parallel, "data_parallel_external_lb", False):
        return f"{engine}/dp{rank}"
    return engine


def _element_type(kv_dtype: str, cache_dtype: str) -> str:
    """Return how elements are to be read: vLLM keeps those of all small types as bytes."""
    if kv_dtype not in _BYTES:
        return kv_dtype
    return f"{kv_dtype}:{_SAME_TYPE.get(cache_dtype, cache_dtype)}"


def weights_digest(model: str, revision: str | None) -> str:
    """Digest a model's weights: samples of local files, else the name and its revision."""
    folder = Path(model)
    if not folder.is_dir():
        return _digest(model, revision or "")
    return _digest(
        *(
            f"{path.name}:{path.stat().st_size}:{_sample(path)}"
            for path in sorted(folder.iterdir())
            if path.suffix in _WEIGHT_FILES and path.is_file()
        )
    )


def _sample(path: Path) -> str:
    """Digest pages spread evenly over a file: weights that differ, differ everywhere."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _config_fields(hf_config: Any) -> str:  # noqa: ANN401 (a transformers configuration)
    fields = {k: v for k, v in hf_config.to_dict().items() if k not in _NOT_ABOUT_KV}
    return json.dumps(fields, sort_keys=True, default=str)


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(f"{len(part)}:".encode() + part.encode())
    return digest.hexdigest()
