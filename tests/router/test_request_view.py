from __future__ import annotations

import json
import re
import time
import tracemalloc
from typing import Any

import pytest

from kvroute.router.parsed_request import NO_KEYS, ParsedRequest
from kvroute.router.request_headers import MalformedRequest
from kvroute.router.request_view import OUTLINE_ABOVE_BYTES, parse_request
from kvroute.types import KeyMode

JSON = {b"host": b"gateway", b"content-type": b"application/json; charset=utf-8"}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
ODD: tuple[Any, ...] = (0, -1, True, "128", 12.0, 2**31, 10**30, None, [], {})
LONG = "All happy families are alike; each unhappy family is unhappy in its own way. " * 20


def parse(path: str, headers: dict[bytes, bytes] = JSON, /, **fields: Any) -> ParsedRequest:
    return parse_request(path.encode(), headers, json.dumps(fields).encode())


def chat(*messages: Any, **fields: Any) -> ParsedRequest:
    return parse(CHAT, messages=list(messages), **fields)


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def keys(request: ParsedRequest, chunk_bytes: int = 64) -> list[int]:
    sets, reason = request.prompt_keys(chunk_bytes)
    assert reason is None
    ((made,),) = [one.values() for one in sets]
    return list(made.keys)


# --- the view


def test_the_view() -> None:
    view = parse(COMPLETIONS, model="m", prompt="x" * 401, stream=True, user="u").view
    assert (view.model, view.session_id, view.prompt_tokens, view.stream) == ("m", "u", 101, True)


def test_a_bytes_path_with_a_query_is_the_same_route() -> None:
    body = json.dumps({"prompt": LONG}).encode()
    assert keys(parse_request(b"/v1/completions?api=1", JSON, body)) == keys(parse(COMPLETIONS, prompt=LONG))


@pytest.mark.parametrize(
    ("value", "stream"),
    [
        (True, True),
        (False, False),
        (None, False),
        ("true", True),
        (1, True),
        ("no", False),
        ([], False),
        ({}, False),
    ],
)
def test_stream_is_read_as_the_engines_read_it(value: Any, stream: bool) -> None:
    assert parse(COMPLETIONS, prompt="x", stream=value).view.stream is stream


@pytest.mark.parametrize(
    ("headers", "fields", "session"),
    [
        ({b"x-session-id": b"h1", b"x-kvroute-session": b"h2"}, {"session_id": "b"}, "h1"),
        ({b"x-kvroute-session": b"h2"}, {"session_id": "b"}, "h2"),
        ({b"x-session-id": b""}, {"session_id": "b", "user": "u"}, "b"),
        ({}, {"prompt_cache_key": "k", "metadata": {"user_id": "m"}, "user": "u"}, "k"),
        ({}, {"metadata": {"user_id": "m", "session_id": "s"}, "user": "u"}, "s"),
        ({}, {"metadata": {"user_id": "m"}, "user": "u"}, "m"),
        ({}, {"metadata": ["odd"], "user": "u"}, "u"),
        ({}, {"session_id": 7}, "7"),
        ({}, {"session_id": {"a": 1}, "user": True}, None),
        ({}, {}, None),
    ],
)
def test_the_session_id(headers: dict[bytes, bytes], fields: dict[str, Any], session: str | None) -> None:
    assert parse(CHAT, {**JSON, **headers}, messages=[], **fields).view.session_id == session


