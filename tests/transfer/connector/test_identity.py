"""What makes one engine's KV usable by another."""

from types import SimpleNamespace

import pytest

from nearkv.transfer.connector.identity import (
    attention_kernels,
    describe_engine,
    name_of_rank,
    weights_digest,
)
from nearkv.transfer.errors import PacketError, Reason
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.manifest import LeaseRef, Manifest, Prefix, Source, check_fit

MEMORY = KvMemory(
    size=4096 * 64, layers=4, blocks=16, layer_stride=65536, block_stride=4096, block_bytes=4096
)


def weights(folder, content, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return str(folder)


class HfConfig:
    def __init__(self, **fields):
        self.fields = fields

    def to_dict(self):
        return self.fields


def vllm_config(model, **fields):
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            revision=None,
            quantization=fields.get("quantization"),
            hf_text_config=HfConfig(
                num_hidden_layers=4, rope_theta=fields.get("rope_theta", 1e4), _name_or_path=model
            ),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=fields.get("tp", 1), pipeline_parallel_size=1
        ),
        cache_config=SimpleNamespace(
            kv_cache_layout=fields.get("layout", "LBHNC"),
            cache_dtype=fields.get("cache_dtype", "auto"),
        ),
    )


def describe(config, **options):
    values = {"block_size": 32, "kv_dtype": "bfloat16", "tp_rank": 0, **options}
    memory = values.pop("memory", MEMORY)
    return describe_engine(config, memory, **values)


def refusal(ours, theirs):
    manifest = Manifest(
        compatibility=theirs,
        source=Source(engine="p", epoch="e"),
        prefix=Prefix(token_ids=b"", num_tokens=0, block_keys=b""),
        block_ids=(),
        lease=LeaseRef(id="l", slot=0, generation=0, ttl_ms=1),
    )
    try:
        check_fit(manifest, ours, b"")
    except PacketError as error:
        return error.reason
    return None


def test_the_same_weights_in_two_places_fit(tmp_path):
    one = weights(tmp_path / "a", b"w" * 100_000)
    two = weights(tmp_path / "b", b"w" * 100_000)
    assert refusal(describe(vllm_config(one)), describe(vllm_config(two))) is None


def test_more_blocks_on_one_side_do_not_matter(tmp_path):
    config = vllm_config(weights(tmp_path / "a", b"w"))
    larger = KvMemory(
        size=8192 * 64,
        layers=4,
        blocks=32,
        layer_stride=131072,
        block_stride=4096,
        block_bytes=4096,
    )
    assert refusal(describe(config), describe(config, memory=larger)) is None


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({"rope_theta": 5e5}, {}, Reason.MODEL),
        ({"quantization": "awq"}, {}, Reason.MODEL),
        ({}, {"kv_dtype": "float16"}, Reason.DTYPE),
        ({"tp": 2}, {}, Reason.TOPOLOGY),
        ({}, {"tp_rank": 1}, Reason.TOPOLOGY),
        ({}, {"block_size": 16}, Reason.LAYOUT),
        ({"layout": "LBNHC"}, {}, Reason.LAYOUT),
    ],
)
def test_what_differs_is_refused_with_its_reason(tmp_path, change, options, reason):
    model = weights(tmp_path / "a", b"w" * 10)
    ours = describe(vllm_config(model))
    assert refusal(ours, describe(vllm_config(model, **change), **options)) is reason


def test_two_fine_tunes_of_one_architecture_are_told_apart(tmp_path):
    base = bytes(range(256)) * 4000
    tuned = bytearray(base)
    tuned[1::2] = bytes(len(tuned[1::2]))
    one = weights(tmp_path / "a", base)
    two = weights(tmp_path / "b", bytes(tuned))
    ours, theirs = describe(vllm_config(one)), describe(vllm_config(two))
    assert refusal(ours, theirs) is Reason.MODEL


def test_a_given_model_id_stands_for_the_weights(tmp_path):
    one = vllm_config(weights(tmp_path / "a", b"x"))
    two = vllm_config("org/model-from-elsewhere")
    ours = describe(one, model_id="m@1")
    assert refusal(ours, describe(two, model_id="m@1")) is None
    assert refusal(ours, describe(two, model_id="m@2")) is Reason.MODEL


def test_small_and_several_files_are_digested(tmp_path):
    folder = tmp_path / "a"
    weights(folder, b"")
    before = weights_digest(str(folder), None)
    weights(folder, b"1", "other.safetensors")
    assert weights_digest(str(folder), None) != before
    assert weights_digest("org/model", "r1") != weights_digest("org/model", "r2")


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        (("bfloat16", "auto"), ("bfloat16", "bfloat16"), None),
        (("uint8", "fp8"), ("uint8", "fp8_e4m3"), None),
        (("uint8", "fp8_e5m2"), ("uint8", "fp8_e4m3"), Reason.DTYPE),
        (("uint8", "nvfp4"), ("uint8", "fp8"), Reason.DTYPE),
    ],
)
def test_types_that_are_all_kept_as_bytes_are_told_apart(tmp_path, ours, theirs, reason):
    model = weights(tmp_path / "a", b"w")
    one, other = (
        describe(vllm_config(model, cache_dtype=cache_dtype), kv_dtype=kv_dtype)
        for kv_dtype, cache_dtype in (ours, theirs)
    )
    assert refusal(one, other) is reason


def test_kernels_that_arrange_blocks_differently_do_not_fit(tmp_path):
    config = vllm_config(weights(tmp_path / "a", b"w"))
    amx, plain = (describe(config, kernels=kernels) for kernels in ("CPU_ATTN.amx", "CPU_ATTN.vec"))
    assert refusal(amx, amx) is None
    assert refusal(amx, plain) is Reason.LAYOUT


def test_kernels_are_those_of_the_layers_that_have_kv():
    class Backend:
        @staticmethod
        def get_name():
            return "CPU_ATTN"

    context = {
        "a": SimpleNamespace(attn_backend=Backend, isa="amx"),
        "b": SimpleNamespace(attn_backend=Backend),
        "moe": SimpleNamespace(),
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    assert attention_kernels(config, ["a"]) == "CPU_ATTN.amx"
    assert attention_kernels(config, ["a", "b"]) == "CPU_ATTN+CPU_ATTN.amx"
    assert attention_kernels(config, ["moe", "elsewhere"]) == ""


@pytest.mark.parametrize(
    ("engine_id", "fields", "name"),
    [
        ("3f2a", {}, "pod"),
        ("3f2a_dp0", {"data_parallel_index": 0}, "pod/dp0"),
        ("3f2a_dp1", {"data_parallel_index": 1}, "pod/dp1"),
        ("3f2a_dp1", {"data_parallel_index": 1, "data_parallel_external_lb": True}, "pod"),
    ],
)
def test_ranks_of_one_server_have_names_of_their_own(engine_id, fields, name):
    assert name_of_rank("pod", engine_id, SimpleNamespace(**fields)) == name
