"""What makes one engine's KV usable by another: read off vLLM's configuration (pure).

Only attributes are read, no vLLM is imported. Weights are told apart by what they contain:
two fine-tunes of one architecture have equal configurations and different KV.
"""

import hashlib
import json
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
_NOT_ABOUT_KV = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")


def describe_engine(
    config: Any,  # noqa: ANN401 (vLLM's VllmConfig, which is not imported here)
    memory: KvMemory,
    *,
    block_size: int,
    kv_dtype: str,
    tp_rank: int,
    model_id: str = "",
) -> Compatibility:
    """Return what another engine must equal to use this one's KV.

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
        numerics=Numerics(kv_dtype=kv_dtype),
        parallelism=Parallelism(
            tp_size=parallel.tensor_parallel_size,
            tp_rank=tp_rank,
            pp_size=parallel.pipeline_parallel_size,
        ),
        layout=BlockLayout(
            name=str(config.cache_config.kv_cache_layout or ""),
            block_size=block_size,
            layers=memory.layers,
            # Where layers and blocks lie may differ between two engines (it depends on how
            # many blocks there are); what a block is may not.
            layer_stride=0,
            block_stride=0,
            block_bytes=memory.block_bytes,
        ),
    )


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
