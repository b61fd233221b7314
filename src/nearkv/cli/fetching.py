"""Read ``/v1/status`` of several components at once."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from nearkv.certificates import ClientCertificates, tls_options
from nearkv.cli.status_model import AgentStatus, IngressStatus, Status
from nearkv.http_failures import DISCONNECTED, explain_failure, name_failure

_LONGEST_BODY_BYTES = 16 << 20
_HTTP_OK = 200


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A component to ask."""

    component: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an endpoint said: its document and status, or the error and what to do."""

    endpoint: Endpoint
    document: dict[str, Any] | None = None
    status: Status | None = None
    error: str = ""


async def fetch_all(
    endpoints: Sequence[Endpoint],
    *,
    token: str | None,
    timeout_seconds: float,
    certificates: ClientCertificates | None = None,
) -> list[Answer]:
    """Ask all endpoints at the same time; answers come in the order of the endpoints.

    ``certificates`` are for those that serve over TLS; without, the system's CAs count.

    Each request has a deadline of ``timeout_seconds`` and a body limit of 16 MiB. No
    failure of one endpoint keeps the others from being shown.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as client:
        fetches = (_fetch(client, endpoint, certificates) for endpoint in endpoints)
        return list(await asyncio.gather(*fetches))


async def _fetch(
    client: aiohttp.ClientSession, endpoint: Endpoint, certificates: ClientCertificates | None
) -> Answer:
    url = f"{endpoint.url.rstrip('/')}/v1/status"
    try:
        async with client.get(url, **tls_options(certificates)) as response:
            if response.status != _HTTP_OK:
                return Answer(endpoint=endpoint, error=_refusal(response.status))
            body = await _read_bounded(response)
    except TimeoutError:
        return Answer(endpoint=endpoint, error="no answer in time; raise --timeout or look there")
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
        return Answer(endpoint=endpoint, error="is not an HTTP URL; write http://host:port")
    except aiohttp.ClientError as error:
        return Answer(endpoint=endpoint, error=f"{explain_failure(error)}; {advise(error, url)}")
    return _read(endpoint, body)


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > _LONGEST_BODY_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer exceeds {_LONGEST_BODY_BYTES} bytes")
    return bytes(body)


def _read(endpoint: Endpoint, body: bytes) -> Answer:
    try:
        status = msgspec.json.decode(body, type=AgentStatus | IngressStatus)
        document = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Answer(endpoint=endpoint, error=f"the answer is not a nearkv status: {error}")
    if document["component"] != endpoint.component:
        found = document["component"]
        return Answer(endpoint=endpoint, error=f"this is an {found}; use --{found} {endpoint.url}")
    return Answer(endpoint=endpoint, document=document, status=status)


def advise(error: aiohttp.ClientError, url: str) -> str:
    """Say what to try where an endpoint cannot be talked to."""
    if name_failure(error) != DISCONNECTED:
        return "set --ca, or --tls-name where its certificate is for another name"
    if url.startswith("https:") and not isinstance(error, aiohttp.ClientConnectorError):
        # Who does not take a client's certificate breaks off without a word.
        return "does it take our certificate (--cert, --key)?"
    return "is it running, is the port right?"


def _refusal(status: int) -> str:
    hints = {
        401: "the token is missing or wrong, or a certificate is wanted: set --token or "
        "NEARKV_TOKEN, --cert and --key",
        403: "the token is not allowed",
        404: "is the port right?",
    }
    return f"answers {status}; {hints.get(status, 'see its log')}"
