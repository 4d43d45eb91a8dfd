"""Generated workloads: conversations that grow turn by turn, some on a shared system prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

CHARS_PER_TOKEN = 4
_WORDS = """
the of and to in is that for it was on are as with his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very
after words called just where most know
""".split()


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message."""

    due_s: float
    """Start, in seconds from the workload's start; later if the turn before has not been answered by then."""
    text: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat: every turn is sent with all that was said before it."""

    system: str
    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Parameters of a multi-turn chat workload; lengths in tokens, about four characters each."""

    conversations: int = 48
    turns: int = 5
    system_prompts: int = 4
    system_tokens: int = 1000
    document_tokens: int = 5000
    """The first message carries a text to talk about."""
    question_tokens: int = 150
    output_tokens: int = 24
    span_s: float = 12.0
    """Conversations start within the first third of it, and the last turns are due at its end."""

    @property
    def requests(self) -> int:
        return self.conversations * self.turns

    def generate(self, seed: int) -> list[Conversation]:
        """The same conversations for the same seed."""
        source = random.Random(seed)
        systems = [_text(source, self.system_tokens) for _ in range(self.system_prompts)]
        return [self._conversation(source, systems) for _ in range(self.conversations)]

    def _conversation(self, source: random.Random, systems: Sequence[str]) -> Conversation:
        start_s = source.uniform(0, self.span_s / 3)
        gap_s = (self.span_s - start_s) / max(1, self.turns - 1)
        turns = []
        for number in range(self.turns):
            due_s = start_s + gap_s * number * source.uniform(0.8, 1.0)
            tokens = self.question_tokens + (0 if number else self.document_tokens)
            turns.append(Turn(due_s, _text(source, tokens), self.output_tokens))
        return Conversation(source.choice(systems), turns)


def _text(source: random.Random, tokens: int) -> str:
    length = tokens * CHARS_PER_TOKEN
    return " ".join(source.choices(_WORDS, k=length // 3))[:length]
