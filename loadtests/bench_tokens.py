"""`kvroute bench tokens`: what exact keys cost per request, from its body to who holds its prefix.

A body is read as the gateway reads it, a long one on a thread. CPU of the whole process, since the tokenizer
may use threads of its own. Texts are made before anything is timed; fresh ones hold words that no text before
them had.
"""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from statistics import median
from typing import Any

import orjson

from kvroute.conductor.block_index import GPU, make_block_index
from kvroute.conductor.tokens.exact import ExactTokenizer
from kvroute.conductor.tokens.outcome import TokenizedPrompts, Unavailable
from kvroute.conductor.tokens.registry import TokenizerOptions, Tokenizers, load_checked
from kvroute.conductor.tokens.yielding import let_others_run
from kvroute.router.gateway import READERS
from kvroute.router.parsed_request import PARSE_IN_THREAD_BYTES, TokenIds
from kvroute.router.request_view import parse_request
from kvroute.types import PromptKeys

SEED = 1
CHAT = b"/v1/chat/completions"
JSON = {b"content-type": b"application/json"}
MODEL = "model"
STAGES = ("parse", "render_and_tokenise", "hash", "look_up")
SIZES_BYTES = (2_000, 20_000, 100_000, 500_000)
TURNS = 30
CHAT_BYTES = 100_000
LONG_BYTES = 1_000_000
MESSAGE_BYTES = 1_700
NOVEL_WORDS = 0.05
"""Share of words made up on the spot: names, numbers and typing errors of real text."""
BLOCK_TOKENS = 16
WORKERS = 16
HOLDERS = 4
TICK_S = 0.0005


@dataclass(frozen=True, slots=True)
class TokensBench:
    """`tokenizer` is a model's directory or tokenizer.json; `rounds` requests are measured of each kind."""

    tokenizer: Path
    chat_template: Path | None = None
    rounds: int = 25

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, not {self.rounds}")


class _Texts:
    """English of Python's own documentation, with words that nobody has seen."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._words = " ".join(topics[name] for name in sorted(topics)).split(" ")

    def text(self, size: int) -> str:
        words: list[str] = []
        length = 0
        while length < size:
            word = self._random.choice(self._words)
            if self._random.random() < NOVEL_WORDS:
                word = "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=9))
            words.append(word)
            length += len(word) + 1
        return " ".join(words)[:size]

    def messages(self, size: int, message_size: int = MESSAGE_BYTES) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        count = max(1, size // message_size)
        return [{"role": roles[i % 2], "content": self.text(size // count)} for i in range(count)]


class _Source:
    """The `TokenSource` of one model, which notes the CPU spent before and after each answer."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers
        self.asked_s = self.answered_s = 0.0

    def __call__(
        self, model: str | None, path: bytes, fields: Mapping[str, Any]
    ) -> TokenIds | Unavailable | None:
        self.asked_s = time.process_time()
        made = self._tokenizers.now(MODEL, path, fields)
        self.answered_s = time.process_time()
        return TokenIds(made.prompts, MODEL) if isinstance(made, TokenizedPrompts) else made


