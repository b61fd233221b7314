"""The APIs that clients speak, told by path (pure).

They differ in what a prompt looks like, in how an error is said, and in what the last event
of a broken stream has to be for their clients to raise instead of ending.
"""

from enum import StrEnum

MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"


class Dialect(StrEnum):
    """Whose API a path belongs to."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


def dialect_of(path: str) -> Dialect:
    """Return the API of a path; whatever is not known otherwise is OpenAI's."""
    if _is_below(path, MESSAGES_PATH):
        return Dialect.ANTHROPIC
    return Dialect.RESPONSES if _is_below(path, RESPONSES_PATH) else Dialect.OPENAI


def response_id_in(path: str) -> str:
    """Return the id in ``/v1/responses/{id}`` and ``/v1/responses/{id}/...``, else nothing."""
    if not path.startswith(RESPONSES_PATH + "/"):
        return ""
    return path[len(RESPONSES_PATH) + 1 :].partition("/")[0]


def _is_below(path: str, top: str) -> bool:
    return path.startswith(top) and (len(path) == len(top) or path[len(top)] == "/")
