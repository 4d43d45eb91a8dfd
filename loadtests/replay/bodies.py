"""Request bodies, made just before they are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

import orjson

from kvroute.loadtests.replay.answer import Request
from kvroute.loadtests.traces.arrivals import Arrival
from kvroute.loadtests.traces.prompts import MIN_ID, Prompts

APIS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PROMPTS = ("ids", "text")
_PLAIN = "!#$&'()*+,/:;=?@[]^`{|}"
"""What a header's value may hold as it is, beside letters and digits."""
_FIXED = {
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
"""`ignore_eos`, with `max_tokens` and `min_tokens`, makes answers as long as the trace's; engines that know
none of them end where they like, which is counted.
"""


@dataclass(frozen=True, slots=True)
class Form:
    """How requests are put: which API, and prompts of token ids or of text."""

    api: str = "completions"
    prompts: str = "ids"

    def __post_init__(self) -> None:
        if self.api not in APIS:
            raise ValueError(f"--api: unknown {self.api!r}; known: {', '.join(APIS)}")
        if self.prompts not in PROMPTS:
            raise ValueError(f"--prompts: unknown {self.prompts!r}; known: {', '.join(PROMPTS)}")
        if self.api == "chat" and self.prompts == "ids":
            raise ValueError("--prompts ids: a chat has text; give --prompts text, or --api completions")


class Bodies:
    """Makes the requests of one run, all of one model."""

    def __init__(self, form: Form, model: str, prompts: Prompts) -> None:
        self._path = APIS[form.api]
        self._fixed = {"model": model, **_FIXED}
        made: dict[str, Callable[[Arrival], object]] = {"ids": self._ids, "text": self._text}
        self._prompt = made[form.prompts]
        self._prompts = prompts
        self._chat = form.api == "chat"

    def request(self, arrival: Arrival, counts: bool = True) -> Request:
        """Ready to be sent; see `Request.counts`."""
        length = arrival.output_tokens
        body = self._body(self._prompt(arrival), length)
        session = arrival.view.session_id
        # A trace's names may be anything, line ends too.
        fields = b"" if session is None else b"x-session-id: %b\r\n" % quote(session, _PLAIN).encode()
        tokens = arrival.view.prompt_tokens
        return Request(arrival.arrival_s, self._path, body, fields, tokens, length, counts)

    @property
    def path(self) -> str:
        return self._path

    @property
    def least(self) -> bytes:
        """The shortest request there is, to see whether it is answered."""
        prompt: object = "hello" if self._prompt == self._text else [MIN_ID]
        return self._body(prompt, 1)

    def _body(self, prompt: object, length: int) -> bytes:
        said = {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        return orjson.dumps({**self._fixed, **said, "max_tokens": length, "min_tokens": length})

    def _ids(self, arrival: Arrival) -> list[int]:
        return self._prompts.token_ids(arrival.block_ids, arrival.view.prompt_tokens)

    def _text(self, arrival: Arrival) -> str:
        return self._prompts.text(arrival.block_ids, arrival.view.prompt_tokens)
