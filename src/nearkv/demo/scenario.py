"""The conversation that the demonstration holds, as plain data.

A user asks about a long document, turn after turn: every request carries the document, all
earlier questions and answers, and one new question. Without reuse an engine would compute
all of it each time. Then a second document follows, which must be computed once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from nearkv.demo.models import DOCUMENTS_DIR

Message = dict[str, str]

MAX_ANSWER_TOKENS = 24
SECOND_DOCUMENT_ROUNDS = 3
MOST_ROUNDS = 40
"""Beyond this the conversation may outgrow the 8,192 tokens that the engines accept."""

STORAGE_QUESTIONS = (
    "How many machines does Tidewater run on, and what is one of them called?",
    "What does the first check of the daily round look at?",
    "What does an amber light on the front of a disk mean?",
    "How long may a barge rest before its pieces count as missing?",
    "Which repair speed is the usual one?",
    "Whom does one call first in an emergency?",
    "What happens to writing when a whole hall is dark?",
    "Above which water temperature must a hall be put to sleep?",
    "For how long can the owner of a deleted object bring it back?",
    "On which days are new versions rolled out, and why?",
)
RAILWAY_QUESTIONS = (
    "How long is the line, and which two places does it join?",
    "Which token does a train going up the upper rack carry?",
    "What does a day pass cost?",
    "Where is lost property kept?",
    "How many bicycles fit in a train?",
    "Which is the longest tunnel?",
)


@dataclass(frozen=True, slots=True)
class Topic:
    """A document and what is asked about it."""

    name: str
    text: str
    questions: tuple[str, ...]
    rounds: int

    def question(self, turn: int) -> str:
        """Return the question of a turn, counted from 1; they begin anew when used up."""
        return self.questions[(turn - 1) % len(self.questions)]


@dataclass(slots=True)
class Conversation:
    """The messages so far. ``edition`` begins the document, so that no other edition's KV fits."""

    topic: Topic
    edition: str
    messages: list[Message] = field(default_factory=list)

    def ask(self, turn: int) -> list[Message]:
        """Add the question of a turn and return the messages to send."""
        question = self.topic.question(turn)
        if not self.messages:
            question = f"[{self.edition}] {self.topic.text}\n\n{question}"
        self.messages.append({"role": "user", "content": question})
        return list(self.messages)

    def hear(self, answer: str) -> None:
        """Add the answer, which is part of every later request."""
        self.messages.append({"role": "assistant", "content": answer})


def topics(rounds: int) -> tuple[Topic, ...]:
    """Return the two documents of the scenario; the first is asked about ``rounds`` times."""
    return (
        Topic("storage handbook", read_document("storage_handbook"), STORAGE_QUESTIONS, rounds),
        Topic(
            "railway guide",
            read_document("railway_guide"),
            RAILWAY_QUESTIONS,
            min(rounds, SECOND_DOCUMENT_ROUNDS),
        ),
    )


def read_document(name: str) -> str:
    """Read one of the documents that come with the package."""
    return (DOCUMENTS_DIR / f"{name}.txt").read_text(encoding="utf-8").strip()


def turn_numbers(topic: Topic) -> Iterator[int]:
    """Count the turns of a topic from 1."""
    return iter(range(1, topic.rounds + 1))
