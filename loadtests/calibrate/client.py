"""What calibrating needs of an engine: what it says of itself, and the times of one stream's tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from prometheus_client.parser import text_string_to_metric_families

from kvroute.clock import monotonic
from kvroute.config_groups import Timeouts
from kvroute.endpoint import Endpoint
from kvroute.router.errors import GatewayError, shorten
from kvroute.router.meter import Meter
from kvroute.router.pool import UpstreamPool
from kvroute.router.sweeper import Sweeper
from kvroute.router.upstream import StaleConnection, UpstreamConnection

CONNECT_S, ANSWER_S, REQUEST_S = 5.0, 30.0, 600.0
SAFE_IDS = (16, 250)
"""Token ids that every vocabulary has, and that are seldom special."""
_TOKEN = b'"finish_reason"'
"""Once in every event that carries tokens, and in no other."""


class CalibrateError(ValueError):
    """The engine cannot be measured; the message says why."""


@dataclass(slots=True)
class Stream:
    """One request as it was answered."""

    prompt_tokens: int
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    """When the event of each token arrived."""
    cached_tokens: int = 0
    output_tokens: int = 0
    """As the engine counts them; 0 where it does not."""
    on_token: Callable[[], None] | None = None
    _cut: bytes = b""

    def read(self, data: bytes, now_s: float) -> None:
        """One read of the body."""
        data = self._cut + data
        count = data.count(_TOKEN)
        self.token_s.extend([now_s] * count)
        self._cut = data[1 - len(_TOKEN) :]
        if count and self.on_token is not None:
            self.on_token()

    @property
    def ttft_s(self) -> float:
        """From the request to its first token."""
        return self.token_s[0] - self.sent_s

    @property
    def tokens_per_event(self) -> float:
        """1, unless the engine put several into one."""
        return self.output_tokens / len(self.token_s) if self.output_tokens else 1.0


@dataclass(frozen=True, slots=True)
class About:
    """What an engine says of itself."""

    model: str
    root: str
    """Where its weights came from: a directory of its machine, or a name."""
    max_tokens: int | None
    kv_tokens: int | None
    prompt_tokens: int | None
    """Of all its prompts so far; None where it does not count."""
    engine: str
    version: str


class Engine:
    """One engine behind a URL; requests go the way that the gateway's do."""

    def __init__(self, url: str, api_key: str | None, seed: int | None = None) -> None:
        """CalibrateError for a URL or key that cannot be used."""
        try:
            self.endpoint = Endpoint.parse(url)
        except ValueError as error:
            raise CalibrateError(f"--url: {error}") from None
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise CalibrateError("--api-key: only printable ASCII characters are accepted")
        loop = asyncio.get_running_loop()
        self._timeouts = Timeouts(connect_s=CONNECT_S, first_byte_s=REQUEST_S, idle_s=REQUEST_S)
        self._pool = UpstreamPool(self.endpoint, self._timeouts, Sweeper(loop), loop)
        self._key = b"" if api_key is None else b"Authorization: Bearer %b\r\n" % api_key.encode()
        self._random = random.Random(seed)
        self.model = ""
        self.sent_tokens = 0
        """Of all prompts that were sent."""

    def close(self) -> None:
        """Cut what is still open."""
        self._pool.close()

    async def about(self, model: str | None) -> About:
        """Ask; the `model` named, or the first that is no adapter. CalibrateError says what is wrong."""
        card = self._card(await self._models(), model)
        self.model = str(card["id"])
        limit = card.get("max_model_len")
        metrics = await self.metrics()
        return About(
            self.model,
            str(card.get("root") or ""),
            limit if isinstance(limit, int) and limit > 0 else None,
            metrics.kv_tokens,
            metrics.prompt_tokens,
            metrics.engine,
            await self._version(),
        )

    async def metrics(self) -> EngineMetrics:
        """Of now; empty where there are none."""
        status, body = await self._get("/metrics")
        return read_metrics(body.decode(errors="replace") if status == 200 else "")

    async def stream(
        self, prompt_tokens: int, output_tokens: int, on_token: Callable[[Stream], None] | None = None
    ) -> Stream:
        """A prompt that no cache has seen, answered in full. CalibrateError when it is not."""
        low, high = SAFE_IDS
        body = {
            "model": self.model,
            "prompt": self._random.choices(range(low, high), k=prompt_tokens),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.sent_tokens += prompt_tokens
        stream = Stream(prompt_tokens)
        if on_token is not None:
            stream.on_token = partial(on_token, stream)
        meter = Meter(None)

        def read(data: bytes, now_s: float) -> None:
            meter.feed(data, now_s)
            stream.read(data, now_s)

        status, stream.sent_s = await self._exchange(
            b"POST", "/v1/completions", orjson.dumps(body), REQUEST_S, read
        )
        if status != 200:
            self._refuse("POST /v1/completions", status, meter.tail())
        if not stream.token_s:
            said = shorten(meter.tail().decode(errors="replace"), 200)
            raise CalibrateError(f"{self.endpoint.url}: no token of /v1/completions is understood: {said}")
        usage = meter.usage()
        stream.cached_tokens = usage.cached_tokens or 0
        stream.output_tokens = usage.completion_tokens or 0
        return stream

    # --- parts ---------------------------------------------------------------------------------

    async def _models(self) -> list[dict[str, Any]]:
        status, body = await self._get("/v1/models")
        if status != 200:
            self._refuse("GET /v1/models", status, body)
        try:
            cards = orjson.loads(body)["data"]
            if all(isinstance(card["id"], str) for card in cards) and cards:
                return list(cards)
        except (ValueError, KeyError, TypeError):
            pass
        raise CalibrateError(f"{self.endpoint.url} is no engine: GET /v1/models lists no models")

    @staticmethod
    def _card(cards: list[dict[str, Any]], model: str | None) -> dict[str, Any]:
        if model is None:
            return next((card for card in cards if not card.get("parent")), cards[0])
        card = next((card for card in cards if card["id"] == model), None)
        if card is None:
            served = ", ".join(shorten(card["id"]) for card in cards[:20])
            raise CalibrateError(f"--model: {model!r} is not served; served: {served}")
        return card

    async def _version(self) -> str:
        status, body = await self._get("/version")
        try:
            version = orjson.loads(body)["version"] if status == 200 else None
        except (ValueError, KeyError, TypeError):
            version = None
        return version if isinstance(version, str) else "unknown"

    def _refuse(self, what: str, status: int, body: bytes) -> None:
        url = self.endpoint.url
        if status in (401, 403):
            raise CalibrateError(f"{url}: {what} answered {status}; --api-key with a valid key is expected")
        if what.startswith("GET"):
            raise CalibrateError(f"{url} is no engine: {what} answered {status}")
        said = shorten(body.decode(errors="replace"), 300)
        raise CalibrateError(f"{url}: {what} answered {status}: {said}")

    async def _get(self, path: str) -> tuple[int, bytes]:
        pieces: list[bytes] = []
        status, _ = await self._exchange(b"GET", path, b"", ANSWER_S, lambda data, _: pieces.append(data))
        return status, b"".join(pieces)

    async def _exchange(
        self, method: bytes, path: str, body: bytes, limit_s: float, read: Callable[[bytes, float], None]
    ) -> tuple[int, float]:
        """Status, and when the request was sent. CalibrateError when the response broke off."""
        endpoint = self.endpoint
        head = b"%b %b%b HTTP/1.1\r\nHost: %b\r\nAccept: */*\r\n%b" % (
            method,
            endpoint.base_path.encode(),
            path.encode(),
            endpoint.authority.encode(),
            self._key,
        )
        if body:
            head += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
        try:
            connection = self._pool.take_idle()
            if connection is not None:
                try:
                    return await self._ask(connection, head + b"\r\n", body, limit_s, read)
                except StaleConnection:
                    pass  # it had closed: once more on a fresh one
            return await self._ask(await self._pool.connect(), head + b"\r\n", body, limit_s, read)
        except GatewayError as error:
            raise CalibrateError(f"{endpoint.url}: {path}: {error.message}") from None

    async def _ask(
        self,
        connection: UpstreamConnection,
        head: bytes,
        body: bytes,
        limit_s: float,
        read: Callable[[bytes, float], None],
    ) -> tuple[int, float]:
        try:
            sent_s = monotonic()
            response = await connection.send(head, body, False, self._timeouts, sent_s + limit_s)
            read(connection.take_body(), monotonic())
            await connection.stream_to(read)
            return response.status, sent_s
        finally:
            connection.finish()


@dataclass(slots=True)
class EngineMetrics:
    """Whose they are, tokens of KV cache (of one rank), and of all prompts so far; None is not told."""

    engine: str = "openai"
    kv_tokens: int | None = None
    prompt_tokens: int | None = None


def read_metrics(text: str) -> EngineMetrics:
    """By the names of vLLM and SGLang; of what cannot be read, nothing is known."""
    found = EngineMetrics()
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        return found
    for sample in samples:
        prefix, _, name = sample.name.partition(":")
        if prefix not in ("vllm", "sglang"):
            continue
        found.engine = prefix
        if name == "cache_config_info":
            found.kv_tokens = found.kv_tokens or _kv_tokens(sample.labels)
        elif name == "max_total_num_tokens":
            found.kv_tokens = found.kv_tokens or int(sample.value)
        elif name == "prompt_tokens_total":
            found.prompt_tokens = (found.prompt_tokens or 0) + int(sample.value)
    return found


def _kv_tokens(labels: dict[str, str]) -> int | None:
    """vLLM 0.32 says it outright; older ones by blocks."""
    outright = labels.get("kv_cache_size_tokens", "")
    if outright.isdigit():
        return int(outright)
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else None


def local_config(root: str) -> Path | None:
    """The config.json beside the weights, where the engine's directory is on this machine."""
    path = Path(root) / "config.json"
    return path if root.startswith("/") and path.is_file() else None