class _Path:
    """What a gateway does with one request, each stage timed."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._source = _Source(tokenizers)
        self.readers = ThreadPoolExecutor(READERS, "read")
        self._index = make_block_index()
        self._slots = [self._index.open() for _ in range(WORKERS)]

    def cost_ms(self, body: bytes) -> list[float]:
        """CPU of parsing, rendering and tokenising, hashing, looking up."""
        start_s = time.process_time()
        in_thread = len(body) > PARSE_IN_THREAD_BYTES
        keys = self.readers.submit(self.read, body).result() if in_thread else self.read(body)
        marks = [start_s, self._source.asked_s, self._source.answered_s, time.process_time()]
        packed = array("Q", keys.keys).tobytes()
        self._index.match(packed)
        marks.append(time.process_time())
        for slot in self._slots[:HOLDERS]:
            self._index.store(slot, GPU, None, packed, packed)
        return [(after - before) * 1e3 for before, after in pairwise(marks)]

    def read(self, body: bytes) -> PromptKeys:
        """As the gateway reads a body, on this thread. ValueError where its keys are not made of tokens."""
        parsed = parse_request(CHAT, JSON, body, self._source)
        if parsed.no_tokens is not None:
            raise ValueError(f"the tokenizer makes no ids of a plain chat: {parsed.no_tokens}")
        let_others_run()
        (sets,), _ = parsed.prompt_keys(0, (BLOCK_TOKENS,))
        return sets[BLOCK_TOKENS]


def run_bench_tokens(bench: TokensBench) -> dict[str, Any]:
    """Load the tokenizer as a gateway does, run, and give the figures as one JSON object.

    load_s, encoder, and in ms of CPU: fresh (one row per size), chat (the turns of one that grows to 100 KB)
    and loop_hold: how late, at worst, the event loop's timers are while a reader's thread works on 1 MB.
    `work` is how much of the thread's own CPU went into that wait: on a machine with a free core, all of it.
    `idle` is the machine's noise, in as much time.
    """
    options = TokenizerOptions("local", bench.tokenizer, bench.chat_template)
    start_s = time.perf_counter()
    exact = asyncio.run(load_checked(options))
    load_s = time.perf_counter() - start_s
    texts, path = _Texts(Random(SEED)), _Path(asyncio.run(_loaded(options, exact)))
    with path.readers:
        path.cost_ms(orjson.dumps({"messages": texts.messages(CHAT_BYTES)}))  # what is built on first use
        gc.collect()
        return {
            "tokenizer": str(bench.tokenizer),
            "encoder": exact.encoder.name,
            "load_s": load_s,
            "fresh": [_fresh(path, texts, size, bench.rounds) for size in SIZES_BYTES],
            "chat": _chat(path, texts, max(1, bench.rounds // 5)),
            "loop_hold": asyncio.run(_loop_hold(path, texts, bench.rounds)),
        }


async def _loaded(options: TokenizerOptions, exact: ExactTokenizer) -> Tokenizers:
    async def load(_: TokenizerOptions) -> ExactTokenizer:
        return exact

    tokenizers = Tokenizers({MODEL: options}, load=load)
    await tokenizers.run()
    return tokenizers


def _fresh(path: _Path, texts: _Texts, size: int, rounds: int) -> dict[str, Any]:
    bodies = [orjson.dumps({"model": MODEL, "messages": texts.messages(size)}) for _ in range(rounds)]
    return {"bytes": size, **_row([path.cost_ms(body) for body in bodies])}


def _chat(path: _Path, texts: _Texts, rounds: int) -> dict[str, Any]:
    """Each turn sends all before it and a new message; half of a turn's growth is the answer to the last."""
    turns: list[list[list[float]]] = [[] for _ in range(TURNS)]
    for _ in range(rounds):
        for turn, body in enumerate(_bodies(texts)):
            turns[turn].append(path.cost_ms(body))
    last = _row(turns[-1])
    means = [median(sum(costs) for costs in turn) for turn in turns]
    return {"turns": TURNS, "bytes": CHAT_BYTES, "turn_mean_ms": sum(means) / TURNS, "last": last}


