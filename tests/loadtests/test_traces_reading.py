"""Trace files of every format, read whole, found out, and refused line by line."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvroute.loadtests.traces import lines, reading
from kvroute.loadtests.traces.reading import read_trace
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.loadtests.traces.sharegpt import Chats

GOOD = '{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [7, 8], "other": 1}\n'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TOKENS = {"arrival_time_ns": 5e8, "input_tok_ids": [*range(130)], "output_toks": 3}


def read(tmp_path: Path, text: str | bytes, name: str = "trace.jsonl", **options: object) -> Trace:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_trace(path, **options)  # type: ignore[arg-type]


def token_lines(*changes: Mapping[str, object]) -> str:
    lines = [
        {name: value for name, value in (TOKENS | dict(change)).items() if value is not None}
        for change in changes
    ]
    return "\n".join(map(json.dumps, lines))


# --- Mooncake ------------------------------------------------------------------------------------


def test_mooncake_is_read_in_order_of_arrival_from_the_first_request_on(tmp_path: Path) -> None:
    later = GOOD.replace("1500", "2000.5").replace("other", "session_id")
    trace = read(tmp_path, later + "\n" + GOOD)
    assert trace.rows == (Row(0.0, 600, 5, (7, 8)), Row(pytest.approx(0.5005), 600, 5, (7, 8), "1"))
    assert (trace.block_tokens, trace.name, trace.unsorted, trace.skipped) == (512, "trace.jsonl", 1, {})
    assert trace.prompts[0] == (600, (7, 8))


def test_equal_times_stay_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "".join(GOOD.replace(": 5,", f": {i},").replace("1500", str(i % 2)) for i in range(1, 7))
    trace = read(tmp_path, text)
    assert [row.output_tokens for row in trace.rows] == [2, 4, 6, 1, 3, 5]
    assert trace.unsorted == 3


def test_the_block_size_of_hash_ids_may_be_another(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD.replace("600", "100"), block_tokens=64).block_tokens == 64


MOONCAKE_FAULTS = [
    ("{", "malformed", r"Input data was truncated; timestamp, input_length, output_length, hash_ids are"),
    ("[1]", "malformed", r"Expected `object`, got `array`"),
    ('{"timestamp": 1}', "malformed", r"Object missing required field `input_length`"),
    (GOOD.replace("600", '"600"'), "malformed", r"Expected `int`, got `str` - at `\$\.input_length`"),
    (GOOD.replace("600", "0"), "length", r"input_length: must be from 1 to 10000000, got 0"),
    (GOOD.replace("600", "-3"), "length", r"input_length: must be from 1 to 10000000, got -3"),
    (GOOD.replace("600", "10000001"), "length", r"input_length: must be from 1 to 10000000, got 10000001"),
    (GOOD.replace(": 5,", ": 0,"), "length", r"output_length: must be from 1 to 10000000, got 0"),
    (GOOD.replace("1500", "-1"), "time", r"timestamp: must be 0 or more, got -1"),
    (GOOD.replace("1500", "1e999"), "malformed", r"Number out of range"),
    (GOOD.replace("[7, 8]", "[7]"), "blocks", r"hash_ids: 1 for 600 tokens; 2 blocks of 512 tokens"),
    (GOOD.replace("[7, 8]", "[]"), "blocks", r"hash_ids: 0 for 600 tokens; 2 blocks of 512 tokens"),
    (GOOD.replace("[7, 8]", "[7, -1]"), "blocks", r"hash_ids: each must be from 0 to 281474976710655"),
    (GOOD.replace("[7, 8]", f"[7, {2**48}]"), "blocks", r"hash_ids: each must be from 0 to 281474976710655"),
    ("[" * 200_000, "malformed", r"Expected `object`, got `array`"),
]


@pytest.mark.parametrize(("line", "reason", "message"), MOONCAKE_FAULTS)
def test_a_line_that_does_not_fit_is_named_or_counted(
    tmp_path: Path, line: str, reason: str, message: str
) -> None:
    text = GOOD + line + "\n" + GOOD
    with pytest.raises(lines.TraceError, match=rf"(?i)^--trace: .*trace\.jsonl, line 2: {message}"):
        read(tmp_path, text)
    trace = read(tmp_path, text, bad_lines="skip")
    assert (len(trace.rows), trace.skipped) == (2, {reason: 1})


def test_a_line_of_other_bytes_than_text_is_named(tmp_path: Path) -> None:
    text = GOOD.encode() + b'{"note": "\xff"}\n' + GOOD.encode()
    with pytest.raises(lines.TraceError, match="line 2: not UTF-8 text: invalid start byte at byte 10"):
        read(tmp_path, text)
    assert read(tmp_path, text, bad_lines="skip").skipped == {"encoding": 1}


def test_a_long_line_is_skipped_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 100)
    text = GOOD + " " * 1000 + GOOD + GOOD
    with pytest.raises(lines.TraceError, match="line 2: longer than 100 bytes"):
        read(tmp_path, text)
    trace = read(tmp_path, text, bad_lines="skip")
    assert (len(trace.rows), trace.skipped) == (2, {"too_long": 1})


def test_gigantic_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_ROWS", 2)
    with pytest.raises(lines.TraceError, match=r"trace\.jsonl: more than 2 requests"):
        read(tmp_path, GOOD * 3)
    monkeypatch.setattr(lines, "MAX_FILE_BYTES", 250)
    with pytest.raises(lines.TraceError, match=r"trace\.jsonl: longer than 250 bytes"):
        read(tmp_path, GOOD + "\n" * 300, bad_lines="skip")


# --- Azure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "apart_s"),
    [
        ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.0319601", 0.0520001),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 02:00:01.009930+02:00", 1.0),
        ("2024-05-10T00:00:00Z", "2024-05-11 00:00:00Z", 86_400.0),
    ],
)
def test_azure_of_both_years(tmp_path: Path, first: str, second: str, apart_s: float) -> None:
    trace = read(tmp_path, f"{HEADER}{first},100,10\r\n{second},4808,8\r\n", "azure.csv")
    assert [row.arrival_s for row in trace.rows] == pytest.approx([0.0, apart_s], abs=1e-6)
    assert [(row.input_tokens, row.output_tokens) for row in trace.rows] == [(100, 10), (4808, 8)]
    assert [row.block_ids for row in trace.rows] == [(0, 1), tuple(range(2, 78))]
    assert trace.block_tokens == 64


def test_azure_with_other_columns_between_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = '\ufeffid,ContextTokens,"timestamp",GeneratedTokens\n7,9,2024-05-10 00:00:00,2\n'
    assert read(tmp_path, text, "table.txt").rows == (Row(0.0, 9, 2, (0,)),)


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        ("2024-05-10 00:00:00,5", "malformed", "2 cells; TIMESTAMP, ContextTokens, GeneratedTokens are"),
        ("yesterday,5,5", "time", "TIMESTAMP: 'yesterday'; a time such as 2024-05-10 00:00:00.009930 is"),
        ("2024-13-10 00:00:00,5,5", "time", r"TIMESTAMP: '2024-13-10 00:00:00': month must be in 1\.\.12"),
        ("2024-05-10 00:00:00,x,5", "malformed", "ContextTokens: 'x'; a whole number is expected"),
        ("2024-05-10 00:00:00,0,5", "length", "ContextTokens: must be from 1 to 10000000, got 0"),
        ("2024-05-10 00:00:00,5,-5", "length", "GeneratedTokens: must be from 1 to 10000000, got -5"),
    ],
)
def test_a_row_of_azures_that_does_not_fit(tmp_path: Path, line: str, reason: str, message: str) -> None:
    text = f"{HEADER}{line}\n2024-05-10 00:00:00,5,5\n"
    with pytest.raises(lines.TraceError, match=f"line 2: {message}"):
        read(tmp_path, text, "azure.csv")
    assert read(tmp_path, text, "azure.csv", bad_lines="skip").skipped == {reason: 1}


def test_a_table_without_its_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        lines.TraceError, match="line 1: no column TIMESTAMP; a header with TIMESTAMP, Context"
    ):
        read(tmp_path, "time,ContextTokens,GeneratedTokens\n1,2,3\n", "azure.csv")
    with pytest.raises(lines.TraceError, match="no requests; all were skipped: 2 header"):
        read(tmp_path, "1,2,3\n4,5,6\n", "azure.csv", bad_lines="skip")


# --- token ids -----------------------------------------------------------------------------------


def test_token_ids_are_cut_into_chained_blocks(tmp_path: Path) -> None:
    ids = [*range(130)]
    other = [*ids[:64], 9, *ids[65:]]
    trace = read(
        tmp_path,
        token_lines(
            {"session_id": 4},
            {"arrival_time_ns": 6e8, "input_tok_ids": other},
            {"arrival_time_ns": None, "arrival_time": 0.7, "input_tok_ids": ids[:128], "input_toks": 128},
            {"arrival_time_ns": None, "timestamp": 0.9, "input_tok_ids": None, "prompt_token_ids": ids[:129]},
            {
                "arrival_time_ns": 9e8,
                "input_tok_ids": None,
                "token_ids": ids,
                "output_toks": None,
                "output_length": 7,
            },
        ),
    )
    assert trace.rows == (
        Row(0.0, 130, 3, (0, 1, 2), "4"),
        Row(pytest.approx(0.1), 130, 3, (0, 3, 4)),
        Row(pytest.approx(0.2), 128, 3, (0, 1)),
        Row(pytest.approx(0.4), 129, 3, (0, 1, 5)),
        Row(pytest.approx(0.4), 130, 7, (0, 1, 2)),
    )
    assert trace.block_tokens == 64
    assert len(read(tmp_path, token_lines({}), block_tokens=16).rows[0].block_ids) == 9


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        ({"arrival_time_ns": None}, "malformed", "timestamp: missing; one of timestamp, arrival_time, arr"),
        ({"output_toks": None}, "malformed", "output_toks: missing; one of output_toks, output_length, out"),
        ({"arrival_time_ns": -5}, "time", "arrival_time_ns: must be 0 or more, got -5"),
        ({"input_tok_ids": []}, "length", "input_tok_ids: must be from 1 to 10000000, got 0"),
        (
            {"input_tok_ids": [-1]},
            "token_ids",
            r"input_tok_ids: token ids must be integers from 0 to 2\*\*32",
        ),
        ({"input_tok_ids": ["a"]}, "malformed", "Expected `int`, got `str`"),
        ({"input_toks": 4}, "length", "input_toks: 4 for 130 ids in input_tok_ids"),
        ({"output_toks": 0}, "length", "output_toks: must be from 1 to 10000000, got 0"),
    ],
)
def test_token_ids_that_do_not_fit(
    tmp_path: Path, change: Mapping[str, object], reason: str, message: str
) -> None:
    text = token_lines({}, change)
    with pytest.raises(lines.TraceError, match=f"line 2: {message}"):
        read(tmp_path, text)
    assert read(tmp_path, text, bad_lines="skip").skipped == {reason: 1}


# --- ShareGPT ------------------------------------------------------------------------------------


def conversation(*said: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": role, "value": text} for role, text in said]}


TALK = conversation(
    ("system", "s" * 400), ("human", "a" * 40), ("gpt", "b" * 80), ("human", "c" * 4), ("gpt", "d" * 10)
)


def test_answers_are_requests_and_part_of_the_next_prompt(tmp_path: Path) -> None:
    said = json.dumps([TALK, conversation(("gpt", "hello"), ("human", "x")), TALK])
    chats = Chats(sessions_per_s=0.5, think_s=10.0, seed=3)
    trace = read(tmp_path, said, "talks.json", chats=chats)
    rows = sorted(trace.rows, key=lambda row: (row.session_id, row.arrival_s))
    # Markers of 11, 9 and 14 bytes are 3, 3 and 4 tokens.
    first = 3 + 100 + 3 + 10 + 4
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [
        (first, 20),
        (first + 20 + 3 + 1 + 4, 3),
    ] * 2
    assert [row.session_id for row in rows] == ["c1", "c1", "c3", "c3"]
    assert rows[0].block_ids == rows[2].block_ids
    assert rows[0].block_ids[0] == rows[1].block_ids[0]
    assert trace.skipped == {"no_turn": 1}
    assert trace.unsorted == 0
    again = read(tmp_path, "\n".join(map(json.dumps, json.loads(said))), "talks.jsonl", chats=chats)
    assert again.rows == trace.rows
    assert read(tmp_path, said, "talks.json", chats=Chats(0.5, 10.0, 4)).rows != trace.rows


def test_conversations_begin_at_the_rate_asked_for_and_turns_after_a_thought(tmp_path: Path) -> None:
    said = json.dumps([TALK] * 2000)
    trace = read(tmp_path, said, "talks.json", chats=Chats(sessions_per_s=2.0, think_s=30.0, seed=1))
    begins = {row.session_id: row.arrival_s for row in reversed(trace.rows)}
    assert max(begins.values()) == pytest.approx(1000, rel=0.1)
    pauses = [row.arrival_s - begins[row.session_id] for row in trace.rows if row.output_tokens == 3]
    assert sum(pauses) / len(pauses) == pytest.approx(30.4, rel=0.1)
    assert min(pauses) > 0.4  # the answer of 20 tokens is read first
    one, two = read(tmp_path, json.dumps([TALK]), "talks.json", chats=Chats(think_s=0.0)).rows
    assert two.arrival_s - one.arrival_s == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("entry", "reason", "message"),
    [
        ({"id": 1}, "malformed", "Object missing required field `conversations`"),
        ({"conversations": [{"from": "human"}]}, "malformed", "Object missing required field `value`"),
        (conversation(("narrator", "x")), "role", "from: unknown 'narrator'; known: system, human, user"),
    ],
)
def test_a_conversation_that_does_not_fit(tmp_path: Path, entry: object, reason: str, message: str) -> None:
    said = json.dumps([TALK, entry])
    with pytest.raises(lines.TraceError, match=f"entry 2: {message}"):
        read(tmp_path, said, "talks.json")
    assert read(tmp_path, said, "talks.json", bad_lines="skip").skipped == {reason: 1}


def test_a_broken_list_and_one_without_answers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(lines.TraceError, match=r"talks\.json: Input data was truncated; a list of conv"):
        read(tmp_path, "[", "talks.json")
    with pytest.raises(lines.TraceError, match="no requests; all were skipped: 1 no_turn"):
        read(tmp_path, json.dumps([conversation(("gpt", "x"))]), "talks.json")


def test_tokens_may_be_counted_by_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"?": 0, "one": 1, "two": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    said = json.dumps([conversation(("human", "one two one"), ("gpt", "two two"))])
    (row,) = read(tmp_path, said, "talks.json", chats=Chats(tokenizer=tmp_path)).rows
    assert (row.input_tokens, row.output_tokens) == (1 + 3 + 1, 2)
    with pytest.raises(
        ValueError, match=r"--tokenizer: .*nowhere is missing; a directory with tokenizer\.json"
    ):
        read(tmp_path, said, "talks.json", chats=Chats(tokenizer=tmp_path / "nowhere"))


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "format"),
    [
        (GOOD, "mooncake"),
        (HEADER + "2024-05-10 00:00:00,5,5\n", "azure"),
        (token_lines({}), "token_ids"),
        (json.dumps([TALK]), "sharegpt"),
        (json.dumps(TALK), "sharegpt"),
    ],
)
def test_the_format_is_found_out_whatever_the_name_and_compression(
    tmp_path: Path, text: str, format: str
) -> None:
    asked = read(tmp_path, text, format=format)
    assert read(tmp_path, "\n" + text, "trace").rows == asked.rows
    packed = read(tmp_path, gzip.compress(text.encode()), "trace.gz")
    assert packed.rows == asked.rows


def test_what_was_tried_is_told(tmp_path: Path) -> None:
    tried = r"its format is none of those known; tried: mooncake \(JSONL with timestamp, .*azure \(CSV with"
    with pytest.raises(lines.TraceError, match=tried):
        read(tmp_path, '{"prompt": "x"}\n')
    with pytest.raises(lines.TraceError, match=r"compressed; a name that ends in \.gz is expected"):
        read(tmp_path, gzip.compress(GOOD.encode()))
    with pytest.raises(ValueError, match="unknown trace format 'csv'; known: auto, mooncake, token_ids"):
        read(tmp_path, GOOD, format="csv")
    with pytest.raises(ValueError, match="bad_lines must be stop or skip, got 'drop'"):
        read(tmp_path, GOOD, bad_lines="drop")
    with pytest.raises(ValueError, match="block_tokens must be from 1 to 65536, got 0"):
        read(tmp_path, GOOD, block_tokens=0)


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        lines.TraceError, match=r"none\.jsonl: No such file or directory; the path of a JSONL"
    ):
        read_trace(tmp_path / "none.jsonl")
    monkeypatch.chdir(tmp_path)
    looked = re.escape(f"--trace: x/none: No such file or directory (looked for {tmp_path}/x/none); the path")
    with pytest.raises(lines.TraceError, match=looked):
        read_trace(Path("x/none"))
    with pytest.raises(lines.TraceError, match="is a directory; the path of a trace file is expected"):
        read_trace(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(lines.TraceError, match=r"pipe is a pipe, and a trace is read more than once"):
        read_trace(tmp_path / "pipe")


@pytest.mark.parametrize("text", ["", "\n \n", "\ufeff"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(lines.TraceError, match=r"trace\.jsonl: no requests; the file is empty"):
        read(tmp_path, text)


def test_a_torn_compressed_file_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress((GOOD * 100).encode())
    with pytest.raises(lines.TraceError, match="Compressed file ended before"):
        read(tmp_path, packed[:-9], "trace.gz")
    with pytest.raises(lines.TraceError, match="Not a gzipped file"):
        read(tmp_path, GOOD, "trace.gz")


# --- published traces ----------------------------------------------------------------------------


@pytest.mark.skipif("KVROUTE_TRACES" not in os.environ, reason="KVROUTE_TRACES does not say where traces are")
@pytest.mark.parametrize(
    ("name", "requests", "input_tokens", "hits"),
    [("conversation_trace.jsonl", 12_031, 12_035, 0.374), ("synthetic_trace.jsonl", 3993, 15_325, 0.651)],
)
def test_mooncakes_traces_have_the_figures_that_are_known_of_them(
    name: str, requests: int, input_tokens: float, hits: float
) -> None:
    trace = read_trace(Path(os.environ["KVROUTE_TRACES"]) / name)
    assert (len(trace.rows), trace.unsorted, trace.skipped) == (requests, 0, {})
    total = sum(row.input_tokens for row in trace.rows)
    assert total / requests == pytest.approx(input_tokens, abs=1)
    seen: set[int] = set()
    found = 0
    for row in trace.rows:
        full = row.block_ids[: row.input_tokens // 512]
        found += 512 * sum(id_ in seen for id_ in full)
        seen.update(full)
    assert found / total == pytest.approx(hits, abs=0.002)
