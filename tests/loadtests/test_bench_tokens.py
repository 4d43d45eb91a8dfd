from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvroute.loadtests import bench_tokens
from kvroute.loadtests.bench_tokens import STAGES, TokensBench, run_bench_tokens, show_bench_tokens
from kvroute.router.parsed_request import ParsedRequest
from tests.conductor.tokens.tiny import write


def test_figures_have_the_names_that_reports_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_tokens, "SIZES_BYTES", (2_000, 3_000))
    monkeypatch.setattr(bench_tokens, "CHAT_BYTES", 12_000)
    monkeypatch.setattr(bench_tokens, "LONG_BYTES", 10_000)
    monkeypatch.setattr(bench_tokens, "PARSE_IN_THREAD_BYTES", 8_000)
    read: set[tuple[bool, bool]] = set()
    parse = bench_tokens.parse_request

    def parse_request(path: bytes, headers: Any, body: bytes, source: Any) -> ParsedRequest:
        read.add((len(body) > 8_000, threading.current_thread().name.startswith("read")))
        return parse(path, headers, body, source)

    monkeypatch.setattr(bench_tokens, "parse_request", parse_request)
    result = run_bench_tokens(TokensBench(write(tmp_path), rounds=2))
    assert read == {(False, False), (True, True)}
    assert result["encoder"] == "fastokens"
    assert [row["bytes"] for row in result["fresh"]] == [2_000, 3_000]
    for row in [*result["fresh"], result["chat"]["last"]]:
        assert row["min_ms"] <= row["p50_ms"] <= row["max_ms"]
        assert set(row) - {"bytes"} == {"p50_ms", "min_ms", "max_ms", *(f"{stage}_ms" for stage in STAGES)}
    assert [row["messages"] for row in result["loop_hold"]] == [1, 5, 50]
    shown = show_bench_tokens(result)
    assert "fastokens" in shown
    assert "3 KB fresh" in shown


def test_rounds_are_checked() -> None:
    with pytest.raises(ValueError, match="rounds must be at least 1, not 0"):
        TokensBench(Path("x"), rounds=0)


def test_a_tokenizer_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no ids of a plain chat: template"):
        run_bench_tokens(TokensBench(write(tmp_path, None), rounds=1))
