"""The mock engine's HTTP API, over real sockets and as a real client sees it."""

from __future__ import annotations

import base64
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
from openai import AsyncOpenAI

from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from tests.kit import HANG_S

HELLO = [{"role": "user", "content": "Tell me something about prefix caches, at some length please."}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"city": {}}}}}


@pytest.fixture
async def fleet() -> AsyncIterator[MockFleet]:
    async with MockFleet(MockOptions(engines=2, speed=math.inf, max_model_len_tokens=2000)) as fleet:
        yield fleet


@pytest.fixture
async def client(fleet: MockFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fleet.urls[0], verify=False, timeout=HANG_S) as client:
        yield client


def events(text: str) -> list[Any]:
    """The data of a stream's events, [DONE] as it is."""
    datas = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [data if data == "[DONE]" else orjson.loads(data) for data in datas]


async def test_a_chat_as_the_openai_client_sees_it(fleet: MockFleet) -> None:
    async with AsyncOpenAI(base_url=fleet.urls[0] + "/v1", api_key="none", max_retries=0) as openai:
        whole = await openai.chat.completions.create(model="mock", messages=HELLO, max_tokens=5)  # type: ignore[call-overload]
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 5
        stream = await openai.chat.completions.create(  # type: ignore[call-overload]
            model="mock",
            messages=HELLO,
            max_completion_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 5 + ["length"]
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 16


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_long_stream_says_what_the_plain_answer_says(client: httpx.AsyncClient, path: str) -> None:
    body = {"messages": HELLO, "prompt": "x", "max_tokens": 1900}
    whole = (await client.post(path, json=body)).json()["choices"][0]
    streamed = events((await client.post(path, json={**body, "stream": True})).text)[:-1]
    deltas = [event["choices"][0] for event in streamed]
    texts = [delta.get("text") or delta.get("delta", {}).get("content", "") for delta in deltas]
    assert "".join(texts) == (whole.get("text") or whole["message"]["content"])
    assert sum(map(bool, texts)) == 1900
    assert deltas[-1]["finish_reason"] == "length"


async def test_an_answer_ends_by_itself_when_allowed_to(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/chat/completions", json={"messages": HELLO})
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    assert reply.json()["usage"]["completion_tokens"] == 32


async def test_a_conversation_hits_its_own_prompt_and_answer(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "word " * 100}]
    first = (await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 40})).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    second = (await client.post("/v1/chat/completions", json={"messages": messages})).json()
    before = first["usage"]["total_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == before // 16 * 16


async def test_every_engine_gives_the_same_answer_and_keeps_its_own_keys(fleet: MockFleet) -> None:
    texts, keys = set(), []
    for url, engine in zip(fleet.urls, fleet.engines, strict=True):
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            reply = await client.post("/v1/completions", json={"prompt": "x" * 400})
        texts.add(reply.json()["choices"][0]["text"])
        keys.append(set(engine.scheduler.cache.keys()))
    assert len(texts) == 1
    assert keys[0]
    assert not keys[0] & keys[1]


@pytest.mark.parametrize("prompt", ["abcd" * 20, ["abcd" * 20], [7] * 20, [[7] * 20]])
async def test_all_shapes_of_a_prompt(client: httpx.AsyncClient, prompt: Any) -> None:
    reply = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
    assert reply.json()["usage"]["prompt_tokens"] == 20


async def test_several_prompts_have_several_answers(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["one", "two"], "max_tokens": 2}
    whole = (await client.post("/v1/completions", json=body)).json()
    texts = {0: "", 1: ""}
    for event in events((await client.post("/v1/completions", json={**body, "stream": True})).text)[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert [choice["text"] for choice in whole["choices"]] == [texts[0], texts[1]]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"{", 400, "Bad Request"),
        (b"[]", 400, "Bad Request"),
        (b"{}", 400, "Bad Request"),
        ({"messages": HELLO, "stream_options": {"include_usage": True}}, 400, "Bad Request"),
        ({"messages": HELLO, "tool_choice": "required"}, 400, "Bad Request"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "Bad Request"),
        ({"messages": HELLO, "max_tokens": 2, "min_tokens": 3}, 400, "BadRequestError"),
        ({"messages": HELLO, "max_tokens": 5000}, 400, "BadRequestError"),
        ({"messages": HELLO, "n": 2}, 400, "BadRequestError"),
        ({"messages": HELLO, "model": "other"}, 404, "NotFoundError"),
    ],
)
async def test_refusals_have_the_engines_shape(
    client: httpx.AsyncClient, body: Any, status: int, kind: str
) -> None:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    reply = await client.post("/v1/chat/completions", content=content)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (status, status, kind)
    assert set(error) == {"message", "type", "param", "code"}


