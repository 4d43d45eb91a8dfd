"""The official client against the gateway and scripted engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from kvroute.router.server import GatewayServer
from tests.kit import HANG_S, Engine, Received, Wire, gateway

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@contextlib.asynccontextmanager
async def api(server: GatewayServer, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    options = {"max_retries": 0, "timeout": HANG_S, **options}
    async with (
        httpx.AsyncClient(trust_env=False) as http,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", http_client=http, **options) as client,
    ):
        yield client


def replying(body: dict[str, Any], status: int = 200, *headers: str) -> Any:
    async def script(_request: Received, wire: Wire) -> None:
        await wire.answer(status, json.dumps(body).encode(), *headers)

    return script


def streaming(*events: dict[str, Any], done: bool = True) -> Any:
    async def script(_request: Received, wire: Wire) -> None:
        await wire.start_stream()
        for event in events:
            await wire.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        if done:
            await wire.chunk(b"data: [DONE]\n\n")
        await wire.chunk(b"")

    return script


def chat(message: dict[str, Any], finish_reason: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": USAGE,
    }


def delta(fields: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": fields, "finish_reason": finish_reason}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


async def test_chat() -> None:
    script = replying(chat({"content": "Hello"}))
    async with Engine(script=script) as engine, gateway(engine) as server, api(server) as client:
        reply = await client.chat.completions.create(model="m", messages=MESSAGES, extra_body={"top_k": 3})
        assert (reply.choices[0].message.content, reply.usage and reply.usage.total_tokens) == ("Hello", 5)
        assert engine.received[0].json() == {"messages": MESSAGES, "model": "m", "top_k": 3}
        assert engine.received[0].header("authorization") == "Bearer k"


async def test_chat_stream() -> None:
    events = [
        delta({"role": "assistant", "content": ""}),
        delta({"content": "Hé"}),
        delta({"content": "llo"}, "stop"),
    ]
    last = {**delta({}), "choices": [], "usage": USAGE}
    script = streaming(*events, last)
    async with Engine(script=script) as engine, gateway(engine) as server, api(server) as client:
        stream = await client.chat.completions.create(
            model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "Héllo"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2


async def test_tools() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": "é"}'}}
    script = replying(chat({"content": None, "tool_calls": [call]}, "tool_calls"))
    async with Engine(script=script) as engine, gateway(engine) as server, api(server) as client:
        reply = await client.chat.completions.create(model="m", messages=MESSAGES, tools=TOOLS)
        assert reply.choices[0].message.tool_calls is not None
        found = reply.choices[0].message.tool_calls[0]
        assert found.to_dict() == call
        assert engine.received[0].json()["tools"] == TOOLS


async def test_tools_stream() -> None:
    parts = ['{"q"', ': "', "é", '"}']
    events = [
        delta({"tool_calls": [{"index": 0, "id": "t1", "function": {"name": "look_up", "arguments": part}}]})
        for part in parts
    ]
    script = streaming(*events)
    async with Engine(script=script) as engine, gateway(engine) as server, api(server) as client:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, tools=TOOLS, stream=True)
        arguments = ""
        async for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or []:
                arguments += (call.function and call.function.arguments) or ""
        assert json.loads(arguments) == {"q": "é"}


async def test_completions() -> None:
    choice = {"index": 0, "text": "a b", "finish_reason": "length", "logprobs": None}
    body = {
        "id": "c",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": USAGE,
    }
    async with Engine(script=replying(body)) as engine, gateway(engine) as server, api(server) as client:
        reply = await client.completions.create(model="m", prompt="x", max_tokens=2)
        assert reply.choices[0].text == "a b"
        engine.script = streaming(body, body)
        stream = await client.completions.create(model="m", prompt=[1, 2, 3], stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["a b", "a b"]
        assert engine.received[-1].json()["prompt"] == [1, 2, 3]


async def test_embeddings_pass_through() -> None:
    item = {"object": "embedding", "index": 0, "embedding": [0.5, -1.25]}
    body = {"object": "list", "model": "m", "data": [item], "usage": {"prompt_tokens": 1, "total_tokens": 1}}
    async with Engine(script=replying(body)) as engine, gateway(engine) as server, api(server) as client:
        reply = await client.embeddings.create(model="m", input="x", encoding_format="float")
        assert reply.data[0].embedding == [0.5, -1.25]


async def test_models() -> None:
    async with Engine(models=("m", "n")) as engine, gateway(engine) as server, api(server) as client:
        assert [model.id async for model in client.models.list()] == ["m", "n"]


async def test_an_unknown_model_is_not_found() -> None:
    async with Engine() as engine, gateway(engine) as server, api(server) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="nope", messages=MESSAGES)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert caught.value.message.endswith("The model `nope` does not exist. Known models: m")
        assert caught.value.response.headers["x-request-id"] == caught.value.request_id


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (404, openai.NotFoundError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
async def test_what_the_engine_answers_is_what_the_client_raises(
    status: int, error: type[openai.APIStatusError]
) -> None:
    body = {"error": {"message": "as told", "type": "t", "param": None, "code": status}}
    script = replying(body, status, "retry-after: 9")
    async with Engine(script=script) as engine, gateway(engine) as server, api(server) as client:
        with pytest.raises(error, match="as told") as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert caught.value.status_code == status
        assert caught.value.response.headers["retry-after"] == "9"
        with pytest.raises(error, match="as told"):
            await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)


async def test_a_full_gateway_is_a_rate_limit_that_the_client_waits_out() -> None:
    script = replying(chat({"content": "Hello"}))
    async with Engine(script=script) as engine, gateway(engine, limits={"requests_per_worker": 1}) as server:
        (member,) = server.registry.members.values()
        lease = server.registry.charge(member, 0.0)
        async with api(server) as client:
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model="m", messages=MESSAGES)
            assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("overloaded", "1")
        async with api(server, max_retries=1) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
            await asyncio.sleep(0.2)
            lease.release()
            assert (await asking).choices[0].message.content == "Hello"


async def test_a_silent_engine_is_a_timeout_on_either_side() -> None:
    async def silent(_request: Received, wire: Wire) -> None:
        await wire.eof()

    async with (
        Engine(script=silent) as engine,
        gateway(engine, timeouts={"first_byte_s": 0.5}) as server,
        api(server) as client,
    ):
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.2).chat.completions.create(model="m", messages=MESSAGES)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert (caught.value.status_code, caught.value.code) == (504, "first_byte_timeout")


async def test_an_engine_that_dies_in_a_stream_is_an_api_error_and_not_an_end() -> None:
    async def dies(_request: Received, wire: Wire) -> None:
        await wire.start_stream()
        await wire.chunk(b"data: " + json.dumps(delta({"content": "He"})).encode() + b"\n\n")
        await asyncio.sleep(0.05)
        wire.reset()

    async with Engine(script=dies) as engine, gateway(engine) as server, api(server) as client:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        assert (await anext(stream)).choices[0].delta.content == "He"
        with pytest.raises(openai.APIError, match="worker closed the connection") as caught:
            await anext(stream)
        assert caught.value.code == "upstream_died"


async def test_an_error_event_of_the_engine_is_an_api_error() -> None:
    script = streaming(delta({"content": "He"}), {"error": {"message": "KV cache is gone", "code": 500}})
    async with Engine(script=script) as engine, gateway(engine) as server, api(server) as client:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="KV cache is gone"):
            async for _ in stream:
                pass
        assert server.metrics.in_band_errors.value(engine.url) == 1


async def test_no_worker_is_an_internal_server_error_the_client_retries() -> None:
    async with gateway() as server, api(server) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert (caught.value.status_code, caught.value.code) == (503, "no_worker")
