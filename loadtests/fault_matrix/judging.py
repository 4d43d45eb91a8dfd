"""What a client got, and what that makes of it. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import orjson
from msgspec import Struct


class Outcome(StrEnum):
    RIGHT = "right"
    ERROR = "error"
    """A status that says so, or an error object."""
    BROKEN = "broken off"
    """A stream that began right and ends in an error event, or without its end: the client sees it."""
    WRONG = "WRONG"
    """Text that is not the right one, and nothing tells."""
    HANG = "HANG"


class Got(Struct, frozen=True):
    """A response as it came. `complete`: the connection did not end before the body did."""

    status: int
    body: bytes
    complete: bool


def judge(got: Got, right: str) -> Outcome:
    """`right` is the whole text of the right answer."""
    if got.status >= 400:
        return Outcome.ERROR if got.complete and _is_error(got.body) else Outcome.WRONG
    if got.body.lstrip().startswith(b"data:"):
        return _judge_stream(got, right)
    if not got.complete:
        return Outcome.BROKEN
    if _is_error(got.body):
        return Outcome.ERROR
    return Outcome.RIGHT if _text(_object(got.body)) == right else Outcome.WRONG


def _judge_stream(got: Got, right: str) -> Outcome:
    text, failed, done = "", False, False
    whole = got.body[: got.body.rfind(b"\n\n") + 2]
    for line in whole.split(b"\n"):
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            done = True
        elif data:
            event = _object(data)
            failed = failed or "error" in event
            text += _text(event)
    if failed or not got.complete:
        return Outcome.BROKEN if right.startswith(text) else Outcome.WRONG
    return Outcome.RIGHT if done and text == right else Outcome.WRONG


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_error(body: bytes) -> bool:
    return bool(_object(body).get("error"))


def _text(answer: dict[str, Any]) -> str:
    return "".join(choice.get("text", "") for choice in answer.get("choices", ()))
