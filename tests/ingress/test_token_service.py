"""The token service: how often it asks, whom, and that the keys are always the same."""

import asyncio
import contextlib
import json
import threading
from pathlib import Path

import msgspec
import pytest

from nearkv.block_keys import chain_keys, pack_tokens
from nearkv.ingress.errors import TokenizationError
from nearkv.ingress.requests import parse_chat, parse_completion, parse_messages, parse_responses
from nearkv.ingress.tokens.engine_tokenizer import EngineRef, Tokenized
from nearkv.ingress.tokens.local_tokenizer import LocalTokenizer
from nearkv.ingress.tokens.service import KeyScope, TokenService

TOKENIZER = LocalTokenizer.load(Path(__file__).parents[1] / "data" / "vllm")
ENGINE = EngineRef("e", "i", "http://e")
SCOPE = KeyScope("tiny", 7, 16)
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RENDER, TOKENIZE = f"{COMPLETIONS}/render", "/tokenize"
DOCUMENT = (
    "The caf\u00e9 opened at 7; its owner, 42, didn't say why.\n\nMany came, and some stayed. " * 40
)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello world"}], "n": 1}


class FakeEngine:
    """Answers as an engine does, notes every call, and declines or fails what it is told to."""

    def __init__(self, declines=(), fails=(), *, cuts_well=True):
        self.calls = []
        self.declines = set(declines)
        self.fails = set(fails)
        self.cuts_well = cuts_well
        self.declined = set()

    @property
    def paths(self):
        return [path for path, _ in self.calls]

    def offers(self, engine, path):
        return (engine.id, engine.incarnation, path) not in self.declined

    def forget(self, known):
        self.declined = {item for item in self.declined if item[:2] in known}

    def _answer(self, engine, path, question):
        self.calls.append((path, question))
        if path in self.declines:
            self.declined.add((engine.id, engine.incarnation, path))
            raise TokenizationError(path)
        if path in self.fails:
            raise TokenizationError(path)

    async def render(self, engine, path, body):
        self._answer(engine, f"{path}/render", body)
        fields = json.loads(body)
        return Tokenized(tokens_of(fields).token_ids)

    async def tokenize(self, engine, question, *, spelled=False):
        question = json.loads(msgspec.json.encode(question))
        self._answer(engine, TOKENIZE, question)
        tokenized = tokens_of(question)
        if not self.cuts_well and question.get("add_special_tokens") is False:
            return Tokenized([1, *tokenized.token_ids], ["<s>", *tokenized.token_strs])
        return tokenized if spelled else Tokenized(tokenized.token_ids)


def tokens_of(fields):
    if "messages" in fields:
        return TOKENIZER.tokenize_chat(fields)
    return TOKENIZER.tokenize_text(fields["prompt"])


def expected_keys(text, scope=SCOPE):
    packed = pack_tokens(TOKENIZER.tokenize_text(text).token_ids)
    return chain_keys(scope.root, packed, scope.block_size)


class Asking:
    """A service and the fake engine behind it."""

    def __init__(self, engine=None, order=("render", "tokenize", "local"), local=()):
        self.engine = engine or FakeEngine()
        self.service = TokenService(
            self.engine, dict.fromkeys(local, TOKENIZER), order=order, memo_bytes=1 << 24
        )

    async def text(self, prompt, *, scope=SCOPE, ref=ENGINE, **fields):
        body = json.dumps({"model": "tiny", "prompt": prompt} | fields).encode()
        return await self.service.keys_of(
            parse_completion(body), body, COMPLETIONS, scope=scope, engine=ref
        )

    async def chat(self, body):
        return await self.service.keys_of(parse_chat(body), body, CHATS, scope=SCOPE, engine=ENGINE)

    async def probed(self):
        """Wait for the probe, then count calls from zero."""
        if self.service._probes:
            await asyncio.wait(self.service._probes, timeout=10)
        self.engine.calls.clear()


@pytest.fixture
def asking():
    return Asking()


@pytest.mark.parametrize("prompt", ["hello world", "hello " * 100], ids=["no block", "blocks"])
async def test_an_unseen_prompt_costs_one_call_and_a_seen_one_none(asking, prompt):
    first = await asking.text(prompt)
    again = await asking.text(prompt, temperature=0.5, stream=True)
    assert asking.engine.paths == [RENDER]
    assert list(first.keys) == list(again.keys) == expected_keys(prompt)
    assert (first.source, again.source) == ("render", "memo")
    assert first.token_count == again.token_count == len(tokens_of({"prompt": prompt}).token_ids)


