"""When the tokens of one streamed answer came."""

from __future__ import annotations

import re

from kvroute.loadtests.replay.gaps import Gaps

MAX_EVENT_BYTES = 2**20
_CHOICE = re.compile(rb'"choices": ?\[ ?\{')
_TEXT = re.compile(rb'"(?:content|text|reasoning_content|reasoning|arguments)": ?"(?!")')
_UNFINISHED = re.compile(rb'"finish_reason": ?null')
_END = b"data: [DONE]"


class TokenStream:
    """Fed with the body as it comes; counts an event that carries tokens as one, whatever its API.

    An event carries tokens if it has text, or if it neither opens the answer (a role) nor ends it: a token
    that is half a character, or special, shows as empty text.
    """

    __slots__ = (
        "_cut",
        "_gaps",
        "done",
        "endless",
        "events",
        "finished",
        "first_s",
        "last_s",
        "longest_gap_s",
    )

    def __init__(self, gaps: Gaps) -> None:
        """`gaps` takes the time between events that carry tokens."""
        self._gaps = gaps
        self._cut = b""
        self.events = 0
        """That carry tokens."""
        self.first_s: float | None = None
        self.last_s = 0.0
        self.longest_gap_s: float | None = None
        self.finished = False
        """A choice said why it ended."""
        self.done = False
        """The stream said that it is over."""
        self.endless = False
        """More than MAX_EVENT_BYTES came without the end of an event: this is no stream of tokens."""

    def feed(self, data: bytes, now_s: float) -> None:
        """One read of the body, at `now_s`."""
        if self.endless:
            return
        data = self._cut + data if self._cut else data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._cut = data.split(b"\n\n")
        self.endless = len(self._cut) > MAX_EVENT_BYTES
        for event in events:
            self._event(event, now_s)

    def _event(self, event: bytes, now_s: float) -> None:
        if _CHOICE.search(event) is None:
            self.done = self.done or event.endswith(_END)
            return
        ends = _UNFINISHED.search(event) is None and b'"finish_reason"' in event
        self.finished = self.finished or ends
        if _TEXT.search(event) is None and (ends or b'"role"' in event):
            return
        self.events += 1
        if self.first_s is None:
            self.first_s = now_s
        else:
            gap_s = now_s - self.last_s
            self._gaps.add(gap_s)
            if self.longest_gap_s is None or gap_s > self.longest_gap_s:
                self.longest_gap_s = gap_s
        self.last_s = now_s