# --- the limit on the output, and the priority


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 128}, 128),
        ({"max_completion_tokens": 64, "max_tokens": 128}, 64),
        ({"max_completion_tokens": None, "max_tokens": 128}, 128),
        ({"max_output_tokens": 32}, 32),
        ({"sampling_params": {"max_new_tokens": 16}}, 16),
        ({"sampling_params": [{"max_new_tokens": 16}]}, None),
        *(({"max_tokens": odd}, None) for odd in ODD),
        ({"sampling_params": {"max_new_tokens": 0}}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("pad", [0, OUTLINE_ABOVE_BYTES])
def test_the_limit_on_the_output(fields: dict[str, Any], limit: int | None, pad: int) -> None:
    assert parse("/generate", text="x" * pad, **fields).view.max_output_tokens == limit


@pytest.mark.parametrize(
    ("header", "field", "priority"),
    [
        (None, 5, 5),
        (b"-2", 5, -2),
        (b"0", 5, 0),
        (None, -(2**31) + 1, -(2**31) + 1),
        *((None, odd, 0) for odd in (2**31, True, "1", 1.0, None, [1])),
    ],
)
@pytest.mark.parametrize("pad", [0, OUTLINE_ABOVE_BYTES])
def test_the_priority_of_a_header_counts_before_the_body_s(
    header: bytes | None, field: Any, priority: int, pad: int
) -> None:
    headers = JSON if header is None else {**JSON, b"x-kvroute-priority": header}
    assert parse(COMPLETIONS, headers, prompt="x" * pad, priority=field).view.priority == priority


@pytest.mark.parametrize("size", [0, 100, OUTLINE_ABOVE_BYTES])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/rerank"])
def test_limits_of_headers_hold_for_every_body(path: str, size: int) -> None:
    headers = {**JSON, b"x-slo-ttft-ms": b"250", b"x-slo-itl-ms": b"20", b"x-slo-e2e-ms": b"9000"}
    headers |= {b"x-kvroute-tenant": b"t", b"x-kvroute-session-continues": b"false"}
    body = json.dumps({"prompt": "x" * size}).encode() if size else b""
    view = parse_request(path.encode(), headers, body).view
    limits = (view.ttft_limit_s, view.itl_limit_s, view.e2e_limit_s)
    assert (limits, view.tenant, view.continues) == ((0.25, 0.02, 9.0), "t", False)


def test_small_fields_of_a_large_body_are_small() -> None:
    sampling = {"max_new_tokens": 7, "stop": "x" * 2**15}
    text = "x" * OUTLINE_ABOVE_BYTES
    assert parse("/generate", text=text, sampling_params=sampling).view.max_output_tokens is None
    assert parse("/generate", text=text, stream=1, max_tokens=7).view.stream


# --- what is refused and what is not


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"model": "m", ', "the body is not valid JSON: .*; a JSON object is expected"),
        (b"\xff\xfe\xfd", "not valid JSON"),
        (b"[1, 2]", "the body is an array; a JSON object is expected"),
        (b"null", "the body is null; a JSON object"),
        (b'"text"', "the body is a string"),
        (b"true", "the body is a boolean"),
        (b'{"model": 7}', "model is a number; a string is expected"),
        (b'{"model": {"a": 1}}', "model is an object; a string is expected"),
    ],
)
def test_a_body_that_cannot_be_routed_on_is_refused_by_field_fault_and_remedy(
    body: bytes, message: str
) -> None:
    with pytest.raises(MalformedRequest, match=message) as refused:
        parse_request(CHAT.encode(), JSON, body)
    assert refused.value.field == ("model" if b"model is" in message.encode() else None)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("path", [CHAT, "/v1/other"])
def test_a_nesting_bomb_is_refused_at_once(opening: bytes, path: str) -> None:
    """For no more than its bytes: one ten times as deep costs ten times as much at most, not a hundred."""

    def cost_s(depth: int) -> float:
        start_s = time.process_time()
        try:
            assert parse_request(path.encode(), JSON, opening * depth).no_keys == "route"
        except MalformedRequest:
            assert path == CHAT
        return time.process_time() - start_s

    small_s, large_s = (min(cost_s(depth) for _ in range(5)) for depth in (10_000, 100_000))
    assert large_s < 40 * max(small_s, 1e-4)