async def test_token_ids_need_nobody(asking):
    found = await asking.text(list(range(40)))
    assert asking.engine.calls == []
    assert (found.token_count, found.source) == (40, "ids")
    assert list(found.keys) == chain_keys(SCOPE.root, pack_tokens(range(40)), 16)


async def test_what_was_seen_can_be_recalled_without_an_engine(asking):
    seen = parse_completion(b'{"model": "tiny", "prompt": "hello world"}')
    assert asking.service.recall(seen, SCOPE) is None
    found = await asking.text("hello world")
    assert asking.service.recall(seen, SCOPE).keys == found.keys
    assert asking.service.recall(seen, KeyScope("tiny", 99, 16)) is None


async def test_render_gets_the_clients_bytes(asking):
    body = b'{ "messages": [{"role": "user", "content": "hi"}], "tools": null, "n": 1 }'
    await asking.chat(body)
    assert asking.engine.calls == [(f"{CHATS}/render", body)]


async def test_tokenize_is_asked_for_what_bears_on_the_tokens():
    asking = Asking(order=("tokenize",))
    await asking.chat(json.dumps(CHAT | {"add_generation_prompt": False, "seed": 1}).encode())
    await asking.text(["first", "second"], add_special_tokens=False, seed=1)
    assert asking.engine.calls == [
        (
            TOKENIZE,
            {"model": "tiny", "messages": CHAT["messages"], "add_generation_prompt": False},
        ),
        (TOKENIZE, {"model": "tiny", "prompt": "first", "add_special_tokens": False}),
    ]


async def test_a_declined_render_is_remembered_for_the_incarnation():
    asking = Asking(FakeEngine(declines=[RENDER]))
    assert (await asking.text("one")).source == "tokenize"
    assert asking.engine.paths == [RENDER, TOKENIZE]
    await asking.text("two")
    assert asking.engine.paths == [RENDER, TOKENIZE, TOKENIZE]
    await asking.text("three", ref=EngineRef("e", "i2", "http://e"))
    assert asking.engine.paths[3:] == [RENDER, TOKENIZE]


@pytest.mark.parametrize(
    ("order", "declines", "local", "source"),
    [
        pytest.param(("render", "tokenize", "local"), [], ["tiny"], "render", id="render first"),
        pytest.param(("local", "render"), [], ["tiny"], "local", id="local first"),
        pytest.param(("local", "render"), [], [], "render", id="no local one"),
        pytest.param(("render", "local"), [RENDER], ["tiny"], "local", id="render declined"),
        pytest.param(
            ("render", "tokenize", "local"), [RENDER, TOKENIZE], ["tiny"], "local", id="both"
        ),
    ],
)
async def test_sources_are_asked_in_order(order, declines, local, source):
    asking = Asking(FakeEngine(declines), order, local)
    found = await asking.text("hello world")
    assert found.source == source
    assert list(found.keys) == expected_keys("hello world")


@pytest.mark.parametrize(
    "prompt", ["hello", pytest.param(DOCUMENT, id="long")], ids=["short", "long"]
)
async def test_without_any_source_there_are_no_tokens(prompt):
    asking = Asking(FakeEngine(declines=[RENDER, TOKENIZE]))
    for _ in range(2):
        with pytest.raises(TokenizationError):
            await asking.text(prompt)
    await asking.probed()
    with pytest.raises(TokenizationError, match="no source"):
        await asking.text(prompt)
    assert asking.engine.calls == [], "nobody is asked in vain for ever"


@pytest.mark.parametrize("local", [[], ["tiny"]], ids=["alone", "with a local one"])
async def test_a_failure_ends_the_question_and_is_not_held_against_the_engine(local):
    asking = Asking(FakeEngine(fails=[RENDER]), local=local)
    with pytest.raises(TokenizationError):
        await asking.text("hello")
    assert asking.engine.paths == [RENDER], "neither another source nor another engine is asked"
    asking.engine.fails.clear()
    assert (await asking.text("hello")).source == "render"


async def test_what_an_engine_declined_can_be_forgotten():
    asking = Asking(FakeEngine(declines=[RENDER]))
    await asking.text("one")
    asking.service.forget(set())
    await asking.text("two")
    assert asking.engine.paths == [RENDER, TOKENIZE] * 2


# -- Long texts ------------------------------------------------------------------------


