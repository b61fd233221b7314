"""The connector end to end: two vLLM engines on the device, an agent, an ingress."""

import asyncio
import random
import subprocess
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from nearkv.demo.engines import real_engine, transfer_args
from nearkv.demo.models import ensure_model
from nearkv.demo.workspace import Workspace
from nearkv.errors import NearkvError
from tests.e2e.pd_stage import NODES, Engines, agents_and_ingress
from tests.gpu.results import Finding, SkippedError, WrongError

LENGTHS = (33, 640, 3000)
_ASK_SECONDS = 60
_ARGS = (
    *("--gpu-memory-utilization", "0.2"),
    *("--num-gpu-blocks-override", "1024"),
    *("--max-model-len", "4096"),
)
_PROBE = (
    "import torch, vllm; assert torch.cuda.is_available(), 'its torch sees no CUDA device'; "
    "print(vllm.__version__)"
)


def engine_version(python: Path) -> str:
    """Return the vLLM of an interpreter; raises ``SkippedError`` where it is none for CUDA."""
    if not python.is_file():
        raise SkippedError("there is no engine environment (.venv-engine)")
    tried = subprocess.run(
        (str(python), "-c", _PROBE),
        capture_output=True,
        text=True,
        check=False,
        timeout=_ASK_SECONDS,
    )
    if tried.returncode:
        last = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SkippedError(f".venv-engine has no vLLM for CUDA: {last}")
    return tried.stdout.split()[-1]


def check_vllm(seconds: float) -> Finding:
    """Compare P/D's tokens with one engine's, and see that the path was the device."""
    workspace = Workspace.default()
    version = engine_version(workspace.engine_python)
    try:
        figures = asyncio.run(asyncio.wait_for(_compare(workspace), seconds))
    except TimeoutError:
        raise WrongError(f"not done within {seconds:.0f} s") from None
    except NearkvError as error:
        raise WrongError(str(error)) from error
    return Finding(f"vLLM {version}: the same tokens for prompts of {LENGTHS}", figures)


async def _compare(workspace: Workspace) -> dict[str, float]:
    model = ensure_model("tiny", workspace)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nk-")))
        running = {}
        for name in NODES:  # one after the other: each measures the free memory as it starts
            running[name] = await stack.enter_async_context(
                real_engine(
                    model,
                    name=f"gpu-{name}",
                    model_name="tiny",
                    extra_args=(*transfer_args(name, folder / name), *_ARGS),
                    workspace=workspace,
                )
            )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        engines = Engines(folder, running, session)
        nearkv = await stack.enter_async_context(agents_and_ingress(engines, "shm"))
        for length in LENGTHS:
            prompt = [random.Random(length).randrange(10, 400) for _ in range(length)]
            _, answer = await nearkv.post("/v1/completions", {"prompt": prompt, "max_tokens": 8})
            alone = await engines.complete("p", prompt)
            if answer["choices"][0]["text"] != alone["choices"][0]["text"]:
                raise WrongError(f"other tokens than one engine's for {length} tokens")
        pairs = [pair for s in await nearkv.statuses() for pair in s["transfer"]["pairs"]]
    pulls = sum(pair["pulls"] for pair in pairs if pair["path"] == "cuda")
    if pulls != len(LENGTHS):
        raise WrongError(f"{pulls} of {len(LENGTHS)} pulls went over the device: {pairs}")
    return {"pulls": pulls}
