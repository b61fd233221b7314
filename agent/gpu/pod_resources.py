"""Asking the kubelet which pods have which devices: the one module here that knows gRPC.

gRPC is loaded when it is first used: 16 MB that a node without GPUs need not have. Messages
are given and taken as bytes, so nothing is generated and no protobuf library is needed.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from nearkv.agent.gpu.errors import PodResourcesError
from nearkv.agent.gpu.pod_messages import (
    ALLOCATABLE,
    EMPTY_REQUEST,
    LIST,
    GivenDevice,
    PodDevices,
    decode_allocatable,
    decode_list,
)
from nearkv.protobuf import WireError

MAX_ANSWER_BYTES = 64 << 20
"""gRPC's own limit is 4 MB, which a node with many pods passes (dcgm-exporter#509)."""

T = TypeVar("T")
_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED")


class PodResources:
    """A kubelet behind its Unix socket; nothing is ever changed there.

    Its methods raise :class:`PodResourcesError`.
    """

    def __init__(self, socket: Path, *, timeout_seconds: float) -> None:
        self._socket = socket
        self._timeout_seconds = timeout_seconds
        self._grpc: Any = None
        self._channel: Any = None

    async def pods(self) -> tuple[PodDevices, ...]:
        """Return the pods that have devices."""
        return _decoded(decode_list, await self._ask(LIST))

    async def allocatable(self) -> tuple[GivenDevice, ...]:
        """Return the devices that pods may get: what plugins offer and call healthy."""
        return _decoded(decode_allocatable, await self._ask(ALLOCATABLE))

    async def close(self) -> None:
        """Close the connection; it comes back with the next question."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _ask(self, method: str) -> bytes:
        channel = self._connected()
        ask = channel.unary_unary(method)  # bytes in, bytes out
        try:
            answer = await ask(EMPTY_REQUEST, timeout=self._timeout_seconds, wait_for_ready=False)
        except self._grpc.AioRpcError as error:
            name = error.code().name
            reason = name.lower() if name in _CODES else "failed"
            raise PodResourcesError(reason, f"{method}: {name}: {error.details()}") from error
        return bytes(answer)

    def _connected(self) -> Any:  # noqa: ANN401 (gRPC has no types)
        if not self._socket.exists():
            raise PodResourcesError("no_socket", f"{self._socket} is not there")
        if self._grpc is None:
            try:
                self._grpc = importlib.import_module("grpc.aio")
            except ImportError as error:
                raise PodResourcesError("no_grpc", str(error)) from error
        if self._channel is None:
            options = [
                ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
                ("grpc.enable_http_proxy", 0),
                # Without these a kubelet that was restarted is found again after two minutes.
                ("grpc.min_reconnect_backoff_ms", 500),
                ("grpc.max_reconnect_backoff_ms", 5000),
            ]
            self._channel = self._grpc.insecure_channel(f"unix:{self._socket}", options)
        return self._channel


def _decoded(decode: Callable[[bytes], T], data: bytes) -> T:
    try:
        return decode(data)
    except WireError as error:
        raise PodResourcesError("unreadable", str(error)) from error