async def test_a_growing_text_is_tokenized_by_its_tail_alone(asking):
    await asking.text(DOCUMENT)
    await asking.probed()
    text = DOCUMENT
    for turn in range(8):
        text += (
            f"\nQuestion {turn}: where's the ünï 中文 \U0001f600? Answer: it is here "
            + "so " * turn
        )
        found = await asking.text(text)
        ((path, question),) = asking.engine.calls
        asking.engine.calls.clear()
        assert path == TOKENIZE
        assert question["add_special_tokens"] is False
        assert text.endswith(question["prompt"])
        assert len(question["prompt"]) < 1400
        assert found.source == "prefix"
        assert list(found.keys) == expected_keys(text)
        assert found.token_count == len(tokens_of({"prompt": text}).token_ids)


async def test_a_text_that_leaves_a_known_one_is_tokenized_from_there(asking):
    await asking.text(DOCUMENT + "the end of it")
    await asking.probed()
    other = DOCUMENT[:2500] + " but then all was different " * 30
    found = await asking.text(other)
    assert found.source == "prefix"
    assert list(found.keys) == expected_keys(other)
    assert len(asking.engine.calls) == 1


async def test_until_the_probe_is_through_texts_are_tokenized_whole(asking):
    await asking.text(DOCUMENT)
    found = await asking.text(DOCUMENT + "more of it")
    assert found.source == "tokenize"
    assert list(found.keys) == expected_keys(DOCUMENT + "more of it")


async def test_a_tokenizer_that_fails_the_probe_is_never_given_tails():
    asking = Asking(FakeEngine(cuts_well=False))
    await asking.text(DOCUMENT)
    await asking.probed()
    found = await asking.text(DOCUMENT + "more of it")
    assert [question["prompt"] for _, question in asking.engine.calls] == [DOCUMENT + "more of it"]
    assert list(found.keys) == expected_keys(DOCUMENT + "more of it")


async def test_a_probe_that_got_no_answer_is_made_again(asking):
    await asking.text(DOCUMENT)
    asking.engine.fails.add(TOKENIZE)
    await asking.probed()
    asking.engine.fails.clear()
    await asking.text(DOCUMENT + "more")
    await asking.probed()
    assert (await asking.text(DOCUMENT + "more of it")).source == "prefix"


async def test_a_model_is_probed_once(asking):
    await asking.text(DOCUMENT)
    await asking.probed()
    for i in range(3):
        await asking.text(f"{i} {DOCUMENT}")
    assert not asking.service._probes
    assert len(asking.engine.calls) == 3


async def test_models_do_not_share_texts(asking):
    for model in ("one", "two"):
        await asking.text(DOCUMENT, scope=KeyScope(model, 7, 16), model=model)
        await asking.probed()
    found = await asking.text(DOCUMENT + "more", scope=KeyScope("three", 7, 16), model="three")
    assert found.source == "tokenize"


@pytest.mark.parametrize(
    "scope",
    [KeyScope("tiny", 99, 16), KeyScope("tiny", 7, 32)],
    ids=["other root: salt or adapter", "other block size"],
)
@pytest.mark.parametrize("more", ["", "and more of it"], ids=["same text", "grown text"])
async def test_keys_follow_root_and_block_size_whatever_is_remembered(asking, scope, more):
    await asking.text(DOCUMENT)
    await asking.probed()
    found = await asking.text(DOCUMENT + more, scope=scope)
    assert list(found.keys) == expected_keys(DOCUMENT + more, scope)
    assert found.source == "prefix", "its tokens are known all the same"
    back = await asking.text(DOCUMENT + more + " and on")
    assert list(back.keys) == expected_keys(DOCUMENT + more + " and on")


async def test_a_long_text_with_other_fields_is_not_cut(asking):
    await asking.text(DOCUMENT)
    await asking.probed()
    await asking.text(DOCUMENT + "more", truncate_prompt_tokens=-1)
    assert asking.engine.paths == [RENDER]


async def test_where_only_render_is_offered_long_texts_use_it():
    asking = Asking(order=("render",))
    found = await asking.text(DOCUMENT)
    assert found.source == "render"
    assert list(found.keys) == expected_keys(DOCUMENT)


class Patient:
    """A tokenizer that takes until others had their turn."""

    def __init__(self):
        self.others_had_their_turn = threading.Event()

    def tokenize_text(self, text):
        assert self.others_had_their_turn.wait(10)
        return TOKENIZER.tokenize_text(text)


