"""What was tokenized before: whole prompts, and beginnings of long texts."""

from array import array

import pytest

from nearkv.block_keys import pack_tokens
from nearkv.ingress.tokens.memo import (
    STEP_BYTES,
    PrefixMemo,
    PromptKeys,
    PromptMemo,
    TokenizedText,
    step_hashes,
)

SCOPE = 1
MANY = 1 << 30


def prompt(keys=0):
    return PromptKeys(10, range(keys), "memo")


def words(count, word="word"):
    """Return text of five bytes a word, in which a cut is safe after each word."""
    return " ".join([word] * count).encode()


def entry_of(text, scope=SCOPE):
    """Return a text as if each word (with the space before it) were one token."""
    ends = array("I", [i for i in range(1, len(text)) if text[i] == 0x20] + [len(text)])
    return TokenizedText(
        text, pack_tokens(range(len(ends))), ends, 7, 16, (), step_hashes(scope, text)
    )


@pytest.fixture
def memo():
    return PrefixMemo(limit_bytes=MANY)


def find(memo, text, scope=SCOPE):
    return memo.find(text, step_hashes(scope, text))


def test_a_prompt_is_found_again_by_its_digest():
    memo = PromptMemo(limit_bytes=MANY)
    memo.put(b"a", prompt())
    assert memo.get(b"a") == prompt()
    assert memo.get(b"b") is None


def test_prompts_used_least_recently_go_first_and_the_bound_is_in_bytes():
    memo = PromptMemo(limit_bytes=3000)
    for digest in (b"a", b"b", b"c"):
        memo.put(digest, prompt())
    memo.get(b"a")
    memo.put(b"d", prompt())
    assert [d for d in (b"a", b"b", b"c", b"d") if memo.get(d)] == [b"a", b"c", b"d"]
    memo.put(b"big", prompt(keys=1000))
    assert memo.size_bytes <= 3000
    assert memo.get(b"big") is None


def test_a_prompt_put_twice_is_counted_once():
    memo = PromptMemo(limit_bytes=MANY)
    memo.put(b"a", prompt())
    once = memo.size_bytes
    memo.put(b"a", prompt())
    assert memo.size_bytes == once


def test_hashes_cover_whole_steps_and_chain():
    text = bytes(range(256)) * 12
    hashes = step_hashes(SCOPE, text)
    assert len(hashes) == len(text) // STEP_BYTES == 3
    assert step_hashes(SCOPE, text[:-1]) == hashes[:2]
    assert step_hashes(SCOPE, b"x" + text[1:])[1] != hashes[1], "a step names all before it"
    assert len(set(hashes)) == 3, "equal steps at other places are others"


def test_a_longer_text_needs_only_its_tail(memo):
    known = words(1000)
    memo.put(entry_of(known))
    found = find(memo, known + b" and then more")
    # The last whole step ends at 4096; a cut needs the space and the letter behind it known.
    assert found.text_bytes == 4094
    assert found.token_count == 819
    assert found.packed_tokens == pack_tokens(range(819))


@pytest.mark.parametrize("at", [0, 700, 1023, 1024, 1025, 2048, 4000])
def test_nothing_is_known_past_where_texts_part(memo, at):
    known = words(1000)
    memo.put(entry_of(known))
    found = find(memo, known[:at] + b"x" + known[at + 1 :])
    if at < STEP_BYTES:
        assert found is None
    else:
        assert found.text_bytes <= at // STEP_BYTES * STEP_BYTES - 2
        assert found.text_bytes > at // STEP_BYTES * STEP_BYTES - 8


def test_the_longest_known_beginning_wins(memo):
    short, long = words(500), words(500) + b" " + words(500, "more")
    memo.put(entry_of(long))
    memo.put(entry_of(short))
    assert find(memo, long + b" x").text_bytes > len(short)


def test_texts_of_other_models_are_not_mixed(memo):
    memo.put(entry_of(words(1000), scope=1))
    assert find(memo, words(1000), scope=2) is None


def test_a_text_without_a_safe_cut_helps_nobody(memo):
    text = b"x" * 5000
    memo.put(entry_of(text))
    assert find(memo, text + b" y") is None


def test_an_extension_takes_the_place_of_what_it_extends(memo):
    first = entry_of(words(1000))
    memo.put(first)
    second = entry_of(first.text + b" " + words(1000, "more"))
    memo.put(second, extends=first)
    assert memo.size_bytes == second.size_bytes
    assert find(memo, first.text + b" then").entry is second


def test_a_text_that_parts_from_another_does_not_replace_it(memo):
    first = entry_of(words(1000) + b" " + words(400, "left"))
    second = entry_of(words(1000) + b" " + words(400, "west"))
    memo.put(first)
    memo.put(second, extends=first)
    assert find(memo, first.text + b" x").entry is first
    assert find(memo, second.text + b" x").entry is second


def test_dropping_a_text_leaves_what_a_newer_one_shares_with_it():
    common = words(1000)
    first = entry_of(common + b" " + words(400, "left"))
    second = entry_of(common + b" " + words(400, "west"))
    memo = PrefixMemo(limit_bytes=first.size_bytes + second.size_bytes)
    memo.put(first)
    memo.put(second)
    memo.put(entry_of(words(600, "other")))
    assert find(memo, common + b" elsewhere").entry is second


def test_memory_is_bounded_and_what_is_used_stays():
    texts = [words(1000, f"wor{letter}") for letter in "abcd"]
    size = entry_of(texts[0]).size_bytes
    memo = PrefixMemo(limit_bytes=3 * size)
    for text in texts[:3]:
        memo.put(entry_of(text))
    find(memo, texts[0])
    memo.put(entry_of(texts[3]))
    assert [find(memo, text) is not None for text in texts] == [True, False, True, True]
    assert memo.size_bytes == 3 * size


def test_dropping_everything_leaves_nothing_behind():
    memo = PrefixMemo(limit_bytes=0)
    memo.put(entry_of(words(1000)))
    assert memo.size_bytes == 0
    assert not memo._at
