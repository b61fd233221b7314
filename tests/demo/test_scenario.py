import pytest

from nearkv.demo.scenario import SECOND_DOCUMENT_ROUNDS, Conversation, Topic, topics

TOPIC = Topic("handbook", "Long text.", ("First?", "Second?"), rounds=3)


def test_first_message_carries_edition_and_document():
    [message] = Conversation(TOPIC, edition="copy 1").ask(1)
    assert message == {"role": "user", "content": "[copy 1] Long text.\n\nFirst?"}


def test_later_requests_carry_everything_before_them():
    conversation = Conversation(TOPIC, edition="copy 1")
    first = conversation.ask(1)
    conversation.hear("Yes.")
    second = conversation.ask(2)
    assert second[: len(first)] == first
    assert second[len(first) :] == [
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Second?"},
    ]


def test_questions_begin_anew_when_used_up():
    assert TOPIC.question(3) == "First?"


@pytest.mark.parametrize(("rounds", "second"), [(10, SECOND_DOCUMENT_ROUNDS), (2, 2)])
def test_second_document_gets_fewer_rounds(rounds, second):
    assert [topic.rounds for topic in topics(rounds)] == [rounds, second]


def test_documents_differ_from_the_start_and_are_long():
    texts = [topic.text for topic in topics(10)]
    assert texts[0][:20] != texts[1][:20]
    assert all(10_000 < len(text) < 16_000 for text in texts)
