"""Players that need libraries which are not nearkv's: torch, and NIXL."""

import os
import time
from typing import Any

from nearkv.transfer.connector.allocation import KvAllocation
from nearkv.transfer.cuda.allocation import DeviceKv
from tests.gpu.patterns import digest_of, pattern
from tests.gpu.player import Answer, Player
from tests.gpu.results import SkippedError, WrongError

_NIXL_SECONDS = 30.0
_MATRIX, _PRODUCTS = 8192, 60


class TorchPlayer(Player):
    """An engine's worker as far as memory goes: torch, and the hook that vLLM gets."""

    def __init__(self, *, ordinal: int = 0) -> None:
        super().__init__(ordinal=ordinal)
        self._torch = _import_torch()
        self._device = self._torch.device("cuda", ordinal)
        self._tensors: dict[str, Any] = {}

    def do_describe_torch(self) -> Answer:
        """Say which torch this is."""
        return {"torch": self._torch.__version__}, ()

    def do_allocate_torch(self, *, name: str, size_bytes: int, seed: int) -> Answer:
        """Have torch allocate within the hook, and write a pattern by torch."""
        torch = self._torch
        torch.zeros(1, device=self._device)  # torch has its context before, as in vLLM
        allocation = KvAllocation()
        with allocation.context():
            tensor = torch.zeros(size_bytes, dtype=torch.int8, device=self._device)
        kv = allocation.memory
        if not isinstance(kv, DeviceKv):
            raise WrongError(f"the hook did not answer: {allocation.refusal}")
        if tensor.data_ptr() != kv.address or tensor.device != self._device:
            raise WrongError("the tensor lies elsewhere than the memory")
        if bool(tensor.any()):
            raise WrongError("the tensor is not all zeros")
        self._tensors[name] = tensor
        self._write(name, seed)
        torch.cuda.synchronize()
        return self.keep(name, kv, None)

    def do_digest_torch(self, *, name: str) -> Answer:
        """Return the digest of a tensor as torch reads it."""
        return {"digest": digest_of(self._tensors[name].cpu().numpy().view("uint8"))}, ()

    def do_launch_step(self, *, name: str, seed: int) -> Answer:
        """Queue long work and the writing of a pattern behind it, and return at once."""
        torch = self._torch
        left = torch.randn(_MATRIX, _MATRIX, device=self._device, dtype=torch.bfloat16)
        data = self._to_device(seed, self._tensors[name].numel())
        torch.cuda.synchronize()
        result = left
        for _ in range(_PRODUCTS):
            result = (result @ left).clamp_(-1, 1)
        self._tensors[name].copy_(data)
        self._last = result.sum() + self._tensors[name][0].float()
        return {}, ()

    def do_read_token(self) -> Answer:
        """Read a value on the host that was computed last, as an engine reads its token."""
        began = time.perf_counter()
        self._last.item()
        return {"waited_seconds": time.perf_counter() - began}, ()

    def _write(self, name: str, seed: int) -> None:
        tensor = self._tensors[name]
        tensor.copy_(self._to_device(seed, tensor.numel()))

    def _to_device(self, seed: int, size_bytes: int) -> Any:
        data = self._torch.from_numpy(pattern(seed, size_bytes).view("int8"))
        return data.to(self._device)


def _import_torch() -> Any:
    try:
        import torch  # type: ignore[import-not-found] # noqa: PLC0415 (checks need none of it)
    except ImportError as error:
        raise SkippedError(f"torch is not installed: {error}") from error
    if not torch.cuda.is_available():
        raise SkippedError(f"torch {torch.__version__} sees no CUDA device")
    return torch


class NixlPlayer(Player):
    """An engine that moves its memory by NIXL within its own process."""

    def __init__(self, *, ordinal: int = 0) -> None:
        super().__init__(ordinal=ordinal)
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        self._agent: Any = None

    def do_nixl_begin(self, *, agent: str, name: str) -> Answer:
        """Register memory with a new agent; returns what others need of it."""
        nixl = _import_nixl()
        self._agent = nixl.nixl_agent(agent, nixl.nixl_agent_config(backends=["UCX"]))
        region = self._regions[name]
        place = (region.memory.address, region.layout.size, self._ordinal)
        with region.memory.context.use():
            self._agent.register_memory([(*place, "")], "VRAM")
        return {"metadata": self._agent.get_agent_metadata().hex(), "place": place}, ()

    def do_nixl_read(self, *, name: str, metadata: str, place: list[int], rounds: int) -> Answer:
        """Read another agent's memory into ours; returns the best speed."""
        peer = self._agent.add_remote_agent(bytes.fromhex(metadata))
        region = self._regions[name]
        ours = [(region.memory.address, region.layout.size, self._ordinal)]
        begin, size, device = place
        local = self._agent.get_xfer_descs(ours, "VRAM")
        remote = self._agent.get_xfer_descs([(begin, size, device)], "VRAM")
        best = float("inf")
        with region.memory.context.use():
            for _ in range(rounds):
                best = min(best, self._read_once(local, remote, peer))
        return {"bytes_per_second": size / best}, ()

    def _read_once(self, local: Any, remote: Any, peer: Any) -> float:
        handle = self._agent.initialize_xfer("READ", local, remote, peer)
        began = time.perf_counter()
        state = self._agent.transfer(handle)
        while state == "PROC" and time.perf_counter() - began < _NIXL_SECONDS:
            state = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - began
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise WrongError(f"NIXL ended as {state} after {seconds:.1f} s")
        return seconds


def _import_nixl() -> Any:
    for name in ("nixl._api", "nixl_cu12._api", "nixl_cu13._api"):
        try:
            return __import__(name, fromlist=["nixl_agent"])
        except ImportError:
            continue
    raise SkippedError("nixl is not installed")
