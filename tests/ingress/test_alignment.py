"""Where tokens end in a text, and where a text can be cut between them."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.ingress.tokens.alignment import align_tokens, find_cut
from nearkv.ingress.tokens.local_tokenizer import LocalTokenizer

TOKENIZER = LocalTokenizer.load(Path(__file__).parents[1] / "data" / "vllm")


@pytest.mark.parametrize(
    ("text", "strs", "ends"),
    [
        pytest.param("ab cd", ["ab", "Ġcd"], [2, 5], id="space"),
        pytest.param("a\n", ["a", "Ċ"], [1, 2], id="newline"),
        pytest.param("ü", ["Ã", "¼"], [1, 2], id="a letter in two tokens"),
        pytest.param("\U0001f600", ["ðŁ", "ĺ", "Ģ"], [2, 3, 4], id="emoji"),
        pytest.param("ab", ["<s>", "ab"], [0, 2], id="special token in front"),
        pytest.param("ab", ["<\uff5cbegin\uff5c>", "ab"], [0, 2], id="unspellable token in front"),
        pytest.param("", [], [], id="empty"),
        pytest.param("", ["<s>"], [0], id="special token only"),
        pytest.param("<s>ab", ["<s>", "ab"], [3, 5], id="special token spelled by the client"),
    ],
)
def test_each_token_ends_at_a_byte(text, strs, ends):
    assert list(align_tokens(text.encode(), strs)) == ends


@pytest.mark.parametrize(
    ("text", "strs"),
    [
        pytest.param("ab cd", ["▁ab", "▁cd"], id="SentencePiece"),
        pytest.param("ab cd", ["ab", "##cd"], id="WordPiece"),
        pytest.param("ab cd", ["Ġab", "Ġcd"], id="a space put in front"),
        pytest.param("AB", ["ab"], id="normalized"),
        pytest.param("ab", ["ab", "</s>"], id="special token behind"),
        pytest.param("ab", ["<s>", "<s>", "ab"], id="two in front"),
        pytest.param("ü", ["ü"], id="not spelled by bytes"),
        pytest.param("ab", [], id="no tokens"),
    ],
)
def test_what_does_not_read_back_as_the_text_has_no_alignment(text, strs):
    assert align_tokens(text.encode(), strs) is None


@pytest.mark.parametrize(
    ("text", "strs", "limit", "count"),
    [
        pytest.param("ab cd ef", ["ab", "Ġcd", "Ġef"], 8, 2, id="the last one"),
        pytest.param("ab cd ef", ["ab", "Ġcd", "Ġef"], 5, 2, id="at the limit"),
        pytest.param("ab cd ef", ["ab", "Ġcd", "Ġef"], 4, 1, id="before the limit"),
        pytest.param("ab cd ef", ["ab", "Ġcd", "Ġef"], 1, None, id="none before the limit"),
        pytest.param("ab cd", ["<s>", "ab", "Ġcd"], 5, 2, id="counts the token in front"),
        pytest.param("1 cd", ["1", "Ġcd"], 4, 1, id="after a digit"),
        pytest.param("ab 1", ["ab", "Ġ1"], 4, None, id="not before a digit"),
        pytest.param("ab, cd", ["ab", ",", "Ġcd"], 6, None, id="not after punctuation"),
        pytest.param("ab  cd", ["ab", "Ġ", "Ġcd"], 6, None, id="not in a run of spaces"),
        pytest.param("ab\ncd", ["ab", "Ċ", "cd"], 5, None, id="not at a newline"),
        pytest.param("ü cd", ["Ã", "¼", "Ġcd"], 5, None, id="not after a byte of a letter"),
        pytest.param("ab ü", ["ab", "Ġ", "Ã", "¼"], 5, None, id="not before one"),
        pytest.param("ab cd", ["abĠcd"], 5, None, id="not within a token"),
        pytest.param("ab ", ["ab", "Ġ"], 3, None, id="not before a last space"),
        pytest.param("abc", ["abc"], 3, None, id="not at the end"),
        pytest.param("", [], 0, None, id="empty"),
    ],
)
def test_a_cut_is_made_only_where_no_merge_can_reach_across(text, strs, limit, count):
    raw = text.encode()
    assert find_cut(raw, align_tokens(raw, strs), limit) == count


def test_a_cut_that_is_far_away_is_not_looked_for():
    raw = b"ab cd" + b"x" * 5000
    ends = [2, *range(5, len(raw) + 1)]
    assert find_cut(raw, ends, 3000) == 1
    assert find_cut(raw, ends, len(raw)) is None


def cuts_of(raw, ends):
    """Yield every cut in the text, last one first."""
    limit = len(raw)
    while (count := find_cut(raw, ends, limit)) is not None:
        yield count
        limit = ends[count - 1] - 1


pieces = st.lists(
    st.sampled_from(
        ["the", "cat", "It's", "don't", "x1", "42", "3.14", " ", "  ", "\n", "\t", "ünï", "中文",
         "\U0001f600", "<s>", "</s>", "<", "a", "I", "_", "-", "e\u0301", "\u00a0", "Ġ", "\r\n"]
    ),
    max_size=30,
)  # fmt: skip
words = st.builds(str.join, st.sampled_from([" ", "", ", "]), pieces)


@given(words | st.text())
def test_tokens_of_a_text_are_those_left_and_right_of_every_cut(text):
    raw = text.encode()
    whole = TOKENIZER.tokenize_text(text)
    ends = align_tokens(raw, whole.token_strs)
    assert ends is not None
    assert ends[-1:].tolist() == ([len(raw)] if raw else [])
    assert all(left <= right for left, right in pairwise(ends))
    for count in cuts_of(raw, ends):
        left, right = raw[: ends[count - 1]].decode(), raw[ends[count - 1] :].decode()
        assert TOKENIZER.tokenize_text(left).token_ids == whole.token_ids[:count]
        assert TOKENIZER.tokenize_tail(right).token_ids == whole.token_ids[count:]


def test_plain_prose_has_a_cut_nearly_everywhere():
    text = "the quick brown fox jumps over the lazy dog again and again"
    raw = text.encode()
    ends = align_tokens(raw, TOKENIZER.tokenize_text(text).token_strs)
    assert len(list(cuts_of(raw, ends))) == text.count(" ")