async def test_a_local_tokenizer_holds_up_nobody():
    patient = Patient()
    service = TokenService(FakeEngine(), {"tiny": patient}, order=("local",), memo_bytes=1 << 24)
    body = json.dumps({"model": "tiny", "prompt": DOCUMENT * 8}).encode()
    request = parse_completion(body)
    asked = service.keys_of(request, body, COMPLETIONS, scope=SCOPE, engine=ENGINE)
    asyncio.get_running_loop().call_soon(patient.others_had_their_turn.set)
    assert (await asked).source == "local"


async def test_a_local_tokenizer_takes_no_more_than_some_megabytes():
    asking = Asking(order=("local",), local=["tiny"])
    with pytest.raises(TokenizationError, match="too many"):
        await asking.text("word " * 500_000)


async def test_a_local_tokenizer_does_for_long_texts():
    asking = Asking(order=("local",), local=["tiny"])
    assert (await asking.text(DOCUMENT)).source == "local"
    await asking.probed()
    found = await asking.text(DOCUMENT + "more")
    assert found.source == "prefix"
    assert list(found.keys) == expected_keys(DOCUMENT + "more")
    assert asking.engine.calls == []


async def test_memory_is_bounded():
    asking = Asking()
    asking.service = TokenService(asking.engine, {}, order=("tokenize",), memo_bytes=200_000)
    for i in range(20):
        await asking.text(f"{i} {DOCUMENT}")
    assert 0 < asking.service.memo_bytes <= 200_000


async def test_closing_ends_the_probe(asking):
    await asking.text(DOCUMENT)
    (probe,) = asking.service._probes
    asking.service.close()
    await asyncio.wait([probe], timeout=5)
    assert probe.cancelled()


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": ["\xff"]}',
        b'{"messages": [], "seed": 1e999}',
        b'{"messages": [], "chat_template_kwargs": 5}',
        b'{"messages": [5]}',
    ],
    ids=["not UTF-8", "infinite", "kwargs", "no message"],
)
async def test_a_chat_the_local_tokenizer_cannot_read_gives_no_tokens_and_no_crash(body):
    asking = Asking(order=("local",), local=["tiny"])
    with contextlib.suppress(TokenizationError):
        await asking.chat(body)


# -- Other APIs ----------------------------------------------------------------------------

MESSAGES = {"model": "tiny", "messages": [{"role": "user", "content": "hello world " * 9}]}
RESPONSES = {"model": "tiny", "input": MESSAGES["messages"]}
OTHERS = {
    "/v1/messages": (MESSAGES, parse_messages),
    "/v1/responses": (RESPONSES, parse_responses),
}
AS_CHAT = TOKENIZER.tokenize_chat(MESSAGES).token_ids


async def other(asking, path, **fields):
    body, parse = OTHERS[path]
    body = json.dumps(body | fields).encode()
    return await asking.service.keys_of(parse(body), body, path, scope=SCOPE, engine=ENGINE)


@pytest.mark.parametrize("path", OTHERS)
async def test_other_apis_are_rendered_by_the_engine(path):
    asking = Asking(RendersAnything())
    found = await other(asking, path)
    assert asking.engine.paths == [f"{path}/render"]
    assert (found.exact, found.source) == (True, "render")
    again = await other(asking, path)
    assert (again.exact, again.source) == (True, "memo")


class RendersAnything(FakeEngine):
    async def render(self, engine, path, body):
        self._answer(engine, f"{path}/render", body)
        return Tokenized(AS_CHAT)


@pytest.mark.parametrize("path", OTHERS)
@pytest.mark.parametrize("source", ["tokenize", "local"])
async def test_where_no_engine_renders_them_they_are_tokenized_as_the_chat_they_amount_to(
    path, source
):
    declines = {f"{path}/render"} | ({TOKENIZE} if source == "local" else set())
    asking = Asking(FakeEngine(declines=declines), local=["tiny"])
    found = await other(asking, path)
    assert (found.exact, found.source) == (False, source)
    assert list(found.keys) == chain_keys(SCOPE.root, pack_tokens(AS_CHAT), SCOPE.block_size)
    again = await other(asking, path)
    assert (again.exact, again.source) == (False, "memo")


async def test_a_rendering_that_may_differ_from_the_one_served_is_not_exact():
    asking = Asking(RendersAnything())
    found = await other(asking, "/v1/messages", thinking={"type": "disabled"})
    assert (found.exact, found.source) == (False, "render")


async def test_what_cannot_be_put_as_a_chat_has_no_tokens():
    asking = Asking(FakeEngine(declines={"/v1/responses/render"}))
    with pytest.raises(TokenizationError, match="item_reference"):
        await other(asking, "/v1/responses", input=[{"type": "item_reference", "id": "x"}])
