"""Make the *tiny* model: a four-layer Llama with random weights, for tests.

Run by the engine environment's interpreter::

    python tiny_model.py --output build/models/tiny TEXT_FILE...

The tokenizer is a byte-level BPE trained on the given texts. Weights come from a seeded
generator, so that the same texts and seed give the same files. It takes seconds.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

# torch and safetensors live in the engine environment only.
import torch  # type: ignore[import-not-found]
from safetensors.torch import save_file  # type: ignore[import-not-found]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
BOS_ID, EOS_ID, PAD_ID = range(3)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<s>{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model; the defaults run fast on one core and still fill many blocks."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 8192


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE: every byte has a token, so no text is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def random_weights(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Draw the weights in a fixed order, named as Hugging Face's Llama names them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> torch.Tensor:
        scale = columns**-0.5  # keeps activations near unit size through random layers
        return (torch.randn(rows, columns, generator=generator) * scale).to(torch.bfloat16)

    ones = torch.ones(shape.hidden_size, dtype=torch.bfloat16)
    query_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {"model.embed_tokens.weight": draw(shape.vocab_size, shape.hidden_size)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones.clone(),
            f"{prefix}.self_attn.q_proj.weight": draw(query_rows, shape.hidden_size),
            f"{prefix}.self_attn.k_proj.weight": draw(kv_rows, shape.hidden_size),
            f"{prefix}.self_attn.v_proj.weight": draw(kv_rows, shape.hidden_size),
            f"{prefix}.self_attn.o_proj.weight": draw(shape.hidden_size, query_rows),
            f"{prefix}.post_attention_layernorm.weight": ones.clone(),
            f"{prefix}.mlp.gate_proj.weight": draw(shape.intermediate_size, shape.hidden_size),
            f"{prefix}.mlp.up_proj.weight": draw(shape.intermediate_size, shape.hidden_size),
            f"{prefix}.mlp.down_proj.weight": draw(shape.hidden_size, shape.intermediate_size),
        }
    weights["model.norm.weight"] = ones.clone()
    weights["lm_head.weight"] = draw(shape.vocab_size, shape.hidden_size)
    return weights


def silence_unprintable(lm_head: torch.Tensor, tokenizer: Tokenizer) -> None:
    """Zero the output rows of tokens that are not plain text.

    A zero row has logit 0, and the greatest of two thousand random logits is above 0, so
    greedy decoding never ends early and never yields half a character.
    """
    for token_id in range(lm_head.shape[0]):
        text = tokenizer.decode([token_id])  # special tokens decode to nothing
        if not (text and text.isascii() and text.isprintable()):
            lm_head[token_id].zero_()


def model_config(shape: Shape) -> dict[str, object]:
    """Give the ``config.json`` of the model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "bfloat16",
    }


def tokenizer_config(shape: Shape) -> dict[str, object]:
    """Give the ``tokenizer_config.json`` of the model."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
    }


def write_model(output: Path, texts: list[str], *, shape: Shape, seed: int) -> None:
    """Write tokenizer, weights and configuration into the folder ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts, shape.vocab_size)
    weights = random_weights(shape, seed)
    silence_unprintable(weights["lm_head.weight"], tokenizer)
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(output / "tokenizer.json"))
    (output / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    for name, content in (
        ("config.json", model_config(shape)),
        ("tokenizer_config.json", tokenizer_config(shape)),
        ("generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}),
    ):
        (output / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Read the arguments and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("texts", type=Path, nargs="+", help="texts to train the tokenizer on")
    arguments = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in arguments.texts]
    write_model(arguments.output, texts, shape=Shape(), seed=arguments.seed)


if __name__ == "__main__":
    main()
