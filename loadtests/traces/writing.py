"""Requests as the load generators of others read them, one line at a time.

* Mooncake's JSONL: aiperf 0.13 (`--custom-dataset-type mooncake_trace`, with `--isl-block-size` unless
  blocks have 512 tokens), Dynamo's replay (`trace_block_size`), and SGLang's bench_serving
  (`--dataset-name mooncake`, which sees only which ids are equal: it makes 128 words for each).
* Text: vLLM's `vllm bench serve --dataset-name custom --custom-output-len -1 --disable-shuffle
  --skip-chat-template` sends these very prompts, in this order, at a rate of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvroute.loadtests.traces.arrivals import Arrival
from kvroute.loadtests.traces.cuts import Cut
from kvroute.loadtests.traces.prompts import Prompts


def write_mooncake(path: Path, arrivals: Iterable[Arrival], cut: Cut, sessions: bool = False) -> int:
    """How many were written; hash ids stand for `cut.block_tokens`, and times are rounded to ms.

    `sessions` adds session_id, for our own reader: others would send a session's requests one after the
    other, each with all before it in front. ValueError when the file cannot be written.
    """

    def lines() -> Iterable[dict[str, Any]]:
        for arrival in arrivals:
            tokens = arrival.view.prompt_tokens
            line = {
                "timestamp": round(arrival.arrival_s * 1e3),
                "input_length": tokens,
                "output_length": arrival.output_tokens,
                "hash_ids": cut.all(arrival.block_ids, tokens),
            }
            if sessions and arrival.view.session_id is not None:
                line["session_id"] = arrival.view.session_id
            yield line

    return _write(path, lines())


def write_text(path: Path, arrivals: Iterable[Arrival], prompts: Prompts) -> int:
    """How many were written, as vLLM's custom dataset: the prompt's text and its output tokens."""
    return _write(
        path,
        (
            {
                "prompt": prompts.text(arrival.block_ids, arrival.view.prompt_tokens),
                "output_tokens": arrival.output_tokens,
            }
            for arrival in arrivals
        ),
    )


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> int:
    count = 0
    try:
        with path.open("wb") as file:
            for line in lines:
                file.write(msgspec.json.encode(line) + b"\n")
                count += 1
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; the path of a file to write is expected") from None
    return count
