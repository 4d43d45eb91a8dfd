"""A split request on scripted engines: what each leg is told, byte for byte; who is asked after a failure."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvroute.router.errors import Failure, GatewayError
from kvroute.router.server import GatewayServer
from kvroute.router.workers import Member
from tests.kit import CHAT, Client, Engine, Received, Script, Wire, ask, until
from tests.router.edge import raw
from tests.router.pd.kit import COMPLETIONS, HANDED, NEVER_MARKED, completed, prefilled, scripted

BODY = b'{"model":"m", "prompt":"h\\u00e9llo", "odd": {"z":1,"a":[1.0]},"max_tokens":7,"temperature":0.10}'
ASKED = (
    b'{"model":"m","prompt":"h\\u00e9llo","odd":{"z":1,"a":[1.0]},"max_tokens":1,"temperature":0.10,'
    b'"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,'
    b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}'
)


def squeezed(raw: bytes) -> bytes:
    """Without the blanks between tokens that this file's bodies have."""
    return raw.replace(b", ", b",").replace(b": ", b":")


def reset() -> Script:
    return raw(b"", close=True)


def metric(expired: int) -> str:
    return f"# TYPE x counter\nvllm:nixl_num_kv_expired_reqs_total{{}} {expired}.0\n"


def member_of(server: GatewayServer, engine: Engine) -> Member:
    return next(one for one in server.registry.members.values() if one.endpoint.url == engine.url)


def params(request: Received) -> Any:
    return request.json().get("kv_transfer_params")


def releases(engine: Engine) -> list[Received]:
    return [one for one in engine.received if one.json()["model"] == "kvroute-release"]


async def test_both_legs_have_the_client_s_request_byte_for_byte_but_for_their_own_fields() -> None:
    async with (
        Engine(prefilled()) as p,
        Engine(completed()) as d,
        scripted([p], [d]) as server,
    ):
        answer = await ask(server.url, COMPLETIONS, BODY, "X-Request-Id: mine", "X-Other: kept")
        assert (answer.status, answer.json()["choices"][0]["text"]) == (200, "done")
        (first,), (second,) = p.received, d.received
        assert squeezed(first.body) == ASKED
        own = json.dumps(HANDED, separators=(",", ":")).encode()
        assert squeezed(second.body) == squeezed(BODY)[:-1] + b',"kv_transfer_params":' + own + b"}"
        for leg in (first, second):
            assert leg.target == COMPLETIONS
            assert leg.header("content-length") == str(len(leg.body))
            assert leg.header("x-other") == "kept"
        assert first.header("x-request-id") == second.header("x-request-id")
        assert first.header(
            "x-request-id",
        ).startswith("mine-")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        (CHAT, {"messages": [], "max_completion_tokens": 9}, {"max_completion_tokens": 1, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [1, 2]}, {"max_tokens": 1}),
        ("/v1/messages", {"messages": [], "max_tokens": 4}, {"max_tokens": 1}),
        ("/v1/responses", {"input": "x"}, {"max_output_tokens": 1, "store": False}),
    ],
)
async def test_every_route_of_generation_is_split_and_prefill_is_asked_for_one_token(
    path: str, body: dict[str, Any], limit: dict[str, Any]
) -> None:
    more = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 3}
    async with Engine(prefilled()) as p, Engine(completed()) as d, scripted([p], [d]) as server:
        assert (await ask(server.url, path, {**body, **more})).status == 200
        asked, whole = p.received[0].json(), d.received[0].json()
        asked.pop("kv_transfer_params")
        assert asked == {**body, "model": "m", "stream": False, **limit}
        assert whole == {**body, **more, "kv_transfer_params": HANDED}


async def test_the_client_reads_its_own_id_and_prefill_s_count_of_cached_tokens_at_the_right_length() -> None:
    def usage(cached: int) -> dict[str, Any]:
        return {"usage": {"prompt_tokens": 900, "prompt_tokens_details": {"cached_tokens": cached}}}

    async def decode(request: Received, wire: Wire) -> None:
        body = json.dumps({"choices": [], **usage(900)}).encode()
        await wire.answer(200, body, f"X-Request-Id: {request.header('x-request-id')}")

    async with Engine(prefilled(**usage(8))) as p, Engine(decode) as d, scripted([p], [d]) as server:
        client = await Client.connect(server.url)
        for _ in range(2):  # on one connection: a wrong length would spoil the second
            answer = await client.ask(COMPLETIONS, BODY, "X-Request-Id: mine")
            assert answer.header("x-request-id") == "mine"
            assert answer.header("content-length") == str(len(answer.body))
            assert answer.body == json.dumps({"choices": [], **usage(8)}).encode()
        client.close()


