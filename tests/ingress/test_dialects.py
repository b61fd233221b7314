"""Which API a path belongs to."""

import pytest

from nearkv.ingress.dialects import Dialect, dialect_of, response_id_in


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/messages", Dialect.ANTHROPIC),
        ("/v1/messages/count_tokens", Dialect.ANTHROPIC),
        ("/v1/messages_of_others", Dialect.OPENAI),
        ("/v1/responses", Dialect.RESPONSES),
        ("/v1/responses/resp_1/cancel", Dialect.RESPONSES),
        ("/v1/responsesx", Dialect.OPENAI),
        ("/v1/chat/completions", Dialect.OPENAI),
        ("", Dialect.OPENAI),
    ],
)
def test_a_path_tells_the_api(path, dialect):
    assert dialect_of(path) is dialect


@pytest.mark.parametrize(
    ("path", "response_id"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/v1/responses/", ""),
        ("/v1/responses", ""),
        ("/v1/messages/resp_1", ""),
    ],
)
def test_a_response_s_own_path_names_it(path, response_id):
    assert response_id_in(path) == response_id
