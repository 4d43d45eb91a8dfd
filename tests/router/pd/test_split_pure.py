"""What of a split request is pure: which can be split, and the count of cached tokens in passing."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest

from kvroute.config_pd import PdConfig
from kvroute.router.eligible import Task
from kvroute.router.pd.body import read_fields, read_oddly
from kvroute.router.pd.planning import plan
from kvroute.router.pd.registry import make_connector
from kvroute.router.pd.usage import CachedTokens
from kvroute.router.request_parser import Request

NIXL, SGLANG = make_connector("nixl", PdConfig()), make_connector("sglang", PdConfig())
SEED = int(os.environ.get("USAGE_SEED", random.SystemRandom().randrange(10**6)))
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def request(path: str, body: bytes, method: bytes = b"POST", **fields: bytes) -> Request:
    named = {name.replace("_", "-").encode(): value for name, value in fields.items()}
    return Request(method, path.encode(), [], named, body, True, False, 0.0)


@pytest.mark.parametrize(
    ("path", "body", "task", "why"),
    [
        (CHAT, {"messages": []}, Task.SPLIT, ""),
        (CHAT + "?x=1", {"messages": [], "n": 1, "echo": False, "best_of": None}, Task.SPLIT, ""),
        (TEXT, {"prompt": "x"}, Task.SPLIT, ""),
        (TEXT, {"prompt": [1, 2, 3]}, Task.SPLIT, ""),
        (TEXT, {"prompt": ["x"]}, Task.SPLIT, ""),
        (TEXT, {"prompt": [[1, 2]]}, Task.SPLIT, ""),
        (TEXT, {"prompt": ["x", "y"]}, Task.WHOLE, "prompts"),
        (TEXT, {"prompt": [[1], [2]]}, Task.WHOLE, "prompts"),
        (TEXT, {"prompt": "x", "n": 2}, Task.WHOLE, "n"),
        (TEXT, {"prompt": "x", "best_of": 2}, Task.WHOLE, "best_of"),
        (TEXT, {"prompt": "x", "use_beam_search": True}, Task.WHOLE, "use_beam_search"),
        (TEXT, {"prompt": "x", "echo": True}, Task.WHOLE, "echo"),
        (TEXT, {"prompt": "x", "prompt_logprobs": 0}, Task.WHOLE, "prompt_logprobs"),
        (TEXT, {"prompt": "x", "prompt_logprobs": None}, Task.SPLIT, ""),
        ("/v1/responses", {"input": "x", "background": True}, Task.WHOLE, "background"),
        ("/v1/responses", {"input": "x", "previous_response_id": "r"}, Task.WHOLE, "previous_response_id"),
        ("/v1/messages", {"messages": []}, Task.SPLIT, ""),
        ("/generate", {"text": "x"}, Task.WHOLE, "route"),
        ("/v1/embeddings", {"input": "x"}, Task.WHOLE, "route"),
        ("/v1/rerank-else", {"input": "x"}, Task.WHOLE, "route"),
        ("/invocations", {"prompt": "x"}, Task.WHOLE, "route"),
        ("/v1/%63ompletions", {"prompt": "x"}, Task.WHOLE, "route"),
        ("/v1/completions#x", {"prompt": "x"}, Task.WHOLE, "route"),
        ("/tokenize", {"prompt": "x"}, Task.ANSWER, "route"),
    ],
)
def test_what_can_be_split_and_why_the_rest_cannot(
    path: str, body: dict[str, Any], task: Task, why: str
) -> None:
    raw = json.dumps(body).encode()
    found = plan(request(path, raw), read_fields(raw), NIXL)
    assert found[:2] == (task, why)


def test_what_the_body_s_bytes_the_method_and_the_connector_decide() -> None:
    body = b'{"prompt":["x","y"]}'
    assert plan(request(TEXT, body), read_fields(body), SGLANG) == (Task.SPLIT, "", 2)
    assert plan(request("/generate", b'{"text":["a","b","c"]}'), {}, SGLANG)[0] is Task.SPLIT
    assert plan(request(TEXT, body, b"GET"), read_fields(body), SGLANG)[:2] == (Task.ANSWER, "route")
    assert plan(request(TEXT, b"{"), read_fields(b"{"), SGLANG)[:2] == (Task.WHOLE, "body")
    signed = request(TEXT, body, content_digest=b"sha-256=:x:")
    assert plan(signed, read_fields(body), SGLANG)[:2] == (Task.WHOLE, "digest")


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b'{"a":NaN}', b'{"a":"\\ud800', b"[" * 10**5, b"\xff{}"])
def test_bodies_that_are_no_object_have_no_fields(body: bytes) -> None:
    assert read_fields(body) is None


def test_bodies_are_read_as_python_reads_them_where_engines_do() -> None:
    text = '{"x":NaN,"kv\\u005fa":1}'
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-be"):
        assert read_oddly(text.encode(encoding)).keys() == {"x", "kv_a"}
    for body in (b"[NaN]", b"{", b"[" * 10**5, b"\xff\x00\xfe", b"", b'{"a":' + b"9" * 5000 + b"}"):
        assert read_oddly(body) == {}


def _stream(chance: random.Random, count: int) -> bytes:
    """Events with counts of all kinds, and text that looks like them."""
    blank = chance.choice(["", " ", "  "])
    events = []
    for _ in range(chance.randrange(1, 5)):
        events.append(json.dumps({"choices": [{"text": chance.choice(_TEXTS)}]}))
    details = f'{{"cached_tokens"{blank}:{blank}{count}{chance.choice(["", " "])}}}'
    events.append(f'{{"usage":{{"prompt_tokens":9,"prompt_tokens_details":{details}}}}}')
    events.append(f'{{"message":{{"usage":{{"cache_read_input_tokens":{count},"input_tokens":1}}}}}}')
    return b"".join(f"data: {event}\n\n".encode() for event in [*events, "[DONE]"])


_TEXTS = ['"cached_tokens": 5', "cached_tokens", "é", '\\"cached_tokens\\":5}', "{", '"', "\\"]


def test_the_count_is_put_in_its_place_wherever_a_read_ends() -> None:
    chance = random.Random(SEED)
    print(f"USAGE_SEED={SEED}")
    for _ in range(12):
        count, true = chance.choice([0, 7, 12345678]), chance.choice([0, 3, 999_999_999])
        data = _stream(chance, count)
        wanted = data.replace(b'tokens":%d' % count, b'tokens":%d' % true)
        for blank in (b" ", b"  "):
            old = b'"cached_tokens"' + blank + b":" + blank + b"%d" % count
            wanted = wanted.replace(old, old[: -len(b"%d" % count)] + b"%d" % true)
        for at in range(len(data) + 1):
            assert _fed(true, [data[:at], data[at:]]) == wanted
        assert _fed(true, [data[i : i + 1] for i in range(len(data))]) == wanted
        cuts = sorted(chance.sample(range(len(data)), 6))
        assert _fed(true, [data[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]) == wanted


def _fed(count: int, pieces: list[bytes]) -> bytes:
    cached = CachedTokens(count)
    return b"".join([*map(cached.feed, pieces), cached.end()])


@pytest.mark.parametrize(
    "tail", [b'{"cached_tok', b'{"cached_tokens', b'{"cached_tokens":', b'{"cached_tokens":12', b'{"', b"{"]
)
def test_a_body_that_ends_in_the_middle_of_a_count_is_passed_on_whole(tail: bytes) -> None:
    assert _fed(5, [b"x", tail]) == b"x" + tail