async def test_min_tokens_stretches_an_answer(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/chat/completions", json={"messages": HELLO, "min_tokens": 50})
    assert reply.json()["usage"]["completion_tokens"] == 50


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_a_demanded_tool_is_called(client: httpx.AsyncClient, choice: Any) -> None:
    body = {"messages": HELLO, "tools": [TOOL], "tool_choice": choice}
    message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    function = message["tool_calls"][0]["function"]
    assert (message["content"], function["name"]) == (None, "look")
    assert list(orjson.loads(function["arguments"])) == ["city"]
    streamed = ""
    stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
    for event in events(stream.text)[:-1]:
        for call in event["choices"][0]["delta"].get("tool_calls", []):
            streamed += call["function"]["arguments"]
    assert streamed == function["arguments"]


async def test_the_request_id_is_honoured(fleet: MockFleet, client: httpx.AsyncClient) -> None:
    for path, prefix in (("/v1/chat/completions", "chatcmpl-"), ("/v1/completions", "cmpl-")):
        body = {"messages": HELLO, "prompt": "x"}
        reply = await client.post(path, json=body, headers={"X-Request-Id": "abc"})
        assert reply.json()["id"] == prefix + "abc"
    assert fleet.engines[0].journal.outcome("abc") == "finished"


async def test_responses_messages_generate_and_embeddings(client: httpx.AsyncClient) -> None:
    whole = (await client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 3})).json()
    assert (whole["object"], whole["usage"]["output_tokens"]) == ("response", 3)
    stream = await client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 3, "stream": True})
    seen = events(stream.text)
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    deltas = [e["delta"] for e in seen if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == whole["output"][0]["content"][0]["text"]

    body = {"messages": HELLO, "max_tokens": 3, "system": "short"}
    message = (await client.post("/v1/messages", json=body)).json()
    assert message["stop_reason"] == "max_tokens"
    stream = await client.post("/v1/messages", json={**body, "stream": True})
    types = [event["type"] for event in events(stream.text)]
    opening, closing = types[:2], types[-3:]
    assert opening == ["message_start", "content_block_start"]
    assert types[2:-3] == ["content_block_delta"] * 3
    assert closing == ["content_block_stop", "message_delta", "message_stop"]

    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3}, "rid": "r1"}
    answer = (await client.post("/generate", json=body)).json()
    assert answer["meta_info"]["id"] == "r1"
    stream = await client.post("/generate", json={**body, "stream": True})
    assert events(stream.text)[2]["text"] == answer["text"]

    vectors = (await client.post("/v1/embeddings", json={"input": ["a", "b", "a"]})).json()["data"]
    assert vectors[0]["embedding"] == vectors[2]["embedding"] != vectors[1]["embedding"]


async def test_tokenize_counts_what_a_request_is_charged(client: httpx.AsyncClient) -> None:
    tokens = (await client.post("/tokenize", json={"messages": HELLO})).json()
    usage = (await client.post("/v1/chat/completions", json={"messages": HELLO})).json()["usage"]
    assert tokens["count"] == len(tokens["tokens"]) == usage["prompt_tokens"]
    text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()["prompt"]
    assert text == f"<|user|>\n{HELLO[0]['content']}<|end|>\n<|assistant|>\n"
    again = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert again["tokens"] == tokens["tokens"]
    assert "".join(again["token_strs"]) == text


async def test_adapters_come_and_go(client: httpx.AsyncClient) -> None:
    async def ask() -> int:
        reply = await client.post("/v1/completions", json={"model": "ad", "prompt": "x"})
        return reply.status_code

    assert await ask() == 404
    await client.post("/v1/load_lora_adapter", json={"lora_name": "ad", "lora_path": "/p"})
    cards = (await client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("mock", None), ("ad", "mock")]
    assert await ask() == 200
    await client.post("/v1/unload_lora_adapter", json={"lora_name": "ad"})
    assert await ask() == 404


async def test_other_paths(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).content == b""
    assert (await client.get("/ping")).status_code == 200
    assert (await client.get("/version")).json()["version"]
    assert (await client.get("/load")).json() == {"server_load": 0}
    assert (await client.get("/kv_event_sources")).json() == {}
    info = (await client.get("/server_info?config_format=json")).json()["vllm_config"]
    assert info["cache_config"]["block_size"] == 16
    for method, path in (("GET", "/nope"), ("POST", "/nope"), ("GET", "/v1/completions")):
        reply = await client.request(method, path)
        assert (reply.status_code, reply.json()) == (404, {"detail": "Not Found"})


async def test_metrics_have_the_engines_names(client: httpx.AsyncClient) -> None:
    body = {"messages": HELLO, "max_tokens": 4}
    for _ in range(2):
        await client.post("/v1/chat/completions", json=body)
    prompt_tokens = (await client.post("/tokenize", json={"messages": HELLO})).json()["count"]
    lines = (await client.get("/metrics")).text.splitlines()
    label = '{engine="0",model_name="mock"}'
    for line in (
        f"vllm:num_requests_running{label} 0.0",
        f"vllm:num_requests_waiting{label} 0.0",
        f"vllm:kv_cache_usage_perc{label} 0.0",
        f"vllm:prefix_cache_queries_total{label} {2.0 * prompt_tokens}",
        f"vllm:prefix_cache_hits_total{label} 16.0",
        f"vllm:time_to_first_token_seconds_count{label} 2.0",
        f"vllm:inter_token_latency_seconds_count{label} 6.0",
        f"vllm:request_queue_time_seconds_count{label} 2.0",
        f"vllm:generation_tokens_total{label} 8.0",
    ):
        assert line in lines
    config = next(line for line in lines if line.startswith("vllm:cache_config_info{"))
    assert 'block_size="16"' in config
    assert 'num_gpu_blocks="27062"' in config


async def test_debug_tells_the_truth(fleet: MockFleet, client: httpx.AsyncClient) -> None:
    raw = b'{ "prompt" : "abc", "max_tokens":1,  "odd": 1.0 }'
    headers = [("X-Odd", "a"), ("x-odd", "b"), ("x-request-id", "q")]
    await client.post("/v1/completions", content=raw, headers=headers)
    truth = (await client.get("/debug")).json()
    last = truth["last_requests"][-1]
    assert base64.b64decode(last["body_b64"]) == raw
    assert [pair for pair in last["headers"] if pair[0].lower() == "x-odd"] == [
        ["X-Odd", "a"],
        ["x-odd", "b"],
    ]
    assert truth["requests"]["finished"] == ["q"]
    assert truth["requests"]["outcomes"]["q"]["status"] == 200
    assert truth["tokens"]["prefill_computed"] == 1
    assert truth["kv"]["event_seq"] is None
    assert fleet.engines[0].journal.requests[-1][1].body == raw
