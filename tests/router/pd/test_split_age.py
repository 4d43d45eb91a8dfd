"""A plain answer that comes when the lease of its KV may be over: its tokens tell that it began in time."""

from __future__ import annotations

import asyncio

import pytest

from tests.kit import Client, Engine, Received, Wire, until

from .kit import COMPLETIONS, NEVER_MARKED, completed, prefilled, scripted


@pytest.mark.parametrize(("tokens", "status"), [(100_000, 200), (1, 502)])
async def test_a_long_answer_began_in_time_though_kv_has_expired_since(tokens: int, status: int) -> None:
    late = asyncio.Event()
    usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}

    async def decode(request: Received, wire: Wire) -> None:
        if request.json()["model"] == "m":
            await late.wait()
        await completed(usage=usage)(request, wire)

    async with (
        Engine(prefilled(), metrics="vllm:nixl_num_kv_expired_reqs_total{} 4.0\n") as p,
        Engine(decode) as d,
        scripted([p], [d], policy="mooncake", pd={"kv_lease_s": 0.2}, health=NEVER_MARKED) as server,
    ):
        client = await Client.connect(server.url)
        await client.send(COMPLETIONS, {"model": "m", "prompt": "x"})
        await until(lambda: bool(d.received))
        await asyncio.sleep(0.2)  # 0.8 of the lease, at least
        late.set()
        answer = await client.receive()
        client.close()
        assert answer.status == status
        assert p.received, "it was split"