@pytest.mark.parametrize("depth", [100, 300, 900])
def test_deep_parts_within_the_parsers_limits_do_no_harm(depth: int) -> None:
    nest = b"[" * depth + b"]" * depth
    for where in (
        b'"tools":%b,"messages":[{"role":"user","content":"x"}]',
        b'"messages":[%b]',
        b'"messages":%b',
    ):
        request = parse_request(CHAT.encode(), JSON, b"{" + where % nest + b',"lora_path":' + nest + b"}")
        assert request.prompt_keys(1)[1] in {None, *NO_KEYS}


def test_what_orjson_refuses_but_engines_take_is_read() -> None:
    prompt = json.dumps(LONG)
    plain = keys(parse(COMPLETIONS, prompt=LONG))
    for body in (
        f'{{"prompt": {prompt}, "temperature": NaN}}'.encode(),
        f'{{"prompt": {prompt}, "seed": {10**40}}}'.encode(),
        f'{{"prompt": {prompt}, "user": "\\ud800"}}'.encode(),
        f'\ufeff{{"prompt": {prompt}}}'.encode(),
        f'{{"prompt": {prompt}}}'.encode("utf-16"),
    ):
        assert keys(parse_request(COMPLETIONS.encode(), JSON, body)) == plain


def test_lone_surrogates_in_a_prompt_have_keys_of_their_own() -> None:
    one, other = (
        parse_request(COMPLETIONS.encode(), JSON, b'{"prompt": "%b"}' % (text * 30))
        for text in (rb"\ud800", rb"\udc00")
    )
    assert keys(one) != keys(other)


@pytest.mark.parametrize(
    "fields",
    [{"model": None}, {"stream": "x"}, {"messages": "x"}, {"messages": {"a": 1}}, {"max_tokens": "x"}],
)
def test_what_the_engine_can_judge_is_left_to_it(fields: dict[str, Any]) -> None:
    assert parse(CHAT, **fields).view.model is None


# --- no keys, and why


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        ("/v1/score", {"text_1": LONG}, "route"),
        (CHAT, {"messages": []}, "empty"),
        (CHAT, {}, "empty"),
        (CHAT, {"messages": LONG}, "shape"),
        (COMPLETIONS, {"prompt": ""}, "empty"),
        (COMPLETIONS, {"prompt": None}, "empty"),
        (COMPLETIONS, {"prompt": [""]}, "empty"),
        (COMPLETIONS, {"prompt": []}, "empty"),
        (COMPLETIONS, {"prompt": [[]]}, "empty"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "shape"),
        (COMPLETIONS, {"prompt": [1, "x"]}, "shape"),
        (COMPLETIONS, {"prompt": ["x", 1]}, "shape"),
        (COMPLETIONS, {"prompt": [-1]}, "shape"),
        (COMPLETIONS, {"prompt": [2**32]}, "shape"),
        (COMPLETIONS, {"prompt": "short"}, "short"),
        (RESPONSES, {"input": ""}, "empty"),
        (MESSAGES, {"system": LONG}, "empty"),
        ("/generate", {"input_ids": [], "text": ""}, "empty"),
        ("/v1/embeddings", {"input": []}, "empty"),
    ],
)
def test_no_opinion_always_has_a_reason(path: str, fields: dict[str, Any], reason: str) -> None:
    assert parse(path, **fields).prompt_keys(64) == ((), reason)
    assert reason in NO_KEYS


