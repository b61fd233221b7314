"""``nearkv explain-pod``: why a pod was placed as it was, from the extender's own record."""

import asyncio
import sys
from dataclasses import dataclass, field

import aiohttp
import msgspec

from nearkv.bounded_reading import AnswerTooLargeError, read_at_most
from nearkv.certificates import ClientCertificates, ClientFiles
from nearkv.cli.explain_table import Explanation, render_explanation
from nearkv.cli.trusting import load_trust
from nearkv.errors import NearkvError
from nearkv.http_failures import explain_failure

_LONGEST_BODY_BYTES = 64 << 20
_HTTP_OK = 200
_FAILED_STATUS = 1


class ExplainError(NearkvError):
    """The question cannot be asked as it was put."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainQuestion:
    """What is asked: ``pod`` is namespace/name; ``files`` are for an extender over TLS."""

    pod: str
    extender: str | None
    limit: int
    token: str | None = None
    files: ClientFiles = field(default_factory=ClientFiles)
    timeout_seconds: float = 5.0


def run_explain_pod(question: ExplainQuestion, *, as_json: bool) -> int:
    """Print the last decisions about a pod; return the exit status.

    Raises :class:`NearkvError` for a question that cannot be asked.
    """
    if question.pod.count("/") != 1 or question.pod.startswith("/") or question.pod.endswith("/"):
        raise ExplainError(f"expected NAMESPACE/NAME, got {question.pod!r}")
    if not question.extender:
        raise ExplainError("no extender to ask; give --extender URL or set NEARKV_EXTENDER")
    trust = load_trust(question.files)
    body, error = asyncio.run(_ask(question, question.extender, trust))
    explanation = None
    if not error:
        explanation, error = _read(body)
    if explanation is None:
        sys.stderr.write(f"nearkv: extender {question.extender}: {error}\n")
        return _FAILED_STATUS
    if as_json:
        sys.stdout.write(msgspec.json.format(body).decode() + "\n")
    else:
        sys.stdout.write(render_explanation(explanation))
    return 0


class _Refusal(msgspec.Struct):
    """The extender's own errors."""

    error: str


async def _ask(
    question: ExplainQuestion, extender: str, trust: ClientCertificates
) -> tuple[bytes, str]:
    """Return the extender's answer, and why there is none where that is so."""
    base = extender if "://" in extender else f"http://{extender}"
    headers = {"Authorization": f"Bearer {question.token}"} if question.token else {}
    query = {"pod": question.pod, "limit": str(question.limit)}
    timeout = aiohttp.ClientTimeout(total=question.timeout_seconds)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as client,
            client.get(f"{base.rstrip('/')}/v1/explain", params=query, **trust.options) as response,
        ):
            body = await read_at_most(response, _LONGEST_BODY_BYTES)
            status = response.status
    except TimeoutError:
        return b"", "no answer in time; raise --timeout or look there"
    except AnswerTooLargeError as error:
        return b"", f"{error}; lower --limit"
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
        return b"", "is not an HTTP URL; write http://host:port"
    except aiohttp.ClientError as error:
        return b"", explain_failure(error)
    return body, "" if status == _HTTP_OK else _refusal(status, body)


def _read(body: bytes) -> tuple[Explanation | None, str]:
    try:
        return msgspec.json.decode(body, type=Explanation), ""
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return None, f"the answer is no explanation; is this an extender? ({error})"


def _refusal(status: int, body: bytes) -> str:
    hints = {401: "the token is missing or wrong: set --token or NEARKV_TOKEN"}
    if status in hints:
        return hints[status]
    try:
        return msgspec.json.decode(body, type=_Refusal).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"answers {status}; is this an extender?"