async def test_kv_goes_to_another_decode_worker_where_the_first_never_heard_of_it() -> None:
    async with (
        Engine(prefilled()) as p,
        Engine(completed()) as one,
        Engine(completed()) as two,
        scripted([p], [one, two], health=NEVER_MARKED) as server,
    ):
        await one.stop()
        for _ in range(2):
            assert (await ask(server.url, COMPLETIONS, BODY)).status == 200
        assert len(p.received) == len(two.received) == 2
        assert all(params(each) == HANDED for each in two.received)
        ids = [each.header("x-request-id") for each in p.received]
        assert ids == [each.header("x-request-id") for each in two.received]
        assert server.metrics.retries.value("connect_refused") >= 1
        assert server._pd.books.pd_metrics.retries.value("decode", "connect_refused") >= 1


@pytest.mark.parametrize("fault", ["reset", "status", "died"])
async def test_kv_that_a_decode_worker_may_have_fetched_is_never_sent_again(fault: str) -> None:
    scripts: dict[str, Script] = {
        "reset": reset(),
        "status": raw(b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\n{}"),
        "died": raw(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", close=True),
    }
    handed: list[str] = []

    async def prefill(request: Received, wire: Wire) -> None:
        own = {**HANDED, "remote_request_id": str(len(p.received))}
        await prefilled(kv_transfer_params=own, usage={"prompt_tokens_details": {"cached_tokens": 0}})(
            request, wire
        )

    async def decode(request: Received, wire: Wire) -> None:
        if request.json()["model"] != "m":
            await wire.answer(404, b"{}")
            return
        handed.append(params(request)["remote_request_id"])
        await (scripts[fault] if len(handed) == 1 else completed())(request, wire)

    async with (
        Engine(prefill) as p,
        Engine(decode) as one,
        Engine(decode) as two,
        scripted([p], [one, two]) as server,
    ):
        answer = await ask(server.url, COMPLETIONS, BODY)
        assert answer.status == 200
        assert handed == ["1", "2"]
        assert [squeezed(each.body) for each in p.received] == [ASKED, ASKED]
        ids = [each.header("x-request-id") for each in p.received]
        assert len(set(ids)) == 2
        if fault != "died":  # that had begun to answer, so that it has fetched
            await until(lambda: len(releases(one)) + len(releases(two)) >= 1)
        for each in (*releases(one), *releases(two)):
            assert params(each)["remote_request_id"] == "1"
            assert each.json()["prompt"]


async def test_a_kept_connection_on_which_a_decode_worker_dies_is_no_reason_to_send_its_kv_again() -> None:
    """That it had closed before is one cause. That it died over the request looks the same."""

    async def decode(request: Received, wire: Wire) -> None:
        if len(p.received) == 2:
            wire.close()  # after the request was read
        else:
            await completed()(request, wire)

    async with (
        Engine(prefilled()) as p,
        Engine(decode, keeps_probes=False) as d,
        scripted([p], [d], health=NEVER_MARKED) as server,
    ):
        assert (await ask(server.url, COMPLETIONS, BODY)).status == 200
        assert (await ask(server.url, COMPLETIONS, BODY)).status == 200
        asked = [each for each in d.received if params(each) and each not in releases(d)]
        assert len(asked) == len(p.received) == 3
        assert asked[0].connection == asked[1].connection
        assert len({each.header("x-request-id") for each in asked}) == 3


@pytest.mark.parametrize("attempts", [1, 3])
async def test_kv_is_let_go_where_no_other_attempt_is_made(attempts: int) -> None:
    """The decode worker refuses the connection, and there is no retry or no other one."""
    async with (
        Engine(prefilled()) as p,
        Engine(completed()) as one,
        Engine(completed()) as two,
        scripted([p], [one, two], health=NEVER_MARKED, retry={"attempts": attempts}) as server,
    ):
        await one.stop()
        if attempts > 1:
            two.script = reset()
        statuses = [(await ask(server.url, COMPLETIONS, BODY)).status for _ in range(2)]
        assert 502 in statuses
        two.script = completed()
        await until(lambda: len(releases(two)) >= 1)
        assert params(releases(two)[0]) == HANDED


@pytest.mark.parametrize("answer", ["refusal", "nothing handed over", "nothing at all"])
async def test_the_decode_worker_does_all_where_prefill_will_not(answer: str) -> None:
    scripts: dict[str, Script] = {
        "refusal": raw(b'HTTP/1.1 422 X\r\ncontent-length: 12\r\n\r\n{"detail":1}'),
        "nothing handed over": prefilled(kv_transfer_params=None),
        "nothing at all": prefilled(kv_transfer_params={"do_remote_prefill": True}),
    }
    async with (
        Engine(scripts[answer]) as p,
        Engine(scripts[answer]) as q,
        Engine(completed()) as d,
        scripted([p, q], [d], retry={"budget_ratio": 0.0, "budget_burst": 0}) as server,
    ):
        assert (await ask(server.url, COMPLETIONS, BODY)).status == 200
        assert len(p.received) + len(q.received) == 1  # another would say the same
        assert [each.body for each in d.received] == [BODY]
        assert params(d.received[0]) is None


async def test_who_asks_for_something_wrong_reads_what_the_worker_says_of_it() -> None:
    """Where nobody but a prefill worker can be asked: P2pNccl's decode workers take nothing whole."""
    said = b'{"error":{"message":"too long","code":400}}'
    async with (
        Engine(raw(b"HTTP/1.1 400 X\r\ncontent-length: %d\r\n\r\n" % len(said) + said)) as p,
        Engine(completed()) as d,
    ):
        workers = [
            {"url": p.url, "role": "prefill", "p2p_address": "127.0.0.1:1"},
            {"url": d.url, "role": "decode", "p2p_address": "127.0.0.1:2"},
        ]
        async with scripted([p], [d], "p2p-nccl", workers=workers) as server:
            answer = await ask(server.url, COMPLETIONS, BODY)
            assert (answer.status, answer.body) == (400, said)
            assert d.received == []


async def test_an_answer_later_than_the_lease_is_not_used_once_prefill_has_let_kv_go() -> None:
    late = asyncio.Event()

    async def decode(request: Received, wire: Wire) -> None:
        if request.json()["model"] == "m":
            await late.wait()
        await completed("wrong")(request, wire)

    async with (
        Engine(prefilled(), metrics=metric(3)) as p,
        Engine(decode) as d,
        scripted([p], [d], pd={"kv_lease_s": 0.2}) as server,
    ):
        await until(lambda: member_of(server, p).kv_expired == 3)
        for expired, status in ((3, 200), (4, 502)):
            late.clear()
            client = await Client.connect(server.url)
            await client.send(COMPLETIONS, BODY)
            await until(lambda: any(params(each) for each in d.received if each.json()["model"] == "m"))
            await asyncio.sleep(0.2)  # 0.8 of the lease, at least
            p.metrics = metric(expired)
            late.set()
            answer = await client.receive()
            client.close()
            d.received.clear()
            assert answer.status == status
        assert answer.code == "handoff_expired"
        assert b"wrong" not in answer.body
        assert server._pd.books.pd_metrics.expired.value("answer") == 1


async def test_kv_that_is_nearly_too_old_is_not_sent() -> None:
    async with (
        Engine(prefilled()) as p,
        Engine(completed()) as d,
        scripted([p], [d], pd={"kv_lease_s": 0.1}, health=NEVER_MARKED) as server,
    ):
        pool = member_of(server, d).pool
        connect = pool.connect
        slow = [True]

        async def connect_slowly() -> Any:
            if slow.pop() if slow else False:
                await asyncio.sleep(0.1)  # 0.8 of the lease is over
            return await connect()

        pool.connect = connect_slowly  # type: ignore[method-assign]
        pool.take_idle = lambda: None  # type: ignore[method-assign]
        assert (await ask(server.url, COMPLETIONS, BODY)).status == 200
        assert server._pd.books.pd_metrics.expired.value("handoff") >= 1
        asked = [each for each in d.received if each.json()["model"] == "m"]
        assert len(asked) == 1
        assert len(p.received) >= 2
        assert asked[0].header("x-request-id") == p.received[-1].header("x-request-id")


async def test_a_decode_worker_that_takes_long_to_reach_ends_no_concurrent_request() -> None:
    """Prefill is over by then: its KV goes to the other decode worker."""
    async with Engine() as p, Engine(completed()) as one, Engine(completed()) as two:

        async def prefill(request: Received, wire: Wire) -> None:
            await wire.answer(200, b'{"choices":[{"finish_reason":"length"}]}')

        async def bootstrap(request: Received, wire: Wire) -> None:
            if request.target == "/query":
                await wire.answer(200, b'{"0":{"engine_id":"e","worker_addr":{}}}')
            else:
                await prefill(request, wire)

        p.script = bootstrap
        workers = [{"url": p.url, "role": "prefill", "bootstrap_port": p.port}]
        workers += [{"url": each.url, "role": "decode"} for each in (one, two)]
        async with scripted([p], [one, two], "mooncake", workers=workers) as server:
            for each in (one, two):
                pool = member_of(server, each).pool
                pool.take_idle = lambda: None  # type: ignore[method-assign]
            pool = member_of(server, one).pool

            async def never() -> Any:
                await until(lambda: bool(p.received) and p.received[-1].target != "/query")
                await asyncio.sleep(0.05)
                raise GatewayError(Failure.CONNECT_TIMEOUT, "it did not answer")

            pool.connect = never  # type: ignore[method-assign]
            for _ in range(2):
                assert (await ask(server.url, COMPLETIONS, BODY)).status == 200
            assert len([each for each in p.received if each.target != "/query"]) == 2
            assert len({params(each)["transfer_id"] for each in two.received}) == 2
