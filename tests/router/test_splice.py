"""Fields are added to a body without a change to any byte that came."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.router.splice import WATCHED, given_fields, splice

SPACE = st.text(" \t\r\n", max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(sorted(WATCHED)) | st.text()
BODIES = st.dictionaries(NAMES, VALUES, max_size=6)
FIELDS = st.dictionaries(st.sampled_from(sorted(WATCHED)), VALUES, max_size=4)


@st.composite
def written(draw: st.DrawFn) -> bytes:
    """An object as some client writes it: spaced, escaped or not."""
    style = {"ensure_ascii": draw(st.booleans()), "indent": draw(st.sampled_from((None, 1)))}
    text = json.dumps(draw(BODIES), **style)
    first = draw(SPACE) + "{" + draw(SPACE)
    return (first + text[1:] + draw(SPACE)).encode("utf-8", "surrogatepass")


@given(written(), FIELDS)
def test_spliced_is_the_original_and_the_fields_byte_for_byte(body: bytes, fields: dict[str, Any]) -> None:
    names = given_fields(body)
    original = json.loads(body)
    assert names == WATCHED & original.keys()
    added = {name: value for name, value in fields.items() if name not in names}
    spliced = splice(body, added)
    pairs = json.loads(spliced, object_pairs_hook=list)
    assert len({name for name, _ in pairs}) == len(pairs)
    assert json.loads(spliced) == {**added, **original}
    at = body.index(b"{") + 1
    assert spliced.startswith(body[:at])
    assert spliced.endswith(body[at:])


@given(st.binary(max_size=40) | st.text().map(lambda text: text.encode("utf-16")))
def test_no_bytes_at_all_break_the_reader(body: bytes) -> None:
    if given_fields(body) is not None:
        assert body.lstrip(b" \t\r\n").startswith(b"{")


@pytest.mark.parametrize(
    ("body", "spliced"),
    [
        (b"{}", b'{"priority":0}'),
        (b" {\n} ", b' {"priority":0\n} '),
        (b'{"a":1}', b'{"priority":0,"a":1}'),
        (b'{ "a":{},"a":1}', b'{"priority":0, "a":{},"a":1}'),
    ],
)
def test_where_the_fields_go(body: bytes, spliced: bytes) -> None:
    assert given_fields(body) == frozenset()
    assert splice(body, {"priority": 0}) == spliced


@pytest.mark.parametrize(
    "body",
    [
        b'{"priority":5}',
        b'{"priority":null}',
        b'{"a":"}","prior\\u0069ty":[1,2]}',
        b'{"priority":1,"priority":{}}',
    ],
)
def test_a_field_of_the_clients_own_is_seen_however_it_is_written(body: bytes) -> None:
    assert given_fields(body) == {"priority"}


@pytest.mark.parametrize(
    "body",
    [b'{"a":{"priority":1}}', b'{"a":"\\"priority\\":1"}', b'[{"priority":1}]', b'{"Priority":1}'],
)
def test_what_only_looks_like_a_field_is_none(body: bytes) -> None:
    assert not given_fields(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'"a"',
        b'{"a":1',
        b'{"a":1} {"b":2}',
        b'{"a":NaN}',
        b'{"a":"\\ud800"}',
        b"\xef\xbb\xbf{}",
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-32-le"),
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_not_one_plain_object_takes_no_fields(body: bytes) -> None:
    assert given_fields(body) is None


def test_without_fields_the_body_is_the_same_object() -> None:
    body = b'{"a":1}'
    assert splice(body, {}) is body