@pytest.mark.parametrize(
    "media_type", [b"multipart/form-data; boundary=x", b"application/octet-stream", b"text/plain"]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/audio/transcriptions"])
def test_a_body_that_is_not_json_passes_unread(media_type: bytes, path: str) -> None:
    headers = {b"content-type": media_type, b"x-session-id": b"s"}
    request = parse_request(path.encode(), headers, b"\x00{ not json")
    assert (request.view.model, request.view.session_id) == (None, "s")
    assert request.prompt_keys(64) == ((), "content_type" if path == CHAT else "route")


@pytest.mark.parametrize("headers", [JSON, {}])
def test_no_body_passes(headers: dict[bytes, bytes]) -> None:
    assert parse_request(CHAT.encode(), headers, b"").prompt_keys(64) == ((), "empty")
    assert parse_request(b"/v1/models", headers, b"").prompt_keys(64) == ((), "route")


def test_a_prompt_route_without_a_content_type_is_read_as_json() -> None:
    assert parse_request(COMPLETIONS.encode(), {}, b'{"model": "m"}').view.model == "m"


def test_an_unknown_json_route_names_its_model_and_refuses_nothing() -> None:
    view = parse("/v1/rerank", model="m", stream=True, user="u").view
    assert (view.model, view.stream, view.session_id) == ("m", True, "u")
    for body in (b"{", b"[]", b'{"model": 7}'):
        assert parse_request(b"/v1/rerank", JSON, body).view.model is None


# --- which prompts are equal, and which extend which


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [user(LONG)]}),
        (COMPLETIONS, {"prompt": LONG}),
        (RESPONSES, {"input": LONG}),
        (RESPONSES, {"input": [user([{"type": "input_text", "text": LONG}])]}),
        (MESSAGES, {"messages": [user(LONG)]}),
        ("/v1/embeddings", {"input": LONG}),
        ("/generate", {"text": LONG}),
        ("/generate", {"input_ids": list(range(100))}),
    ],
)
def test_every_prompt_route_has_keys(path: str, fields: dict[str, Any]) -> None:
    request = parse(path, **fields)
    sets, reason = request.prompt_keys(64)
    assert reason is None
    ((made,),) = [one.values() for one in sets]
    assert made.mode is KeyMode.BYTES
    assert len(made.keys) == len(request.prompt_bytes()) // 64 > 0
    assert made.prompt_tokens == request.view.prompt_tokens
    assert made.block_tokens == 16
    assert request.prompt_keys(64)[0] is sets


def test_a_prompt_as_text_or_as_ids_alone_or_in_a_list() -> None:
    ids = list(range(300))
    assert keys(parse(COMPLETIONS, prompt=LONG)) == keys(parse(COMPLETIONS, prompt=[LONG]))
    assert keys(parse(COMPLETIONS, prompt=ids)) == keys(parse(COMPLETIONS, prompt=[ids]))
    batch = keys(parse(COMPLETIONS, prompt=[LONG, LONG]))
    alone = keys(parse(COMPLETIONS, prompt=LONG))
    assert batch[: len(alone)] == alone
    assert parse(COMPLETIONS, prompt=ids).view.prompt_tokens == 300


def test_ids_come_before_text() -> None:
    ids = list(range(300))
    both = parse("/generate", text=LONG, input_ids=ids)
    assert keys(both) == keys(parse("/generate", input_ids=ids))
    assert keys(parse("/generate", text=LONG, input_ids=[])) == keys(parse("/generate", text=LONG))


def test_ids_are_not_the_text_of_the_same_bytes() -> None:
    ids = [int.from_bytes(b"abcd", "little")] * 100
    assert keys(parse(COMPLETIONS, prompt=ids)) != keys(parse(COMPLETIONS, prompt="abcd" * 100))


def test_content_as_string_array_or_null() -> None:
    tail = {"role": "assistant", "content": None}
    as_string = chat(user(LONG), tail)
    for content, empty in (
        ([{"type": "text", "text": LONG}], ""),
        ([LONG], []),
        ([{"type": "input_text", "text": LONG}], [{"type": "text", "text": ""}]),
    ):
        same = chat(user(content), {"role": "assistant", "content": empty})
        assert same.prompt_bytes() == as_string.prompt_bytes()
    absent = chat(user(LONG), {"role": "assistant"})
    assert absent.prompt_bytes() == as_string.prompt_bytes()


