"""Which requests an engine is sent, and what their times say.

Prefill: prompts of growing length, one at a time, each asked for one token. Its time is that of one step and
of everything around it. The step alone shows in a stream that decodes meanwhile: its longest gap. The
difference is the overhead. Decode: many streams at once, counted while all of them decode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from kvroute.loadtests.calibrate.client import About, CalibrateError, Engine, Stream

SHORTEST, BESIDE = 16, 512
"""Tokens of the shortest prompt, and of the longest that any engine prefills in one step."""
MIN_ROOM = 256
BACKGROUND = 1024
"""Tokens of the stream that decodes beside it: more than it takes."""
ROOM = 0.7
"""Share of the KV cache, or of the model's length, that is used at most."""
MIN_STEPS = 8
"""With all streams decoding; fewer say nothing of a step."""
CHUNK_TOKENS = 2048
"""Prompt tokens that a step takes at least, of a long queue."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    longest: int
    repeats: int
    concurrency: tuple[int, ...]
    long_concurrency: tuple[int, ...]
    long_prompt: int
    steps: int
    longest_ttft_s: float
    """Prompts no longer than the first that takes so long, overhead included."""


FULL = Effort(32_768, 5, (1, 2, 4, 8, 16, 32, 64), (4, 16, 32), 8192, 48, 10.0)
QUICK = Effort(8192, 3, (1, 4, 16, 48), (4, 16), 4096, 24, 2.0)


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One step, while so many streams attend to so many tokens in all."""

    sequences: int
    context_tokens: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class Samples:
    """All that was measured. Times in milliseconds."""

    overhead_ms: float
    prefill: tuple[tuple[int, float], ...]
    """(tokens, time without the overhead)"""
    decode: tuple[DecodePoint, ...]
    notes: tuple[str, ...]


