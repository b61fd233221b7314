"""Policies on real vLLM: three engines with little KV memory, conversations that share prompts.

The engines stay, their caches are emptied before each policy; every policy gets a new ingress and
the same conversations. Compared with the prediction is the time to the first token as the client
sees it.

``POLICIES=cost,prefix-first`` takes some only; ``SEED=`` another workload.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp

from nearkv.demo.engine_env import ensure_engine_env
from nearkv.demo.engines import Engine, real_engine
from nearkv.demo.models import ensure_model
from nearkv.demo.workspace import Workspace
from tests.benchmarks.bench_ingress import Service, started_service
from tests.benchmarks.conversations import Conversation, Played, Workload, conversations, play
from tests.benchmarks.reporting import median, percentile, report

_OURS = "cost"
_POLICIES = (_OURS, "prefix-first", "least-loaded", "round-robin")
_ENGINES = 3
_MODEL = "tiny"
_BLOCKS = 160
_WORKLOAD = Workload(
    conversations=60,
    turns=6,
    system_prompts=6,
    system_tokens=768,
    turn_tokens=(60, 180),
    arrivals_per_second=0.8,
    thinking_seconds=4.0,
)


def main() -> int:
    """Start the engines, play the conversations under each policy, report."""
    figures = asyncio.run(_measure(os.environ.get("POLICIES", ",".join(_POLICIES)).split(",")))
    ours = figures.pop(_OURS, {})
    return report("policies", ours, figures)


async def _measure(policies: Sequence[str]) -> dict[str, dict[str, float]]:
    workload = conversations(_WORKLOAD, seed=int(os.environ.get("SEED", "1")))
    warm_up = conversations(Workload(12, 2, arrivals_per_second=4.0), seed=0)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        engines = await _start_engines(stack)
        agent = await asyncio.to_thread(
            lambda: stack.enter_context(
                started_service("agent", folder, _agent_config(engines), core=None)
            )
        )
        figures = {}
        for policy in policies:
            sys.stderr.write(f"{policy}: {len(workload)} conversations\n")
            figures[policy] = await _under(policy, agent, engines, (warm_up, workload))
    return figures


async def _start_engines(stack: AsyncExitStack) -> list[Engine]:
    workspace = Workspace.default()
    ensure_engine_env(workspace)
    folder = ensure_model(_MODEL, workspace)
    contexts = [
        real_engine(
            folder,
            name=f"e{number}",
            model_name=_MODEL,
            extra_args=("--num-gpu-blocks-override", str(_BLOCKS), "--max-model-len", "4096"),
            extra_env={"VLLM_SERVER_DEV_MODE": "1"},  # offers /reset_prefix_cache
        )
        for number in range(_ENGINES)
    ]
    return await asyncio.gather(*map(stack.enter_async_context, contexts))


def _agent_config(engines: Sequence[Engine]) -> dict[str, object]:
    return {
        "engines": [
            {"id": e.name, "url": e.url, "kv_events": e.kv_events, "kv_replay": e.kv_replay}
            for e in engines
        ]
    }


async def _under(
    policy: str,
    agent: Service,
    engines: Sequence[Engine],
    workloads: tuple[Sequence[Conversation], Sequence[Conversation]],
) -> dict[str, float]:
    """Play a workload under one policy, after another that lets the ingress know its engines."""
    warm_up, workload = workloads
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        settings = {"agents": [agent.url], "policy": policy}
        ingress = await asyncio.to_thread(
            lambda: stack.enter_context(started_service("ingress", folder, settings, core=None))
        )
        await play(ingress.url, warm_up, model=_MODEL)
        await _empty(engines)
        played = await play(ingress.url, workload, model=_MODEL)
        log = folder / "ingress.log"
        await asyncio.sleep(0.2)  # its last lines are written a few at a time
        return _figures(played, predictions_in(log.read_text().splitlines()))


async def _empty(engines: Sequence[Engine]) -> None:
    async with aiohttp.ClientSession() as session:
        for engine in engines:
            async with session.post(f"{engine.url}/reset_prefix_cache") as answer:
                answer.raise_for_status()


def predictions_in(lines: Sequence[str]) -> dict[str, float]:
    """Return the predicted milliseconds to the first token by request id, from an ingress's log."""
    return dict(_predictions(lines))


def _predictions(lines: Sequence[str]) -> Iterator[tuple[str, float]]:
    for line in lines:
        told = json.loads(line)
        if told["event"] == "decision" and told["first_token_ms"] is not None:
            yield told["request_id"], told["first_token_ms"]


def _figures(played: Played, predicted_ms: Mapping[str, float]) -> dict[str, float]:
    ms = [seconds * 1e3 for seconds in played.first_tokens]
    figures = {
        "hit_ratio": played.hit_ratio,
        "first_token_p50_milliseconds": percentile(ms, 0.50),
        "first_token_p90_milliseconds": percentile(ms, 0.90),
        "first_token_p99_milliseconds": percentile(ms, 0.99),
        "failed": float(len(played.failed)),
    }
    pairs = [
        (predicted_ms[name], seconds * 1e3)
        for name, seconds in played.first_token_of.items()
        if name in predicted_ms
    ]
    if pairs:
        errors = [abs(predicted - measured) / measured for predicted, measured in pairs]
        figures["first_token_predicted_error_p50_ratio"] = median(errors)
        figures["first_token_predicted_of_measured_p50_ratio"] = median([p / m for p, m in pairs])
    return figures


if __name__ == "__main__":
    sys.exit(main())
