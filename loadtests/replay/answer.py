"""From the bytes of an answer to one request as measured."""

from __future__ import annotations

import re

from msgspec import Struct

from kvroute.loadtests.replay.stream import TokenStream
from kvroute.loadtests.results.measured import Measured
from kvroute.router.errors import Failure
from kvroute.router.meter import Meter
from kvroute.router.upstream import Response

TIMEOUTS = frozenset(
    {Failure.CONNECT_TIMEOUT, Failure.FIRST_BYTE_TIMEOUT, Failure.IDLE_TIMEOUT, Failure.TOTAL_TIMEOUT}
)
WORKER_HEADERS = (b"x-kvroute-worker", b"x-mock-engine")
"""Who answered; the second is passed on by routers that do not say so themselves."""
DECISION_HEADER = b"x-kvroute-decision"
_TERM = re.compile(rb"; (?:queue|load|prefill|handoff)_ms=([0-9]+(?:\.[0-9]+)?)")
"""Of a decision: what makes up the time to the first token."""


class Request(Struct, frozen=True, gc=False):
    """One request, ready to be sent."""

    due_s: float
    """Since the run began."""
    path: str
    body: bytes
    fields: bytes
    """Header lines of its own, each with its line end."""
    prompt_tokens: int
    output_tokens: int
    counts: bool = True
    """Its gaps are measured: it is not of the warm-up."""


def measured(
    request: Request,
    sent_s: float,
    epoch_s: float,
    response: Response,
    failure: str | None,
    stream: TokenStream,
    meter: Meter,
) -> Measured:
    """What became of a request; `sent_s` and `epoch_s` are monotonic.

    `failure` says why there was no whole answer, where that is known already.
    """
    failure = failure or _fault(response, stream, meter)
    usage = meter.usage()
    headers = {name.lower(): value for name, value in response.headers}
    worker = next((headers[name] for name in WORKER_HEADERS if name in headers), b"")
    came = usage.completion_tokens or stream.events
    return Measured(
        arrival_s=request.due_s,
        prompt_tokens=usage.prompt_tokens or request.prompt_tokens,
        output_tokens=request.output_tokens if failure else came,
        worker=worker.decode("latin-1"),
        sent_s=sent_s - epoch_s,
        first_s=None if stream.first_s is None else stream.first_s - epoch_s,
        end_s=None if failure else stream.last_s - epoch_s,
        longest_gap_s=stream.longest_gap_s,
        gpu_tokens=usage.cached_tokens or 0,
        predicted_ttft_s=predicted_ttft_s(headers.get(DECISION_HEADER, b"")),
        failure=failure,
        rejected=response.status == 429,
    )


def predicted_ttft_s(decision: bytes) -> float | None:
    """What a decision header expects of the worker chosen; None where the policy does not price."""
    if b"total_ms=" not in decision:
        return None
    return sum(float(value) for value in _TERM.findall(decision)) / 1e3


def _fault(response: Response, stream: TokenStream, meter: Meter) -> str | None:
    """What is wrong with an answer that came to its end; None for a good one."""
    if response.status != 200:
        return f"http_{response.status}"
    if meter.in_band_error():
        return "stream_error"
    if stream.endless:
        return "no_stream"
    if stream.first_s is None:
        return "no_token"
    return None if stream.done or stream.finished else "cut_short"