def _bodies(texts: _Texts) -> Iterator[bytes]:
    messages = texts.messages(CHAT_BYTES, CHAT_BYTES // (2 * TURNS))
    for turn in range(TURNS):
        yield orjson.dumps({"model": MODEL, "messages": messages[: 2 * turn + 1]})


def _row(costs: Sequence[Sequence[float]]) -> dict[str, Any]:
    ordered = sorted(costs, key=sum)
    totals = [sum(cost) for cost in ordered]
    stages = {f"{name}_ms": median(cost[i] for cost in costs) for i, name in enumerate(STAGES)}
    return {"p50_ms": median(totals), "min_ms": totals[0], "max_ms": totals[-1], **stages}


async def _loop_hold(path: _Path, texts: _Texts, rounds: int) -> list[dict[str, Any]]:
    loop = asyncio.get_running_loop()
    rows = []
    for message_size in (LONG_BYTES, 2_000, 200):
        bodies = [
            orjson.dumps({"model": MODEL, "messages": texts.messages(LONG_BYTES, message_size)})
            for _ in range(rounds)
        ]
        gc.collect()
        busy = [await _waits(loop.run_in_executor(path.readers, path.read, body)) for body in bodies]
        taken_s = median(wait.taken_s for wait in busy)
        idle = [await _waits(asyncio.sleep(taken_s)) for _ in bodies]
        rows.append(
            {
                "messages": max(1, LONG_BYTES // message_size),
                "taken_ms": taken_s * 1e3,
                **_quantiles([wait.late_ms for wait in busy]),
                "work": _quantiles([wait.work_ms for wait in busy]),
                "idle": _quantiles([wait.late_ms for wait in idle]),
            }
        )
    return rows


@dataclass(slots=True)
class _Wait:
    late_ms: float = 0.0
    work_ms: float = 0.0
    taken_s: float = 0.0


async def _waits(work: Awaitable[Any]) -> _Wait:
    """The longest waits of this loop's timers while `work` is awaited."""
    wait = _Wait()

    async def tick() -> None:
        while True:
            start_s, others_s = time.perf_counter(), _cpu_of_others_s()
            await asyncio.sleep(TICK_S)
            others_ms = (_cpu_of_others_s() - others_s - TICK_S) * 1e3
            wait.late_ms = max(wait.late_ms, (time.perf_counter() - start_s - TICK_S) * 1e3)
            wait.work_ms = max(wait.work_ms, others_ms)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    start_s = time.perf_counter()
    await work
    wait.taken_s = time.perf_counter() - start_s
    await asyncio.sleep(2 * TICK_S)
    ticking.cancel()
    return wait


def _cpu_of_others_s() -> float:
    """Of this process's threads other than this one."""
    return time.process_time() - time.thread_time()


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50_ms": median(ordered),
        "p90_ms": ordered[int(0.9 * (len(ordered) - 1))],
        "max_ms": ordered[-1],
    }


def show_bench_tokens(result: dict[str, Any]) -> str:
    """The figures as a table of text."""
    lines = [
        f"{result['tokenizer']}: {result['encoder']}, loaded and checked in {result['load_s']:.1f} s",
        "",
    ]
    lines.append("CPU ms per request    p50    min    max   parse  render+tokenise  hash  look up")
    chat = {"bytes": f"turn {result['chat']['turns']}", **result["chat"]["last"]}
    for row in [*result["fresh"], chat]:
        name = row["bytes"] if isinstance(row["bytes"], str) else f"{row['bytes'] / 1000:g} KB fresh"
        totals = "".join(f"{row[key]:7.2f}" for key in ("p50_ms", "min_ms", "max_ms"))
        stages = "  ".join(f"{row[f'{stage}_ms']:.3f}" for stage in STAGES)
        lines.append(f"{name:<18}{totals}   {stages}")
    mean = result["chat"]["turn_mean_ms"]
    lines += [f"mean of the {TURNS} turns of a chat that grows to 100 KB: {mean:.2f}", ""]
    lines.append("1 MB on a thread: longest wait of the loop's timers, p50/p90/max ms")
    for row in result["loop_hold"]:
        late, work, idle = (
            "/".join(f"{at[key]:.2f}" for key in ("p50_ms", "p90_ms", "max_ms"))
            for at in (row, row["work"], row["idle"])
        )
        lines.append(
            f"{row['messages']:>5} messages, {row['taken_ms']:.1f} ms: {late}; for work {work}; idle {idle}"
        )
    return "\n".join(lines)
