"""Asking an engine of any kind who it is: vLLM's endpoints first, then SGLang's."""

from urllib.parse import urlsplit

import aiohttp
import msgspec

from nearkv.agent.engine_kinds import EngineKind, SglangInfo, sglang_event_sources
from nearkv.agent.errors import EngineProbeError
from nearkv.agent.event_sources import EventSource
from nearkv.agent.probing import MAX_VERSION_CHARACTERS, EngineProbe


class EngineKindProbe(EngineProbe):
    """Reads the HTTP API of an engine whose kind is configured or found out.

    An engine of kind ``auto`` is asked again each time, as another one may have taken its place.
    """

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        timeout_seconds: float,
        bearer_token: str | None = None,
        kind: EngineKind = EngineKind.AUTO,
    ) -> None:
        super().__init__(url, session, timeout_seconds=timeout_seconds, bearer_token=bearer_token)
        self._kind = kind

    async def version(self) -> str | None:
        """Return the engine's version, or ``None`` where it does not tell."""
        if self._kind is not EngineKind.SGLANG:
            version = await super().version()
            if version is not None:
                return version
        info = await self._sglang_info()
        return None if info is None else info.version[:MAX_VERSION_CHARACTERS]

    async def event_sources(self) -> dict[int, EventSource] | None:
        """Return the event endpoints by data-parallel rank; ``None`` where it does not tell."""
        if self._kind is not EngineKind.SGLANG:
            sources = await super().event_sources()
            if sources is not None:
                return sources
        info = await self._sglang_info()
        host = urlsplit(self._url).hostname or "127.0.0.1"
        return None if info is None else sglang_event_sources(info, host)

    async def _sglang_info(self) -> SglangInfo | None:
        """Ask for ``/server_info``; ``None`` where there is none, or it is not SGLang's."""
        if self._kind is EngineKind.VLLM:
            return None
        body = await self._get_optional("/server_info")
        if body is None:
            return None
        try:
            return msgspec.json.decode(body, type=SglangInfo)
        except (msgspec.DecodeError, RecursionError) as error:
            if self._kind is EngineKind.AUTO:
                return None
            raise EngineProbeError(
                f"{self._url}/server_info: unexpected answer: {error}"
            ) from error