def test_the_same_conversation_on_three_routes() -> None:
    """The engines render all three with the same template."""
    by_chat = chat({"role": "system", "content": LONG}, user("hi"))
    by_messages = parse(MESSAGES, system=[{"type": "text", "text": LONG}], messages=[user("hi")])
    by_responses = parse(RESPONSES, instructions=LONG, input="hi")
    assert by_chat.prompt_bytes() == by_messages.prompt_bytes() == by_responses.prompt_bytes()


def test_images_differ_by_what_they_show() -> None:
    def seen(url: str, detail: str = "low") -> list[int]:
        image = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
        return keys(
            chat(user([{"type": "text", "text": "what is this?"}, image, {"type": "text", "text": LONG}]))
        )

    assert seen("data:1") == seen("data:1")
    assert seen("data:1") != seen("data:2")
    reordered = {"image_url": {"detail": "low", "url": "data:1"}, "type": "image_url"}
    parts = [{"type": "text", "text": "what is this?"}, reordered, {"type": "text", "text": LONG}]
    assert seen("data:1") == keys(chat(user(parts)))
    sglang = [keys(parse("/generate", text=LONG, image_data=data)) for data in ("a", "b", None)]
    assert len({each[0] for each in sglang}) == 3


def test_a_chat_that_goes_on_extends_its_bytes() -> None:
    tools = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
    call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"q": 1}'}}
    turns = [
        {"role": "system", "content": "You are terse."},
        user(LONG),
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "found"}]},
        {"role": "assistant", "content": "Done."},
        user(
            [{"type": "text", "text": "Thanks"}, {"type": "image_url", "image_url": {"url": "x"}}], name="Ann"
        ),
    ]
    before = b""
    for count in range(1, len(turns) + 1):
        now = chat(*turns[:count], tools=tools, temperature=count / 10, max_tokens=count).prompt_bytes()
        assert now.startswith(before)
        assert len(now) > len(before)
        before = now


def test_a_moving_cache_breakpoint_does_not_break_the_prefix() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    image = {"type": "image", "source": {"type": "base64", "data": "x"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": LONG}]}
    first = [user([{"type": "text", "text": LONG, **mark}, image, result])]
    second = [user([{"type": "text", "text": LONG}, {**image, **mark}, {**result, **mark}]), user("more")]
    tools = [{"name": "t", "input_schema": {}}]
    one = parse(MESSAGES, tools=tools, messages=first).prompt_bytes()
    two = parse(MESSAGES, tools=[{**tools[0], **mark}], messages=second).prompt_bytes()
    assert two.startswith(one)
    assert one.count(LONG.encode()) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [{"role": "system", "content": LONG}]},
        {"messages": [user(LONG, name="Ann")]},
        {"messages": [user(LONG)], "tools": [{"type": "function"}]},
        {"messages": [user(LONG, tool_calls=[{"id": "1"}])]},
        {"messages": [user(LONG[:40]), user(LONG[40:])]},
        {"messages": [user([LONG[:40], LONG[40:]])]},
        {"messages": [LONG]},
    ],
)
def test_what_the_template_renders_differently_has_other_bytes(other: dict[str, Any]) -> None:
    assert parse(CHAT, **other).prompt_bytes() != chat(user(LONG)).prompt_bytes()


def test_no_text_can_imitate_a_field() -> None:
    """Field marks are bytes that UTF-8 never has."""
    honest = chat(user("a"), user("b")).prompt_bytes()
    for trick in ("a\xffruser\xffcb", "a\x00ruser\x00cb", "a\udcffruser\udcffcb"):
        body = json.dumps({"messages": [user(trick)]}).encode()
        assert parse_request(CHAT.encode(), JSON, body).prompt_bytes() != honest


