"""The bootstrap servers of prefill workers: where they are, and which engine serves which rank."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx
import msgspec
from msgspec import Struct

from kvroute.config_pd import PdConfig
from kvroute.endpoint import http_origin
from kvroute.router.pd.connector import CannotHandOver
from kvroute.router.workers import Member

MAX_ANSWER_BYTES = 2**20


class _Engine(Struct, frozen=True):
    engine_id: str


_decode = msgspec.json.Decoder(dict[int, _Engine]).decode
Engines = Mapping[int, str]
"""The engine id of each data-parallel rank; never empty."""


def bootstrap_port(member: Member, config: PdConfig) -> int:
    """Of a prefill worker: its own configured one, else what the engine has told, else the fleet's."""
    told = None if member.transfer is None else member.transfer.bootstrap_port
    return member.config.bootstrap_port or told or config.bootstrap_port


def bootstrap_url(member: Member, config: PdConfig) -> str:
    """Of a prefill worker; its host is that of its HTTP server."""
    return http_origin(member.endpoint.host, bootstrap_port(member, config))


class EngineIds:
    """What vLLM's Mooncake bootstrap servers answer to /query, asked once for each prefill worker.

    A failure is not kept: the next request asks again. Two requests never ask the same worker at a time.
    """

    def __init__(self, config: PdConfig) -> None:
        self._config = config
        self._known: dict[Member, Engines] = {}
        self._asking: dict[Member, asyncio.Task[Engines | CannotHandOver]] = {}

    async def of(self, member: Member) -> Engines:
        """Raises `CannotHandOver` when the worker does not say."""
        known = self._known.get(member)
        if known is not None:
            return known
        task = self._asking.get(member)
        if task is None:
            task = self._asking[member] = asyncio.create_task(self._learn(member))
        found = await asyncio.shield(task)  # others wait for the same answer
        if isinstance(found, CannotHandOver):
            raise found
        return found

    def known(self, member: Member) -> Engines:
        """As `of`, without asking."""
        try:
            return self._known[member]
        except KeyError:
            raise CannotHandOver(f"{member.worker.id} was replaced before its request was sent") from None

    def forget(self, member: Member) -> None:
        """An answer that is still under way is not believed either."""
        self._known.pop(member, None)
        self._asking.pop(member, None)

    async def _learn(self, member: Member) -> Engines | CannotHandOver:
        url = bootstrap_url(member, self._config) + "/query"
        found: Engines | CannotHandOver
        try:
            found = await _query(url, self._config.prepare_timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            found = CannotHandOver(f"{url} did not answer: {type(error).__name__}: {error}")
        except (msgspec.MsgspecError, ValueError) as error:
            found = CannotHandOver(f"{url} has no engine ids: {error}")
        if self._asking.get(member) is not asyncio.current_task():
            return CannotHandOver(f"{member.worker.id} was replaced while {url} was asked")
        del self._asking[member]
        if not isinstance(found, CannotHandOver):
            self._known[member] = found
        return found


async def _query(url: str, timeout_s: float) -> Engines:
    """Raises httpx.HTTPError, TimeoutError, MsgspecError, and ValueError for what cannot be an answer."""
    body = b""
    async with (
        asyncio.timeout(timeout_s),
        httpx.AsyncClient(timeout=timeout_s, trust_env=False, verify=False) as client,
        client.stream("GET", url) as response,
    ):
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise ValueError(f"more than {MAX_ANSWER_BYTES} bytes")
    if response.status_code != 200:
        raise ValueError(f"status {response.status_code}")
    engines = {rank: engine.engine_id for rank, engine in _decode(body).items() if engine.engine_id}
    if not engines:
        raise ValueError("no rank has registered")
    return engines
