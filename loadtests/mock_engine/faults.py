"""How an engine misbehaves on purpose: set at start, at run time, or by one request's header.

Events are counted in generated tokens: event i of a stream is the one that carries token i, from 1. The
opening events travel with the first, the closing ones (usage, [DONE]) with the last; a fault "at n" of n
events comes after the last token and before the closing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

FAULT_HEADER = b"x-mock-fault"


class FaultError(ValueError):
    """A fault setting that is unknown or of the wrong kind; the message names what is known."""


@dataclass(slots=True)
class Faults:
    """The defaults are an engine that behaves. Fields may be assigned at any time."""

    # Pace.
    ttft: float = 0.0
    """Seconds before the response head."""
    gap: float = 0.0
    """Seconds between events; a plain answer waits for all of them."""
    n: int = 0
    """Events (tokens) to generate, whatever the request asked for; 0 leaves it alone."""

    # Endings.
    die_before: bool = False
    """Reset the connection in place of the head."""
    die_at: int | None = None
    """Reset after event i; 0 is after the head. A plain answer is cut within its body."""
    close_at: int | None = None
    """As `die_at`, with an orderly close and no end of body."""
    hang: bool = False
    """Accept the request and never answer."""
    hang_at: int | None = None
    """Send i events, then nothing."""
    corrupt_at: int | None = None
    """A malformed chunk size after event i, then a close."""
    error_event_at: int | None = None
    """An in-band error event after event i, then [DONE]."""
    error_body: bool = False
    """Status 200 with an error object as the body."""
    status: int = 0
    """Answer with this status and an error object; 0 is off."""
    retry_after: float | None = None
    """Seconds, in a Retry-After header of `status`."""
    no_content: bool = False
    """Status 204, no body."""

    garbage_body: bool = False
    """Status 200 with bytes that are no JSON and no event, after all tokens were generated."""

    # Shape of the bytes.
    split: bool = False
    """One byte per chunk."""
    join: bool = False
    """The whole response in one write, all events in one chunk."""
    crlf: bool = False
    """Events end in CR LF."""
    gzip: bool = False
    """Content-Encoding: gzip, whatever the client accepts."""
    unicode: bool = False
    """Characters of several bytes as output."""
    no_length: bool = False
    """Neither length nor chunks: the body ends when the connection does."""
    close: bool = False
    """Connection: close on every response."""
    flood_bytes: int = 0
    """After the head, this many bytes without a blank line in place of the tokens."""

    # KV events; shares are of batches, drawn from the engine's seed.
    event_drop: float = 0.0
    """Share never sent; a replay has them."""
    event_duplicate: float = 0.0
    """Share sent twice."""
    event_reorder: float = 0.0
    """Share sent after the batch that follows."""
    event_malformed: float = 0.0
    """Share sent with bytes changed, cut or missing; a replay has them whole."""
    event_delay: float = 0.0
    """Seconds that each batch waits before it is sent."""
    event_arrays: bool = False
    """Positional arrays in place of maps, as older engines send."""
    event_digests: bool = False
    """Hashes of 32 bytes in place of integers."""
    event_pages: bool = False
    """An event for each block, as SGLang sends for its pages."""
    no_replay: bool = False
    """Requests for a replay stay without an answer."""

    # Pulls from a peer.
    pull_delay: float = 0.0
    """Seconds that a pull takes beyond its time."""
    pull_fail: bool = False
    """500 for a request that pulls."""

    # Prefill and decode.
    handoff_delay: float = 0.0
    """Seconds that the KV of a prompt takes beyond its time, from this engine or to it."""
    no_handoff: bool = False
    """A prefill answer without `kv_transfer_params`; the KV is kept all the same."""

    # The engine around it.
    cached_tokens: int | None = None
    """Report this many cached tokens, whatever is true."""
    api_key: str = ""
    """401 unless the request bears this key."""
    slow_health: float = 0.0
    """Seconds /health takes."""
    fail_health: bool | list[bool] = False
    """503 on /health; a list is a pattern, repeated."""
    slow_metrics: float = 0.0
    """Seconds /metrics takes."""
    fail_metrics: bool = False
    """500 on /metrics."""
    slow_models: float = 0.0
    """Seconds /v1/models takes."""
    fail_models: bool = False
    """503 on /v1/models."""
    close_idle: float | None = None
    """Seconds after which an idle connection is closed; None is the engine's own setting."""
    times: int | None = None
    """Generation requests these faults still apply to; None is all of them."""

    @property
    def misbehaves(self) -> bool:
        """True when the request is not even understood."""
        return bool(self.hang or self.die_before or self.status or self.no_content or self.error_body)

    @property
    def scripted(self) -> bool:
        """True when events must be written one at a time."""
        return bool(
            self.gap
            or self.flood_bytes
            or self.die_at is not None
            or self.close_at is not None
            or self.hang_at is not None
            or self.corrupt_at is not None
            or self.error_event_at is not None
        )

    def merged(self, settings: Mapping[str, Any]) -> Faults:
        """A copy with some settings changed; `FaultError` on an unknown name or a wrong value."""
        return replace(self, **{name: _converted(name, value) for name, value in settings.items()})

    def set(self, settings: Mapping[str, Any]) -> None:
        """`merged`, in place and all or nothing."""
        changed = self.merged(settings)
        for name in settings:
            setattr(self, name, getattr(changed, name))

    def as_dict(self) -> dict[str, Any]:
        """Only what differs from an engine that behaves."""
        return {name: value for name, value in asdict(self).items() if value != getattr(CLEAN, name)}


CLEAN = Faults()
_KINDS: dict[str, str] = {field.name: str(field.type) for field in fields(Faults)}


def parse_header(value: str) -> dict[str, str]:
    """`ttft=3,gap=0.1,die_at=2` to its settings; a bare name means 1."""
    settings: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in value.split(","))):
        name, _, given = part.partition("=")
        settings[name.strip()] = given.strip() or "1"
    return settings


def _converted(name: str, value: Any) -> Any:
    kind = _KINDS.get(name)
    if kind is None:
        raise FaultError(f"unknown fault {name!r}; known: {', '.join(_KINDS)}")
    try:
        return _as_kind(kind, value)
    except (TypeError, ValueError) as error:
        raise FaultError(f"fault {name}={value!r}: expected {kind}") from error


def _as_kind(kind: str, value: Any) -> Any:
    if value is None or value == "none":
        if "None" in kind:
            return None
        raise ValueError(value)
    if kind.startswith("bool"):
        if "list" in kind and (isinstance(value, list) or "-" in str(value)):
            pattern = value if isinstance(value, list) else str(value).split("-")
            return [_as_bool(item) for item in pattern]
        return _as_bool(value)
    if kind.startswith("str"):
        return str(value)
    number = float(value)
    if number < 0:
        raise ValueError(value)
    return number if kind.startswith("float") else int(number)


def _as_bool(value: Any) -> bool:
    known = {"1": True, "true": True, "0": False, "false": False}
    if isinstance(value, (bool, int, str)) and (key := str(value).lower()) in known:
        return known[key]
    raise ValueError(value)