def test_model_adapter_and_salt_are_namespaces_of_their_own() -> None:
    """Each matches itself and none another, nor one that has the same name in another role."""
    variants: list[dict[str, Any]] = [
        {},
        {"model": "x"},
        {"lora_path": "x"},
        {"cache_salt": "x"},
        {"extra_key": "x"},
        {"model": "x", "lora_path": "y"},
        {"model": "x", "cache_salt": "y"},
    ]
    first = [keys(parse(COMPLETIONS, prompt=LONG, **fields))[0] for fields in variants]
    assert len(set(first)) == len(variants)
    assert first == [keys(parse(COMPLETIONS, prompt=LONG, **fields))[0] for fields in variants]
    listed = keys(parse("/generate", text=LONG, lora_path=["x"]))
    assert listed == keys(parse("/generate", text=LONG, lora_path="x"))


def test_sampling_is_no_part_of_the_key() -> None:
    assert keys(chat(user(LONG))) == keys(
        chat(user(LONG), temperature=0.3, top_p=0.5, max_tokens=3, stream=True)
    )


def test_composed_and_decomposed_characters_differ() -> None:
    assert keys(parse(COMPLETIONS, prompt="é" * 100)) != keys(parse(COMPLETIONS, prompt="e\u0301" * 100))


def test_keys_are_the_same_in_every_version() -> None:
    request = chat(
        {"role": "system", "content": "s" * 70}, user("u" * 70), model="m", tools=[{"b": 1, "a": 2}]
    )
    assert request.prompt_bytes() == (
        b'\xffT[{"a":2,"b":1}]\xffrsystem\xffc' + b"s" * 70 + b"\xffruser\xffc" + b"u" * 70
    )
    assert [f"{key:016x}" for key in keys(request)] == ["29adbe44588746b6", "79be73b1b8f4223a"]


# --- large bodies


def _large(**fields: Any) -> ParsedRequest:
    return parse(CHAT, **{"model": "m", "messages": [user("x" * 2**20)], **fields})


def test_a_large_body_is_outlined() -> None:
    view = _large(stream=True).view
    assert (view.model, view.stream, view.prompt_tokens > 2**18) == ("m", True, True)


def test_a_large_chat_that_goes_on_extends_its_keys() -> None:
    turns = [user("x" * 2**20), {"role": "assistant", "content": "y" * 9000}, user("z")]
    before, after = keys(_large(messages=turns[:1]), 512), keys(_large(messages=turns), 512)
    assert len(before) > 2000
    assert after[: len(before)] == before
    assert len(after) > len(before) + 10


@pytest.mark.parametrize("field", ["model", "cache_salt", "lora_name", "extra_key"])
def test_large_prompts_are_kept_apart_as_small_ones_are(field: str) -> None:
    one, two = keys(_large(**{field: "a"}), 512), keys(_large(**{field: "b"}), 512)
    assert not set(one) & set(two)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"model": 7, "x": "%b"}', "not usable: Expected `str | null`, got `int` - at `$.model`"),
        (b'["%b"]', "the body is not usable: Expected `object`, got `array`"),
        (b'{"x": "%b"', "the body is not valid JSON"),
        (b'{"x": "%b", "y": nan}', "the body is not valid JSON"),
        (b'{"x": "%b", "y": ' + b"[" * 10**6 + b"}", "the body is not valid JSON"),
    ],
)
def test_a_large_body_that_cannot_be_routed_on(body: bytes, message: str) -> None:
    with pytest.raises(MalformedRequest, match=re.escape(message)):
        parse_request(CHAT.encode(), JSON, body.replace(b"%b", b"x" * 2**20))


def test_a_large_bomb_makes_no_objects() -> None:
    """Fifty megabytes of `{},` as objects are two gigabytes, and seconds of the event loop."""
    bomb = b'{"model":"m","messages":[],"x":[' + b"{}," * 5_000_000 + b"{}]}"
    tracemalloc.start()
    try:
        request = parse_request(CHAT.encode(), JSON, bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert request.view.model == "m"
    assert peak < 2**20
