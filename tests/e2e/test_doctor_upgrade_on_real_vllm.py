"""``nearkv doctor upgrade`` between real engines that were started with other settings.

Three engines live for the whole module: ``old``, ``hashes`` with another hash of blocks, and
``blocks`` with settings that nearkv has to notice.
"""

import json
from contextlib import AsyncExitStack
from unittest.mock import ANY

import pytest
import pytest_asyncio

from nearkv.demo.engine_env import ensure_engine_env
from nearkv.demo.engines import real_engine
from nearkv.demo.models import ensure_model
from nearkv.demo.stage import enter_together
from nearkv.demo.workspace import Workspace
from tests.core.running_cli import run_cli

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

WHOLE_BLOCKS = {f"{count * 32} tokens" for count in range(2, 9)}
ARGUMENTS = {
    "old": (),
    "hashes": ("--prefix-caching-hash-algo", "sha256_cbor"),
    # On the CPU, vLLM takes multiples of 32 only.
    "blocks": (
        *("--block-size", "64", "--max-model-len", "1024"),
        "--no-enable-prompt-tokens-details",
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines():
    workspace = Workspace.default()
    ensure_engine_env(workspace)
    model = ensure_model("tiny", workspace)
    contexts = [
        real_engine(
            model,
            name=f"upgrade-{name}",
            model_name="tiny",
            extra_args=("--num-gpu-blocks-override", "80", "--max-model-len", "2048", *extra),
            # Without it, the first hash of each engine is a random one.
            extra_env={"PYTHONHASHSEED": "0"},
        )
        for name, extra in ARGUMENTS.items()
    ]
    async with AsyncExitStack() as stack:
        started = await enter_together(stack, contexts)
        yield dict(zip(ARGUMENTS, started, strict=True))


async def compared(engines, new):
    """Go from ``old`` to another engine; returns exit status, verdict and rows."""
    urls = [engines[name].url for name in ("old", new)]
    options = ("--event-seconds", "20", "-o", "json")
    code, out, err = await run_cli("doctor", "upgrade", *urls, *options)
    assert err == ""
    document = json.loads(out)
    return code, document["verdict"], {row["check"]: row for row in document["findings"]}


def not_the_same(found):
    return {name: row["severity"] for name, row in found.items() if row["severity"] != "same"}


async def test_an_engine_is_the_same_as_itself(engines):
    code, verdict, found = await compared(engines, "old")
    assert (code, verdict, not_the_same(found)) == (0, "same", {})
    assert found["version"]["old"] == "0.32.0"
    assert found["KV events"]["old"] == "heard"
    assert found["hash rule"]["new"] == "equal hashes"
    assert found["replay of events"]["new"] == "with the topic"
    # Whole blocks; how many depends on the random beginning of the prompt.
    assert found["cached tokens of the same prompt again"]["new"] in WHOLE_BLOCKS


async def test_another_hash_of_blocks_differs_and_breaks_nothing(engines):
    code, verdict, found = await compared(engines, "hashes")
    # Engines of the tests have names of their own in the topic.
    expected = {"hash rule": "differs", "event topic": "differs"}
    assert (code, verdict, not_the_same(found)) == (0, "differs", expected)
    assert found["hash rule"]["new"] == "other hashes"
    assert "nearkv's keys are its own" in found["hash rule"]["effect"]


async def test_what_other_settings_break_is_said_with_what_to_do(engines):
    code, verdict, found = await compared(engines, "blocks")
    assert (code, verdict) == (1, "breaks")
    told = {
        name: (row["severity"], row["old"], row["new"])
        for name, row in found.items()
        if row["severity"] in {"breaks", "degrades"}
    }
    assert told == {
        "block size": ("breaks", "32 tokens", "64 tokens"),
        "max_model_len": ("breaks", "2048", "1024"),
        "cached tokens of the same prompt again": ("degrades", ANY, "not reported"),
    }
    assert told["cached tokens of the same prompt again"][1] in WHOLE_BLOCKS
    assert all(found[name]["effect"] and found[name]["advice"] for name in told)
    assert found["hash rule"]["severity"] == "unknown", "blocks of two sizes"
    assert found["tokens, text: words"]["severity"] == "same"
