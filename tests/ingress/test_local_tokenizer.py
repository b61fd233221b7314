"""The local tokenizer against what a real engine answered for the same model."""

import json
from pathlib import Path

import pytest

from nearkv.ingress.errors import IngressError, TokenizationError
from nearkv.ingress.tokens.local_tokenizer import LocalTokenizer

DATA = Path(__file__).parents[1] / "data" / "vllm"
CAPTURED = {
    entry["name"]: entry
    for entry in map(json.loads, (DATA / "http.jsonl").read_text().splitlines())
}


def captured(name):
    entry = CAPTURED[name]
    return entry["request"], json.loads(entry["response"])


@pytest.fixture(scope="module")
def tokenizer():
    return LocalTokenizer.load(DATA)


def folder_with(path, **files):
    (path / "tokenizer.json").write_bytes((DATA / "tokenizer.json").read_bytes())
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def rendered(path, template, **body):
    """Return the tokens of a chat under a template, as text."""
    tokenizer = LocalTokenizer.load(folder_with(path, chat_template__jinja=template))
    ids = tokenizer.tokenize_chat({"messages": []} | body).token_ids
    return tokenizer._tokenizer.decode(ids, skip_special_tokens=False)


def test_a_prompt_has_the_engines_tokens(tokenizer):
    asked, answered = captured("tokenize_prompt")
    assert tokenizer.tokenize_text(asked["prompt"]).token_ids == answered["tokens"]
    _, rendered = captured("render_completion")
    assert tokenizer.tokenize_text("hello world").token_ids == rendered[0]["token_ids"]


@pytest.mark.parametrize(
    ("name", "field"), [("tokenize_chat", "tokens"), ("render_chat", "token_ids")]
)
def test_a_chat_has_the_engines_tokens(tokenizer, name, field):
    asked, answered = captured(name)
    assert tokenizer.tokenize_chat(asked).token_ids == answered[field]


@pytest.mark.parametrize("name", ["completion_first", "completion_other_evicts", "chat"])
def test_counts_agree_with_the_engines_usage(tokenizer, name):
    asked, answered = captured(name)
    found = (
        tokenizer.tokenize_chat(asked)
        if "messages" in asked
        else tokenizer.tokenize_text(asked["prompt"])
    )
    assert len(found.token_ids) == answered["usage"]["prompt_tokens"]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(IngressError, match=r"tokenization\.local.*tokenizer\.json"):
        LocalTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("tokenizer_config__json", "{", id="broken config"),
        pytest.param("tokenizer_config__json", "[]", id="config is a list"),
        pytest.param("chat_template__jinja", "{% for %}", id="broken template"),
    ],
)
def test_what_cannot_be_loaded_is_told_at_the_start(tmp_path, name, text):
    with pytest.raises(IngressError, match=r"tokenization\.local"):
        LocalTokenizer.load(folder_with(tmp_path, **{name: text}))


def test_without_a_template_there_are_no_chats(tmp_path):
    tokenizer = LocalTokenizer.load(folder_with(tmp_path))
    assert tokenizer.tokenize_text("hello").token_ids
    with pytest.raises(TokenizationError, match="no chat template"):
        tokenizer.tokenize_chat({"messages": []})


def test_template_and_special_tokens_may_come_from_the_config(tmp_path):
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }
    folder = folder_with(tmp_path, tokenizer_config__json=json.dumps(config))
    found = LocalTokenizer.load(folder).tokenize_chat({"messages": [{"content": ""}]})
    assert found.token_ids == [0, 1]


@pytest.mark.parametrize(
    ("template", "body", "text"),
    [
        pytest.param("{{ add_generation_prompt }}", {}, "True", id="generation prompt"),
        pytest.param("{{ x }}", {"chat_template_kwargs": {"x": 3}}, "3", id="kwargs"),
        pytest.param("{{ x }}", {"x": 3}, "", id="other fields are not variables"),
        pytest.param(
            "{{ tools | tojson }}",
            {"tools": [{"type": "é<", "name": "f"}]},
            '[{"type": "é<", "name": "f"}]',
            id="plain JSON in its order",
        ),
        pytest.param("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}", {}, "1", id="break"),
    ],
)
def test_templates_see_what_they_expect(tmp_path, template, body, text):
    assert rendered(tmp_path, template, **body) == text


@pytest.mark.parametrize(
    ("template", "body"),
    [
        pytest.param("{{ raise_exception('no system role') }}", {}, id="refused"),
        pytest.param("{{ messages[0].role.x }}", {}, id="undefined"),
        pytest.param("{{ 1 + 'a' }}", {}, id="types"),
        pytest.param("{{ 1 / 0 }}", {}, id="arithmetic"),
        pytest.param("{{ ''.__class__.mro() }}", {}, id="unsafe"),
        pytest.param("x", {"chat_template_kwargs": [1]}, id="kwargs are no object"),
        pytest.param("x", {"chat_template": "y"}, id="a template of the client's"),
        pytest.param("x", {"continue_final_message": True}, id="a continued message"),
    ],
)
def test_a_chat_that_cannot_be_rendered_as_the_engine_would_gives_no_tokens(
    tmp_path, template, body
):
    with pytest.raises(TokenizationError):
        rendered(tmp_path, template, **body)
