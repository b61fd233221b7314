"""KV cache sizes from model configurations."""

import pytest

from nearkv.kv_size import ModelConfigError, read_shape

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
LLAMA2_7B = {**LLAMA_8B, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}
SMOL = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
DEEPSEEK = {
    **LLAMA_8B,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 256,
}


@pytest.mark.parametrize(
    ("config", "kv_bytes"),
    [
        (LLAMA_8B, 128 << 10),
        (LLAMA2_7B, 512 << 10),
        (SMOL, 23_040),
        (DEEPSEEK, 61 * 576 * 2),
        ({"text_config": LLAMA_8B}, 128 << 10),
        ({**LLAMA_8B, "head_dim": 256}, 256 << 10),
        ({**LLAMA_8B, "torch_dtype": "torch.float32"}, 256 << 10),
    ],
    ids=["llama-3-8b", "llama-2-7b", "smollm2", "latent", "multimodal", "head-dim", "float32"],
)
def test_bytes_per_token(config, kv_bytes):
    assert read_shape(config).kv_bytes_per_token == kv_bytes


def test_the_article_s_example_is_17_gigabytes():
    # 16 sequences of 2048 tokens; the article (1.2) prints 8.6, a factor of two short.
    assert read_shape(LLAMA2_7B).kv_bytes_per_token * 16 * 2048 == pytest.approx(17.18e9, rel=1e-3)


def test_an_fp8_cache_takes_half():
    assert read_shape(LLAMA_8B, kv_dtype="fp8").kv_bytes_per_token == 64 << 10


def test_parameters_are_estimated_for_dense_models_only():
    assert read_shape(LLAMA_8B).parameters == pytest.approx(8.03e9, rel=0.01)
    assert read_shape(DEEPSEEK).parameters is None
    assert read_shape(SMOL).parameters is None, "without the vocabulary's size"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"torch_dtype": "int3"}, "dtype"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
    ],
    ids=["missing", "zero", "text", "boolean", "dtype", "rope"],
)
def test_a_bad_field_is_named(change, field):
    with pytest.raises(ModelConfigError, match=f"^{field}:"):
        read_shape({**LLAMA_8B, **change})
