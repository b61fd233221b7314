"""On real vLLM: /v1/responses and /v1/messages, adapters, and responses that the engine keeps."""

import json
import random
import struct

import aiohttp
import openai
import pytest

from nearkv.agent.app import NODE_STATE
from nearkv.agent.app import build_app as build_agent
from nearkv.agent.settings import AgentSettings
from nearkv.demo.engine_env import ensure_engine_env
from nearkv.demo.engines import engine_addresses, real_engine
from nearkv.demo.models import ensure_model
from nearkv.demo.workspace import Workspace
from nearkv.ingress.app import KNOWLEDGE
from nearkv.ingress.app import build_app as build_ingress
from nearkv.ingress.settings import IngressSettings
from nearkv.serving import running
from tests.integration.stack import ANY_PORT, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

DEADLINE = aiohttp.ClientTimeout(total=60)
TURNS = 11
RANK = 8
ENGINE_ARGS = (
    *("--num-gpu-blocks-override", "400", "--max-model-len", "4096"),
    *("--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules"),
)


def make_adapter(model_dir, folder):
    """Write a small random LoRA adapter of the queries of every layer."""
    config = json.loads((model_dir / "config.json").read_text())
    hidden, queries = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    source = random.Random(5)
    header, data = {}, b""
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora"
        for part, shape in (("A", (RANK, hidden)), ("B", (queries, RANK))):
            count = shape[0] * shape[1]
            values = struct.pack(f"<{count}f", *(source.gauss(0, 0.1) for _ in range(count)))
            place = [len(data), len(data) + len(values)]
            tensor = {"dtype": "F32", "shape": shape, "data_offsets": place}
            header[f"{name}_{part}.weight"] = tensor
            data += values
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    weights = struct.pack("<Q", len(head)) + head + data
    (folder / "adapter_model.safetensors").write_bytes(weights)
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(described | {"bias": "none"}))


class Served:
    """The ingress in front of the engine, and the agent's tracker of it."""

    def __init__(self, url, knowledge, state, session):
        self.url = url
        self.knowledge = knowledge
        self._state = state
        self.session = session

    async def synced(self):
        """Wait until the ingress knows what the agent knows."""
        agents = self.knowledge.fleet.agents.values()
        await eventually(
            lambda: (
                not self._state.log.has_pending
                and all(view.cursor == self._state.log.cursor for view in agents)
            ),
            what="ingress in step with the agent",
        )

    async def post(self, path, body):
        async with self.session.post(self.url + path, json=body) as response:
            text = await response.text()
            assert response.status == 200, text
            return int(response.headers["x-nearkv-predicted-cached-tokens"]), text


@pytest.fixture
async def served(tmp_path):
    workspace = Workspace.default()
    ensure_engine_env(workspace)
    model_dir = ensure_model("tiny", workspace)
    make_adapter(model_dir, tmp_path)
    with engine_addresses() as addresses:
        async with (
            real_engine(
                model_dir,
                name="other-apis",
                model_name="tiny",
                addresses=addresses,
                extra_args=(*ENGINE_ARGS, f"sql={tmp_path}"),
                extra_env={"VLLM_ENABLE_RESPONSES_API_STORE": "1"},
            ),
            aiohttp.ClientSession(timeout=DEADLINE) as session,
        ):
            engine = {
                "id": "a",
                "url": addresses.url,
                "kv_events": addresses.kv_events,
                "kv_replay": addresses.kv_replay,
            }
            agent = build_agent(AgentSettings.model_validate({"engines": [engine]}))
            async with running(agent, ANY_PORT) as agent_address:
                state = agent[NODE_STATE]
                await eventually(
                    lambda: [t.info.events for t in state.trackers.values()] == ["live"],
                    what="agent follows the engine",
                )
                settings = IngressSettings.model_validate(
                    {"agents": [agent_address.url], "models": {"aliases": {"gpt-x": "tiny"}}}
                )
                ingress = await build_ingress(settings)
                async with running(ingress, ANY_PORT) as address:
                    knowledge = ingress[KNOWLEDGE]
                    await eventually(lambda: len(knowledge.fleet.engines) == 1, what="synced")
                    yield Served(address.url, knowledge, state, session)


