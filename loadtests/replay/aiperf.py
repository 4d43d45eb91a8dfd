"""aiperf (0.13) beside `kvroute replay`: the same requests to one endpoint, each held against the other's.

    python -m kvroute.loadtests.replay.aiperf --aiperf VENV/bin/aiperf --url http://127.0.0.1:8080

Mock engines stand behind the endpoint: they take four bytes for a token. So aiperf gets a tokenizer for
which each byte is one, and lengths four times as long.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from kvroute.loadtests.mock_engine.tokens import TOKEN_BYTES
from kvroute.loadtests.replay.player import Played
from kvroute.loadtests.replay.running import Due
from kvroute.loadtests.replay.saving import save_trace
from kvroute.loadtests.results.measured import Measured

TOKENIZER = "kvroute/bytes"
TRACE, ARTIFACTS, CACHE = "trace.jsonl", "artifacts", "hf"


def prepare(folder: Path, due: Due, block_tokens: int) -> None:
    """What a run of aiperf reads: the trace, and the tokenizer in a cache as Hugging Face keeps it.

    `block_tokens` are the engines': with larger blocks aiperf shares less of the prompts than the trace does.
    """
    save_trace(due, folder / TRACE, "mooncake", block_tokens)
    lines = [orjson.loads(line) for line in (folder / TRACE).read_bytes().splitlines()]
    for number, line in enumerate(lines):
        # A record of aiperf's tells its session, and nothing else of its line.
        line |= {"input_length": line["input_length"] * TOKEN_BYTES, "session_id": str(number)}
    (folder / TRACE).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    cached = folder / CACHE / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = cached / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1")
    for name, content in _tokenizer().items():
        (snapshot / name).write_bytes(orjson.dumps(content))


def _tokenizer() -> dict[str, Any]:
    """Files of a byte-level BPE without merges."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    # GPT-2's alphabet: the other bytes are the characters from 256 on.
    alphabet = [chr(code) for code in (*shown, *range(0x100, 0x200 - len(shown)))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {one: id_ for id_, one in enumerate(alphabet)}, "merges": []}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": level,
            "decoder": level,
            "model": model,
        },
        "tokenizer_config.json": kind,
        "config.json": {"model_type": "gpt2"},
    }


def command(aiperf: Path, folder: Path, url: str, model: str, block_tokens: int, seed: int) -> list[str]:
    """Of one run; other seeds make other prompts of the same structure."""
    body = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    return [
        *(str(aiperf), "profile", "--url", url, "--model", model, "--endpoint-type", "completions"),
        *("--streaming", "--use-server-token-count", "--extra-inputs", orjson.dumps(body).decode()),
        *("--input-file", str(folder / TRACE), "--custom-dataset-type", "mooncake_trace"),
        *("--fixed-schedule", "--isl-block-size", str(block_tokens * TOKEN_BYTES)),
        *("--tokenizer", TOKENIZER, "--random-seed", str(seed)),
        *("--no-server-metrics", "--ui-type", "none", "--artifact-dir", str(folder / ARTIFACTS)),
    ]


