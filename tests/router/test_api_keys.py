"""Whose key goes where: the client's to the worker, the gateway's to nobody."""

from __future__ import annotations

import pytest

from tests.kit import CHAT, Engine, ask
from tests.router.edge import edge


async def test_the_client_s_key_is_forwarded_by_default() -> None:
    async with Engine() as engine, edge(engine) as server:
        assert (await ask(server.url, CHAT, b"{}", "authorization: Bearer k")).status == 200
        assert engine.received[0].header("authorization") == "Bearer k"


@pytest.mark.parametrize("worker_key", [None, "worker-key"])
async def test_the_gateway_s_own_key_is_not_forwarded(worker_key: str | None) -> None:
    async with Engine() as engine:
        workers = [{"url": engine.url, "api_key": worker_key}]
        async with edge(engine, api_key="front-key", workers=workers) as server:
            answer = await ask(server.url, CHAT, b"{}", "Authorization: Bearer front-key")
            assert answer.status == 200
            expected = None if worker_key is None else f"Bearer {worker_key}"
            assert engine.received[0].header("authorization") == expected
            assert all(b"front-key" not in value for _, value in engine.received[0].headers)


@pytest.mark.parametrize("given", [(), ("Authorization: Bearer x",), ("Authorization: front-key",)])
@pytest.mark.parametrize("target", [CHAT, "/anything", "/v1/models"])
async def test_without_the_gateway_s_key_nothing_passes(given: tuple[str, ...], target: str) -> None:
    async with Engine() as engine, edge(engine, api_key="front-key") as server:
        answer = await ask(server.url, target, None, *given, method="GET")
        assert (answer.status, answer.code) == (401, "invalid_api_key")
        assert answer.header("www-authenticate") == "Bearer"
        assert engine.received == []
        assert (await ask(server.url, "/livez", method="GET")).status == 200
