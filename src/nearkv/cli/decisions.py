"""``nearkv decisions`` and ``nearkv explain request``: what ingresses know of requests.

Each replica knows the requests that it served itself, so all that are named are asked.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import msgspec
from rich.console import Console

from nearkv.bounded_reading import AnswerTooLargeError, read_at_most
from nearkv.certificates import ClientCertificates, ClientFiles
from nearkv.cli.decision_model import RequestExplanation, RequestLine, RequestList
from nearkv.cli.decision_table import engine_table, headline, list_table
from nearkv.cli.fetching import advise
from nearkv.cli.trusting import load_trust
from nearkv.errors import NearkvError
from nearkv.http_failures import explain_failure

T = TypeVar("T")

_LONGEST_BODY_BYTES = 64 << 20
# Lines longer than the terminal are left to it, as in status.
_TABLE_WIDTH = 10_000
_HTTP_OK, _HTTP_UNAUTHORIZED, _HTTP_NOT_FOUND = 200, 401, 404
_FAILED_STATUS = 1


class NoIngressError(NearkvError):
    """There is nobody to ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Whom to ask, and how; without ``ingresses``, ``NEARKV_INGRESS`` names them."""

    ingresses: Sequence[str]
    output: str = "table"
    token: str | None = None
    files: ClientFiles = field(default_factory=ClientFiles)
    timeout_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class _Said:
    """One ingress's answer, or why there is none."""

    url: str
    body: bytes = b""
    error: str = ""
    status: int = 0


class _Refusal(msgspec.Struct):
    """An ingress's own errors."""

    error: str


def run_decisions(ask: Ask, query: Mapping[str, str], *, limit: int) -> int:
    """Print the latest requests of all ingresses, latest first; return the exit status."""
    answers = _ask_all(ask, "/v1/decisions", {**query, "limit": str(limit)})
    documents: list[dict[str, Any]] = []
    lines: list[RequestLine] = []
    failed = False
    for answer in answers:
        try:
            lines += _decoded(answer, RequestList).decisions
            documents += msgspec.json.decode(answer.body)["decisions"]
        except _NoAnswerError as error:
            failed = True
            sys.stderr.write(f"nearkv: ingress {answer.url}: {error}\n")
    if ask.output == "table":
        latest = sorted(lines, key=lambda line: -(line.at_seconds or 0.0))[:limit]
        _print(list_table(latest) if latest else "No requests.")
    else:
        documents.sort(key=lambda document: -document.get("at_seconds", 0.0))
        sys.stdout.write(_document({"decisions": documents[:limit]}, ask.output))
    return _FAILED_STATUS if failed else 0


def run_explain_request(ask: Ask, request_id: str, *, limit: int) -> int:
    """Print why a request went where it did; return the exit status.

    The first ingress that knows it has the word.
    """
    answers = _ask_all(ask, "/v1/explain", {"request": request_id, "limit": str(limit)})
    problems = []
    for answer in answers:
        try:
            explanation = _decoded(answer, RequestExplanation)
        except _NoAnswerError as error:
            problems.append(f"nearkv: ingress {answer.url}: {error}\n")
            continue
        if ask.output == "table":
            _print_explanation(explanation)
        else:
            sys.stdout.write(_document(msgspec.json.decode(answer.body), ask.output))
        return 0
    sys.stderr.write("".join(problems))
    return _FAILED_STATUS


def _print_explanation(explanation: RequestExplanation) -> None:
    for line in headline(explanation):
        _print(line)
    if explanation.engines:
        total = explanation.engines_total or len(explanation.engines)
        _print(f"\nengines: {total}, {len(explanation.engines)} shown")
        _print(engine_table(explanation.engines))
    if explanation.story:
        _print("\nthen")
    for told in explanation.story:
        _print(f"- {told}")


def _print(shown: object) -> None:
    Console(width=_TABLE_WIDTH, highlight=False, markup=False, emoji=False).print(shown)


def _document(value: object, output: str) -> str:
    if output == "yaml":
        return msgspec.yaml.encode(value).decode()
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"


class _NoAnswerError(Exception):
    """An ingress gave no answer that could be used; says why."""


def _decoded(answer: _Said, kind: type[T]) -> T:
    if answer.error:
        raise _NoAnswerError(answer.error)
    if answer.status != _HTTP_OK:
        raise _NoAnswerError(_refusal(answer))
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _NoAnswerError(f"the answer is none of an ingress's ({error})") from error


def _refusal(answer: _Said) -> str:
    if answer.status == _HTTP_UNAUTHORIZED:
        return "the token is missing or wrong: set --token or NEARKV_TOKEN"
    try:
        return msgspec.json.decode(answer.body, type=_Refusal).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        hint = "; is this an ingress?" if answer.status == _HTTP_NOT_FOUND else ""
        return f"answers {answer.status}{hint}"


def _ask_all(ask: Ask, path: str, query: Mapping[str, str]) -> list[_Said]:
    """Ask all ingresses at the same time; raises :class:`NoIngressError` where there are none."""
    urls = list(ask.ingresses) or [
        part.strip() for part in os.environ.get("NEARKV_INGRESS", "").split(",") if part.strip()
    ]
    if not urls:
        raise NoIngressError("no ingress to ask; give --ingress URL or set NEARKV_INGRESS")
    trust = load_trust(ask.files)

    async def run() -> list[_Said]:
        headers = {"Authorization": f"Bearer {ask.token}"} if ask.token else {}
        timeout = aiohttp.ClientTimeout(total=ask.timeout_seconds)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as client:
            return await asyncio.gather(
                *(_ask_one(client, url, path, query, trust) for url in urls)
            )

    return asyncio.run(run())


async def _ask_one(
    client: aiohttp.ClientSession,
    url: str,
    path: str,
    query: Mapping[str, str],
    trust: ClientCertificates,
) -> _Said:
    base = url if "://" in url else f"http://{url}"
    try:
        async with client.get(base.rstrip("/") + path, params=query, **trust.options) as response:
            body = await read_at_most(response, _LONGEST_BODY_BYTES)
            return _Said(url, body, status=response.status)
    except TimeoutError:
        return _Said(url, error="no answer in time; raise --timeout or look there")
    except AnswerTooLargeError as error:
        return _Said(url, error=f"{error}; lower --limit")
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
        return _Said(url, error="is not an HTTP URL; write http://host:port")
    except aiohttp.ClientError as error:
        return _Said(url, error=f"{explain_failure(error)}; {advise(error, base)}")
