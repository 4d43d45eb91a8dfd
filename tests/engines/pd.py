"""A prefill and a decode engine that hand KV over, the gateway in front of them, and what tests ask of them.

Both engines run one request at a time, so that a single long one keeps all others in the queue: that is how a
test holds a request in the state it wants.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from .fleet import (
    CALL_LIMIT_S,
    MODEL,
    START_LIMIT_S,
    Server,
    engine_command,
    eventually,
    free_port,
    gateway_environment,
    started,
    vllm_environment,
)

BLOCK_TOKENS = 32
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PREFILL, DECODE = "prefill", "decode"
PATIENCE_S = 60.0
"""In each engine a thread of NIXL's spins, so that on a small machine everything takes its time."""
WORDS = "the quick brown fox jumps over a lazy dog and runs from seven small hungry wolves again".split()

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Transfer:
    """How KV goes from one engine to the other."""

    connector: str
    """As the gateway names it."""
    prefill: Mapping[str, Any]
    decode: Mapping[str, Any]
    """vLLM's kv-transfer-config of each engine."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """More environment of the gateway."""


def nixl(lease_s: int, **settings: str) -> Transfer:
    """Prefill keeps unfetched KV this long; the gateway is told so."""
    lease = {"kv_lease_duration": lease_s}
    common = {"kv_connector": "NixlConnector", "kv_connector_extra_config": lease}
    return Transfer(
        "nixl",
        {**common, "kv_role": "kv_producer"},
        {**common, "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"},
        {"KVROUTE_PD__KV_LEASE_S": str(lease_s), **settings},
    )


def shared_storage(directory: Path) -> Transfer:
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }
    return Transfer("shared-storage", config, config)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got. `text` is what was generated, `finished` that the end came as it should."""

    status: int
    text: str
    finished: bool
    body: str
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        """Those of /v1/messages are told apart by what the cache had to do with them."""
        names = ("prompt_tokens", "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        return sum(self.usage.get(name) or 0 for name in names)


class Rig:
    """The two engines and the gateway, each of which can be ended and started again at its port."""

    def __init__(self, python: Path, model: Path, run: Path, name: str, transfer: Transfer) -> None:
        self.python, self.model, self.run, self.name, self.transfer = python, model, run, name, transfer
        self.http = httpx.Client(timeout=2 * CALL_LIMIT_S)
        self._engines: dict[str, Server] = {}
        self._lives: dict[str, ExitStack] = {}
        self._channels = {PREFILL: free_port(), DECODE: free_port()}

    @property
    def prefill(self) -> Server:
        return self._engines[PREFILL]

    @property
    def decode(self) -> Server:
        return self._engines[DECODE]

    def start(self) -> None:
        for role in (PREFILL, DECODE):
            self._launch(role, free_port())
        for role in (PREFILL, DECODE):
            self._wait_for(role)
        port = free_port()
        command = [sys.executable, "-m", "kvroute", "serve", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--policy", "round_robin", "--pd-connector", self.transfer.connector]
        command += ["--prefill", self.prefill.url, "--decode", self.decode.url]
        env = {**gateway_environment(), **self.transfer.settings}
        life = self._lives["gateway"] = ExitStack()
        self.gateway = life.enter_context(started(f"{self.name}-gateway", port, command, env, self.run))
        self.gateway.wait_for("/readyz", 30)
        # Ready with one usable worker, as it is; here both are wanted.
        ready = f"{self.gateway.url}/readyz"
        assert settled(lambda: self.http.get(ready).json()["workers"].get("ready") == 2)

    def close(self) -> None:
        self.http.close()
        for life in reversed(self._lives.values()):
            life.close()

    def restart(self, role: str) -> None:
        """Another process at the same ports; the gateway finds it in its own time.

        To be called in the main thread: an engine is killed when the thread that started it ends.
        """
        port = self._engines[role].port
        self._lives[role].close()
        self._launch(role, port)
        self._wait_for(role)

    def _wait_for(self, role: str) -> None:
        """vLLM 0.32 binds what runs the engine to the last core, and in each engine a thread of NIXL's spins:
        there one of them would stand still for long while the other works. So each has its half of the cores.
        """
        engine = self._engines[role]
        engine.wait_for("/health", START_LIMIT_S)
        cores = sorted(os.sched_getaffinity(0))
        if half := len(cores) // 2:
            engine.run_on(set(cores[:half] if role == PREFILL else cores[half:]))

    def _launch(self, role: str, port: int) -> None:
        config = self.transfer.prefill if role == PREFILL else self.transfer.decode
        command = [
            *engine_command(self.python, self.model, port),
            *("--max-num-seqs", "1", "--kv-transfer-config", json.dumps(config)),
        ]
        env = {
            **vllm_environment(),
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._channels[role]),
        }
        life = self._lives[role] = ExitStack()
        self._engines[role] = life.enter_context(started(f"{self.name}-{role}", port, command, env, self.run))

    def ask(self, path: str, body: Body) -> Answer:
        """Through the gateway; an answer that breaks off is one that is not finished."""
        return ask(self.http, self.gateway.url + path, body)

    @contextmanager
    def busy(self, engine: Server) -> Iterator[None]:
        """An endless request straight to the engine takes its only seat for as long as this lasts."""
        body = {**completion([3, 4, 5, 6], 8000), "ignore_eos": True, "stream": True}
        with self.http.stream("POST", engine.url + COMPLETIONS, json=body) as response:
            chunks = response.iter_raw()  # kept: a generator that is collected closes the connection
            assert b"data: " in next(chunks)
            yield

    def send(self, path: str, body: Body) -> asyncio.Task[Answer]:
        """As `ask`, while the test goes on; a client that has been cancelled has left."""
        return asyncio.create_task(ask_async(self.gateway.url + path, body))

    def overwrite_prefill(self) -> None:
        """Enough other prompts for the prefill engine to use every free block again."""
        for _ in range(2):
            prompt = [random.randrange(300, 2000) for _ in range(8000)]
            answer = self.http.post(self.prefill.url + COMPLETIONS, json=completion(prompt, 1))
            assert answer.status_code == 200, answer.text

    def is_handed_over(self) -> bool:
        """A request waits at the decode engine, and its KV at the other."""
        return waiting(self.decode) == 1 and self.held() > 0

    def held(self) -> float:
        """Share of the prefill engine's KV room that requests have, ones that wait to be fetched included."""
        return self.prefill.metric("vllm:kv_cache_usage_perc")

    def expired(self) -> float:
        """Prompts whose KV was never fetched, until its lease was over."""
        return self.prefill.metric("vllm:nixl_num_kv_expired_reqs_total")

    def untold(self) -> float:
        """Handoffs that were given up and of which the prefill engine could not be told."""
        text = self.http.get(f"{self.gateway.url}/metrics").text
        untold = r'^kvroute_pd_releases_total\{result="(?!released")[^"]*"\} (\S+)$'
        return sum(map(float, re.findall(untold, text, re.MULTILINE)))

    async def reach(self, task: asyncio.Task[Answer], state: Callable[[], bool]) -> None:
        """Until the request is in that state; else AssertionError, with what the gateway counted."""
        is_there = await settles(lambda: task.done() or state())
        if is_there and not task.done():
            return
        text = self.http.get(f"{self.gateway.url}/metrics").text
        counted = re.findall(
            r"^kvroute_(?:pd|retries|upstream|breaker|fallbacks)\w*\{.* [1-9].*$", text, re.M
        )
        counted = [line for line in counted if "_bucket{" not in line]
        answer = repr(task.result())[:500] if task.done() else str(task)
        raise AssertionError("\n".join([answer, *counted]))

    async def sent(self, path: str, body: Body, state: Callable[[], bool]) -> asyncio.Task[Answer]:
        """A request that is in that state. An engine that stands still by itself may keep one from it: then
        it is sent once more.
        """
        task = self.send(path, body)
        with suppress(AssertionError):
            await self.reach(task, state)
            return task
        await leave(task)
        task = self.send(path, body)
        await self.reach(task, state)
        return task

    def moved_tokens(self) -> float:
        """Prompt tokens that the decode engine has from the other."""
        return self.decode.metric("vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"')


def waiting(engine: Server) -> int:
    return int(engine.metric("vllm:num_requests_waiting"))


def idle(engine: Server) -> bool:
    return engine.running_requests() == waiting(engine) == 0


def settled(check: Callable[[], bool], limit_s: float = PATIENCE_S) -> bool:
    return eventually(check, limit_s) is not None


async def settles(check: Callable[[], bool], limit_s: float = PATIENCE_S) -> bool:
    return await asyncio.to_thread(settled, check, limit_s)


async def leave(task: asyncio.Task[Answer]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def tokens(rng: random.Random, count: int = 300) -> list[int]:
    return [rng.randrange(300, 2000) for _ in range(count)]


def completion(prompt: Any, max_tokens: int) -> Body:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}


def request(path: str, rng: random.Random, max_tokens: int = 24) -> Body:
    """With a prompt of several blocks that no engine has seen."""
    if path == COMPLETIONS:
        return completion(tokens(rng), max_tokens)
    words = " ".join(rng.choice(WORDS) for _ in range(150))
    if path == RESPONSES:
        return {"model": MODEL, "input": words, "max_output_tokens": max_tokens, "temperature": 0}
    messages = [{"role": "user", "content": words}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0}


def ask(http: httpx.Client, url: str, body: Body) -> Answer:
    raw = b""
    with http.stream("POST", url, json=body) as response:
        try:
            for chunk in response.iter_raw():
                raw += chunk
        except httpx.RemoteProtocolError:
            return read(response, raw, broken=True)
    return read(response, raw)


async def ask_async(url: str, body: Body) -> Answer:
    raw = b""
    async with (
        httpx.AsyncClient(timeout=2 * CALL_LIMIT_S) as http,
        http.stream("POST", url, json=body) as response,
    ):
        try:
            async for chunk in response.aiter_raw():
                raw += chunk
        except httpx.RemoteProtocolError:
            return read(response, raw, broken=True)
    return read(response, raw)


def read(response: httpx.Response, raw: bytes, broken: bool = False) -> Answer:
    """Of a chat or completion stream, or of any route's whole answer."""
    body = raw.decode(errors="replace")
    status = response.status_code
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        text = "".join(generated(event) for event in events)
        return Answer(status, text, not broken and lines[-1:] == ["[DONE]"], body)
    if broken or status != 200:
        return Answer(status, "", False, body)
    whole = json.loads(body)
    return Answer(status, generated(whole), True, body, whole["usage"])


def generated(answer: Mapping[str, Any]) -> str:
    """The text of a whole answer or of one event of a stream."""
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item.get("content") or ())
    if "choices" not in answer:
        return "".join(part["text"] for part in answer.get("content") or ())
    texts = []
    for choice in answer["choices"]:
        message = choice.get("message") or choice.get("delta") or choice
        texts.append(message.get("text") or message.get("content") or "")
    return "|".join(texts) if len(texts) > 1 else "".join(texts)