def environment(folder: Path) -> dict[str, str]:
    """Of a run: nothing is fetched, and our modules are not its own."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "HF_HOME": str(folder / CACHE), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def played(folder: Path) -> Played:
    """What a run measured, as replay would have it. aiperf does not tell when it began: its time 0 is such
    that the request which was sent soonest after it was due was sent in time.
    """
    trace = (folder / TRACE).read_bytes().splitlines()
    due_ns = [orjson.loads(line)["timestamp"] * 1_000_000 for line in trace]
    exported = (folder / ARTIFACTS / "profile_export.jsonl").read_bytes().splitlines()
    found = {int(one["metadata"]["conversation_id"]): one for one in map(orjson.loads, exported)}
    # In whole nanoseconds: seconds since 1970 as a float have no microseconds.
    lags_ns = {number: one["metadata"]["request_start_ns"] - due_ns[number] for number, one in found.items()}
    least_ns = min(lags_ns.values())
    return Played(
        [
            _measured(found[number], due_ns[number] / 1e9, (lags_ns[number] - least_ns) / 1e9)
            for number in sorted(found)
        ]
    )


def _measured(record: Mapping[str, Any], due_s: float, lag_s: float) -> Measured:
    metrics = {name: metric["value"] for name, metric in record["metrics"].items()}
    sent_s = due_s + lag_s
    if record.get("error"):
        return Measured(due_s, 0, 0, sent_s=sent_s, failure=str(record["error"]["type"]))
    return Measured(
        due_s,
        metrics["usage_prompt_tokens"],
        metrics["usage_completion_tokens"],
        sent_s=sent_s,
        first_s=sent_s + metrics["time_to_first_token"] / 1e3,
        end_s=sent_s + metrics["request_latency"] / 1e3,
        gpu_tokens=metrics["usage_prompt_cache_read_tokens"],
    )


# --- both, in turn ---------------------------------------------------------------------------------


def _table(made: Iterable[tuple[str, Played]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvroute.loadtests.replay.outcome import Counted, from_sending

    table = Table("tool", "requests", "TTFT ms", "E2E ms", "TPOT ms", "hit %", "sent late ms", box=None)
    for name, one in made:
        sent, requests = from_sending([one], 0), one.requests
        hit = sum(each.cached_tokens for each in requests) / sum(each.prompt_tokens for each in requests)
        table.add_row(
            name,
            str(sum(each.failure is None for each in requests)),
            *(str(sent["ttft"]), str(sent["e2e"])),
            str(Counted.of([each.tpot_s for each in requests if each.output_tokens > 1])),
            *(f"{100 * hit:.1f}", str(Counted.of(one.lags_s))),
        )
    console = Console(width=140)
    console.print(table)
    console.print("mean/p50/p99; latencies count from when a request was sent", highlight=False)


def _differences(theirs: Played, ours: Played) -> str:
    """Per request, aiperf's less ours."""
    import numpy as np

    pairs = list(zip(theirs.requests, sorted(ours.requests, key=lambda one: one.arrival_s), strict=True))
    same = [pair for pair in pairs if pair[0].cached_tokens == pair[1].cached_tokens]

    def median_ms(name: str, of: Sequence[tuple[Measured, Measured]]) -> str:
        waits = [[getattr(one, name) + one.arrival_s - (one.sent_s or 0.0) for one in pair] for pair in of]
        return f"{np.median([one - other for one, other in waits]) * 1e3:+.1f}" if of else "-"

    prompts = sum(one.prompt_tokens == other.prompt_tokens for one, other in pairs)
    answers = sum(one.output_tokens == other.output_tokens for one, other in pairs)
    return (
        f"of {len(pairs)} requests {prompts} have the same prompt tokens, {answers} the same output tokens, "
        f"{len(same)} the same cached tokens; medians of aiperf's less ours: TTFT "
        f"{median_ms('ttft_s', pairs)} ms ({median_ms('ttft_s', same)} where the same was cached), "
        f"E2E {median_ms('e2e_s', pairs)} ms"
    )


def main(
    aiperf: Annotated[Path, typer.Option(help="The command.")],
    url: Annotated[str, typer.Option(help="Root of an endpoint before mock engines.")],
    block_size: Annotated[int, typer.Option(help="Tokens per block of the engines.")] = 16,
    speed: Annotated[float, typer.Option(help="Arrivals so many times faster.")] = 2.0,
    scale: Annotated[float, typer.Option(help="Prompts and answers so many times as long.")] = 0.125,
    limit: Annotated[int, typer.Option(help="Requests of the mixed workload.")] = 150,
    rounds: Annotated[int, typer.Option(help="Replay, then aiperf, in each.")] = 3,
) -> None:
    """Latencies from sending as both tools have them, and the differences request by request."""
    import tempfile
    import time

    from kvroute.loadtests.replay.bodies import Form
    from kvroute.loadtests.replay.running import Access, Run, play
    from kvroute.loadtests.traces.workloads import generate

    trace, made, said = generate("mixed", 8000, 4.0, 1), [], []
    for number in range(rounds):
        due = Due(trace, speed, seed=1, scale=scale, limit=limit, salt=time.time_ns())
        ours, stopped = play(Run(Access(url), Form(prompts="text"), "mock", due))
        if stopped:
            raise typer.Exit(130)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepare(folder, due, block_size)
            asked = command(aiperf, folder, url, "mock", block_size, time.time_ns() % 2**31)
            ran = subprocess.run(asked, check=False, env=environment(folder), capture_output=True, text=True)
            if ran.returncode:
                typer.echo(ran.stdout[-4000:] + ran.stderr[-4000:], err=True)
                raise typer.Exit(1)
            theirs = played(folder)
        made += [(f"replay {number + 1}", ours), (f"aiperf {number + 1}", theirs)]
        said.append(_differences(theirs, ours))
    _table(made)
    typer.echo("\n".join(said))


if __name__ == "__main__":
    typer.run(main)
