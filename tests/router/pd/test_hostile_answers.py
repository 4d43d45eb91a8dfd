"""What no prefill engine should answer, and what no client should ask: each ends well, and leaves nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from kvroute.router.knowledge import NO_PROMPT
from kvroute.router.request_view import parse_request
from tests.kit import Client, Engine, Received, Script, Wire, ask, until
from tests.router.pd.kit import COMPLETIONS, HANDED, bench, completed, right, scripted

BODY = {"model": "m", "prompt": "x", "max_tokens": 5}
USABLE = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_host": "h"}


def handing(params: bytes) -> bytes:
    return b'{"choices":[{"text":"a","finish_reason":"length"}],"kv_transfer_params":%b}' % params


def odd(**params: Any) -> bytes:
    return handing(json.dumps({**HANDED, **params}).encode())


def nested(depth: int) -> bytes:
    """The parser takes it."""
    inside = b"[" * depth + b"]" * depth
    return handing(json.dumps({**HANDED, "x": 0}).encode()[:-2] + inside + b"}")


USELESS: dict[str, bytes] = {
    "nothing": b"",
    "a stream": b'data: {"id":"x"}\n\ndata: [DONE]\n\n',
    "a list": b"[]",
    "null": b"null",
    "a number": b"1",
    "no UTF-8": b'{"choices":[{"text":"\xff"}],"kv_transfer_params":%b}' % json.dumps(HANDED).encode(),
    "compressed": gzip.compress(odd()),
    "params null": handing(b"null"),
    "params list": handing(b"[1,2]"),
    "params text": handing(b'"x"'),
    "params empty": handing(b"{}"),
    "NaN": handing(json.dumps(USABLE).encode()[:-1] + b',"remote_port":NaN}'),
    "a number of 400 digits": handing(
        json.dumps(USABLE).encode()[:-1] + b',"remote_port":%b}' % (b"9" * 400)
    ),
    "a lone surrogate": handing(b'{"do_remote_prefill":true,"remote_engine_id":"\\ud800"}'),
    "blocks as text": odd(remote_block_ids="abc"),
    "blocks as an object": odd(remote_block_ids={"a": 1}),
    "a list of hosts": odd(remote_host=["h"]),
    "a number for an engine": odd(remote_engine_id=5),
    "a port in a list": odd(remote_port=[5600]),
    "nested too deeply to be read": nested(10**5),
    "nested too deeply to be written": nested(1000),
    "17 MB": odd(x="y" * 17 * 2**20),
    "an error": b'{"error":{"message":"no"},"kv_transfer_params":%b}' % json.dumps(HANDED).encode(),
}


def answering(body: bytes) -> Script:
    async def script(_request: Received, wire: Wire) -> None:
        await wire.answer(200, body)

    return script


@pytest.mark.parametrize("what", USELESS)
async def test_what_hands_nothing_over_that_can_be_used_leaves_all_to_decode(what: str) -> None:
    async with (
        Engine(answering(USELESS[what])) as p,
        Engine(completed()) as d,
        scripted([p], [d]) as server,
    ):
        answer = await ask(server.url, COMPLETIONS, BODY)
        assert (answer.status, answer.json()["choices"][0]["text"]) == (200, "done")
        asked = [each.json() for each in d.received if each.json()["model"] == "m"]
        assert asked == [BODY]
        await until(lambda: len(server._pd.releaser) == 0)
        assert all(one.requests == 0 for one in server.registry.members.values())
        retries = server._pd.books.pd_metrics.retries
        assert retries.value("prefill", "no_handoff") + retries.value("prefill", "bad_upstream_response") == 1


@pytest.mark.parametrize(
    "params",
    [
        {"remote_port": "5600"},
        {"remote_block_ids": list(range(10**5))},
        {"x": "y" * 2**20},
        {"x": [[[[{"a": None}]]]]},
    ],
)
async def test_what_can_be_used_goes_on_as_it_is(params: dict[str, Any]) -> None:
    async with Engine(answering(odd(**params))) as p, Engine(completed()) as d, scripted([p], [d]) as server:
        assert (await ask(server.url, COMPLETIONS, BODY)).status == 200
        assert [each.json() for each in d.received] == [{**BODY, "kv_transfer_params": {**HANDED, **params}}]


@pytest.mark.parametrize("cached", [-7, 10**30, "many", [1], None])
async def test_a_count_of_cached_tokens_that_is_none_changes_nothing(cached: Any) -> None:
    usage = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": cached}}
    own = {"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}}
    body = json.dumps({"choices": [], "usage": usage, "kv_transfer_params": HANDED}).encode()
    async with Engine(answering(body)) as p, Engine(completed(**own)) as d, scripted([p], [d]) as server:
        answer = await ask(server.url, COMPLETIONS, BODY)
        assert answer.json()["usage"] == own["usage"]


PLAIN = b'{"model":"mock","prompt":[1,2,3]'
ODD_BODIES: dict[bytes, tuple[int, bool]] = {
    b',"max_tokens":3,"stream":true,"stream":false}': (200, False),
    b',"max_tokens":3,"stream":false,"stream":true}': (200, True),
    b',"max_tokens":3,"\\u0073tream":true}': (200, True),
    b',"max_tokens":3,"stream":true,"\\u0073tream":false}': (200, False),
    b',"max_tokens":3,"stream":null}': (200, False),
    b',"max_tokens":3,"stream":{}}': (400, False),
    b',"max_tokens":0}': (400, False),
    b',"max_tokens":-1}': (400, False),
    b',"max_tokens":null}': (200, False),
    b',"max_tokens":"x"}': (400, False),
    b',"max_tokens":1e999}': (400, False),
    b',"max_tokens":9,"max_token\\u0073":3}': (200, False),
    b',"max_tokens":3,"max_completion_tokens":0}': (200, False),
    b',"max_tokens":3,"stream_options":7}': (400, False),
    b',"max_tokens":3,"stream_options":{"include_usage":true}}': (400, False),
    b',"max_tokens":3,"stream":true,"stream_options":null}': (200, True),
    b',"max_tokens":3,"n":"1"}': (400, False),
    b',"max_tokens":3,"n":null}': (200, False),
    b',"max_tokens":3,"n":2,"n":1}': (200, False),
    b',"max_tokens":3,"user":' + b"[" * 900 + b"]" * 900 + b"}": (200, False),
    b',"max_tokens":3,"user":' + b"[" * 10**5 + b"]" * 10**5 + b"}": (400, False),
    b',"max_tokens":3,"user":"' + b"x" * 2**20 + b'"}': (200, False),
    b',"max_tokens":3,' + b",".join(b'"k%d":0' % i for i in range(10**4)) + b"}": (200, False),
    b',"max_tokens":3,"prompt":[]}': (400, False),
    b',"max_tokens":3,"prompt":[1,"a"]}': (400, False),
    b',"max_tokens":3} trailing': (400, False),
}


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "sglang"])
async def test_odd_bodies_end_in_what_an_engine_makes_of_them_and_leave_nothing(connector: str) -> None:
    async with bench(connector) as one:
        for rest, (status, streams) in ODD_BODIES.items():
            if connector == "sglang" and b'"n":"1"' not in rest and b'"n"' in rest:
                continue
            answer = await ask(one.server.url, COMPLETIONS, PLAIN + rest)
            assert (answer.status, answer.complete) == (status, True), (rest[:60], answer.body)
            assert answer.body.startswith(b"data: ") == streams, rest[:60]
            await one.idle()
            assert all(member.requests == 0 for member in one.server.registry.members.values())


@pytest.mark.parametrize(
    "framing", ["Transfer-Encoding: chunked\r\n\r\n400\r\n", "Content-Length: 400\r\n\r\n"]
)
async def test_a_body_whose_end_never_comes_reaches_no_engine(framing: str) -> None:
    async with bench() as one:
        client = await Client.connect(one.server.url)
        client.writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: g\r\n{framing}".encode() + PLAIN)
        client.writer.write_eof()
        assert await client.reader.read() == b""
        client.close()
        assert right(await one.ask())
        assert [engine.journal.totals["received"] for engine in one.fleet.engines] == [1, 1]


async def test_a_client_that_leaves_as_it_is_placed_leaves_no_load_at_either_worker() -> None:
    """It had waited for its choice, which came in the same turn of the loop."""
    async with bench("p2p-nccl", policy="ttft") as one:
        waiting, members = one.server.waiting, one.server.registry.members.values()
        parsed = parse_request(COMPLETIONS.encode(), {}, json.dumps(BODY | {"model": "mock"}).encode(), None)
        task = asyncio.create_task(waiting.choose(parsed, NO_PROMPT, "id"))
        await asyncio.sleep(0)  # it waits; its placing is due next
        asyncio.get_running_loop().call_soon(lambda: seen.append([member.requests for member in members]))
        asyncio.get_running_loop().call_soon(task.cancel)
        seen: list[list[int]] = []
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == [[1, 1]]
        assert [member.requests for member in members] == [0, 0]