def text(source, words):
    vocabulary = ["signal", "box", "north", "of", "the", "old", "river", "bridge", "keeps", "two"]
    return " ".join(source.choice(vocabulary) for _ in range(words)) + "."


async def by_responses(served, client, pairs):
    """Hold a conversation by the official client, every other turn streamed."""
    source = random.Random(1)
    said = []
    instructions = text(source, 120)
    for turn in range(TURNS):
        said.append({"role": "user", "content": text(source, 25)})
        await served.synced()
        raw = await client.responses.with_raw_response.create(
            model="gpt-x" if turn % 3 == 0 else "tiny",
            instructions=instructions,
            input=said,
            max_output_tokens=12,
            temperature=0,
            stream=turn % 2 == 1,
        )
        answer = raw.parse()
        if turn % 2 == 1:
            answer = [event async for event in answer][-1].response
        predicted = int(raw.headers["x-nearkv-predicted-cached-tokens"])
        pairs.append((predicted, answer.usage.input_tokens_details.cached_tokens))
        said.append({"role": "assistant", "content": answer.output_text})


async def by_messages(served, pairs):
    """The same by Anthropic's API."""
    source = random.Random(2)
    said = []
    system = [{"type": "text", "text": text(source, 60)}, {"type": "text", "text": "Be brief."}]
    for turn in range(TURNS):
        said.append({"role": "user", "content": text(source, 25)})
        body = {"model": "tiny", "system": system, "messages": said, "max_tokens": 12}
        await served.synced()
        predicted, answer = await served.post(
            "/v1/messages", body | {"temperature": 0, "stream": turn % 2 == 1}
        )
        if turn % 2 == 1:
            events = [json.loads(line[6:]) for line in answer.split("\n") if line[:6] == "data: "]
            usage = next(e["usage"] for e in events if e["type"] == "message_delta")
            reply = "".join(e["delta"].get("text", "") for e in events if "delta" in e)
        else:
            whole = json.loads(answer)
            usage, reply = whole["usage"], whole["content"][0]["text"]
        pairs.append((predicted, usage["cache_read_input_tokens"]))
        said.append({"role": "assistant", "content": reply})


async def by_adapter(served, pairs):
    """Ask the same of the base model and of the adapter, plain and salted."""
    prompt = text(random.Random(3), 120)
    for body in (
        {"model": "tiny"},
        {"model": "sql"},
        {"model": "sql", "cache_salt": "red"},
        {"model": "sql", "cache_salt": "blue"},
    ):
        for _ in range(2):
            await served.synced()
            predicted, answer = await served.post(
                "/v1/completions", {"prompt": prompt, "max_tokens": 2} | body
            )
            usage = json.loads(answer)["usage"]
            pairs.append((predicted, usage["prompt_tokens_details"]["cached_tokens"]))


async def by_kept_responses(client):
    """Go on from responses that the engine keeps."""
    previous = None
    counts = []
    for question in ("Who works at the pass?", "Since when?", "And before?"):
        answer = await client.responses.create(
            model="tiny", input=question, previous_response_id=previous, max_output_tokens=8
        )
        previous = answer.id
        counts.append(answer.usage.input_tokens)
    assert counts == sorted(set(counts)), "each turn holds the turns before"
    assert (await client.responses.retrieve(previous)).id == previous


async def test_predictions_of_the_other_apis_come_true(served):
    async with openai.AsyncOpenAI(
        base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        pairs = {"responses": [], "messages": [], "adapter": []}
        await by_responses(served, client, pairs["responses"])
        await by_messages(served, pairs["messages"])
        await by_adapter(served, pairs["adapter"])
        await by_kept_responses(client)
    print("\n", pairs)  # noqa: T201 (figures)
    everything = [pair for found in pairs.values() for pair in found]
    different = [
        (predicted, reported) for predicted, reported in everything if predicted != reported
    ]
    # An engine may answer before its last events have arrived; a wrong key would show each time.
    assert len(different) <= 1, pairs
    assert all(predicted < reported for predicted, reported in different), pairs
    for name in ("responses", "messages"):
        assert len(pairs[name]) >= 10
        assert all(reported > 0 for _, reported in pairs[name][1:])
    assert [reported > 0 for _, reported in pairs["adapter"]] == [False, True] * 4