async def measure(
    engine: Engine, about: About, kv_tokens: int, effort: Effort, progress: Callable[[str], None]
) -> Samples:
    """Everything, prefill first. CalibrateError when an answer says what makes the rest worthless."""
    room = int(min(ROOM * kv_tokens, about.max_tokens or kv_tokens))
    if room < MIN_ROOM:
        raise CalibrateError(f"{engine.endpoint.url}: has room for {room} tokens; {MIN_ROOM} are needed")
    await engine.stream(SHORTEST, 4)
    await engine.stream(min(BESIDE, room // 2), 4)  # first times compile and capture
    ttft_ms = await _prefills(engine, min(effort.longest, room - 1), effort, progress)
    beside = max(n for n in ttft_ms if n <= min(BESIDE, room // 4))
    progress(f"a prompt of {beside} tokens beside a decode")
    step_ms = median(
        [await _step_beside_ms(engine, beside, room // 2) for _ in range(2 * effort.repeats - 1)]
    )
    overhead_ms = max(0.0, median(ttft_ms[beside]) - step_ms)
    overhead_ms = min(overhead_ms, 0.95 * min(min(times) for times in ttft_ms.values()))
    prefill = tuple((n, time - overhead_ms) for n, times in ttft_ms.items() for time in times)
    decode, notes = await _decodes(engine, room, kv_tokens, effort, ttft_ms, progress)
    return Samples(overhead_ms, prefill, tuple(decode), tuple(notes))


async def _prefills(
    engine: Engine, longest: int, effort: Effort, progress: Callable[[str], None]
) -> dict[int, list[float]]:
    """Times to first token in milliseconds, by prompt length."""
    lengths = [SHORTEST, *(2**power for power in range(6, longest.bit_length() + 1) if 2**power < longest)]
    if longest > 1.5 * lengths[-1] or len(lengths) < 4:
        lengths.append(longest)
    ttft_ms: dict[int, list[float]] = {}
    for repeat in range(effort.repeats):
        for n in lengths if repeat == 0 else list(ttft_ms):
            progress(f"prefill of {n} tokens, {repeat + 1} of {effort.repeats}")
            stream = await engine.stream(n, 1)
            if stream.cached_tokens:
                raise CalibrateError(
                    f"{engine.endpoint.url}: {stream.cached_tokens} of {n} random tokens were cached; "
                    f"an engine that computes its prompts is expected"
                )
            ttft_ms.setdefault(n, []).append(stream.ttft_s * 1e3)
            if stream.ttft_s > effort.longest_ttft_s and repeat == 0:
                break
    return ttft_ms


async def _step_beside_ms(engine: Engine, prompt_tokens: int, room: int) -> float:
    """The step that prefills a prompt, as a stream beside it sees it: its longest gap meanwhile."""
    moved = asyncio.Event()
    beside = Stream(SHORTEST)

    def on_token(stream: Stream) -> None:
        nonlocal beside
        beside = stream
        moved.set()

    background = asyncio.create_task(engine.stream(SHORTEST, min(BACKGROUND, room - SHORTEST), on_token))
    try:
        while len(beside.token_s) < 4:
            await _next_token(moved, background)
        prompt = await engine.stream(prompt_tokens, 1)
        await _next_token(moved, background)
    finally:
        background.cancel()
        with suppress(asyncio.CancelledError, CalibrateError):
            await background
    before = [time_s for time_s in beside.token_s if time_s < prompt.sent_s]
    meanwhile = [time_s for time_s in beside.token_s if time_s >= prompt.sent_s]
    return max(later - sooner for sooner, later in pairwise(before[-1:] + meanwhile)) * 1e3


async def _next_token(moved: asyncio.Event, background: asyncio.Task[Stream]) -> None:
    moved.clear()
    waiting = asyncio.create_task(moved.wait())
    try:
        await asyncio.wait({background, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if background.done():
        background.result()  # raises what went wrong
        raise CalibrateError("a stream ended before a short prompt beside it was answered")


async def _decodes(
    engine: Engine,
    room: int,
    kv_tokens: int,
    effort: Effort,
    ttft_ms: dict[int, list[float]],
    progress: Callable[[str], None],
) -> tuple[list[DecodePoint], list[str]]:
    """Short contexts at growing concurrency, then long ones; what does not fit or run at once is left out."""
    points: list[DecodePoint] = []
    notes: list[str] = []
    plan = [(b, SHORTEST) for b in effort.concurrency]
    for b in effort.long_concurrency:
        fits = [n for n in ttft_ms if n <= effort.long_prompt and _fits(b, n, room, kv_tokens, effort)]
        quick = [n for n in fits if b * median(ttft_ms[n]) < effort.longest_ttft_s * 1e3]
        if quick and max(quick) > 4 * SHORTEST:
            plan.append((b, max(quick)))
    at_once = max(effort.concurrency)
    for b, n in plan:
        if b > at_once or not _fits(b, n, room, kv_tokens, effort):
            notes.append(
                f"{b} streams of {n} tokens were left out: more than the engine holds or runs at once"
            )
            continue
        progress(f"{b} streams of {n} tokens decode")
        streams = await asyncio.gather(*(engine.stream(n, _output(b, n, effort)) for _ in range(b)))
        point = decode_point(streams)
        if point is None:
            at_once = b - 1
            notes.append(f"{b} streams of {n} tokens were left out: they never decoded all at once")
        else:
            points.append(point)
    return points, notes


def _output(sequences: int, prompt_tokens: int, effort: Effort) -> int:
    """Long enough for the first to decode until the last is prefilled, and some steps more."""
    return effort.steps + MIN_STEPS + sequences * prompt_tokens // CHUNK_TOKENS


def _fits(sequences: int, prompt_tokens: int, room: int, kv_tokens: int, effort: Effort) -> bool:
    tokens = prompt_tokens + _output(sequences, prompt_tokens, effort)
    return tokens <= room and sequences * tokens <= ROOM * kv_tokens


def decode_point(streams: list[Stream]) -> DecodePoint | None:
    """The mean step while all of them decoded; None when there were hardly such steps, or all of a stream's
    were read at once.
    """
    begin_s = max(stream.token_s[0] for stream in streams)
    end_s = min(stream.token_s[-1] for stream in streams)
    steps_s: list[float] = []
    context_tokens = 0.0
    for stream in streams:
        inside = [i for i, time_s in enumerate(stream.token_s) if begin_s <= time_s <= end_s]
        gaps = (len(inside) - 1) * stream.tokens_per_event
        span_s = stream.token_s[inside[-1]] - stream.token_s[inside[0]] if inside else 0.0
        if gaps < MIN_STEPS or span_s <= 0:
            return None
        steps_s.append(span_s / gaps)
        middle = (inside[0] + inside[-1]) / 2 * stream.tokens_per_event
        context_tokens += stream.prompt_tokens + middle
    return DecodePoint(len(streams), context_tokens, median(steps_s) * 1e3)
