"""`kvroute plan capacity`: what a model's KV cache takes, and how many requests a GPU's memory holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvroute.loadtests.plan.show import Plot, Report, Series
from kvroute.policies.costs import paging
from kvroute.policies.costs.architectures import cache_dtype, read_config
from kvroute.policies.costs.geometry import KvGeometry, stage_layers
from kvroute.policies.costs.units import format_bytes, parse_bytes

MAX_CONFIG_BYTES = 4 * 2**20
MAX_TOKENS = 100_000_000
MAX_LENGTHS = 32


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """`memory_bytes` is for KV on each GPU. One instance is `tp` x `pp` GPUs; `dp` is how many instances."""

    config: Mapping[str, Any]
    memory_bytes: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    kv_dtype: str = "auto"
    block_tokens: int = 16
    lengths: tuple[int, ...] = (1024, 8192, 32768)
    output_tokens: int = 256
    assume_standard: bool = False

    def __post_init__(self) -> None:
        for field in ("dp", "block_tokens", "output_tokens"):
            _check(field, getattr(self, field), least=0 if field == "output_tokens" else 1)
        for length in self.lengths:
            _check("lengths", length)


def kv_memory_bytes(
    kv_memory: str | None,
    gpu_memory: str | None,
    utilisation: float,
    weights: str | None,
    overhead: str | None,
    gpus: int,
) -> int:
    """KV memory of one GPU: as given, or gpu_memory x utilisation - weights / gpus - overhead.

    `weights` is the whole model's and lies evenly on the `gpus` of an instance; `overhead` (activations, CUDA
    graphs) is each GPU's. ValueError if both ways are mixed or nothing is left.
    """
    if kv_memory is not None:
        if any(given is not None for given in (gpu_memory, weights, overhead)):
            raise ValueError(
                "--kv-memory: already the memory for KV; without --gpu-memory, --weights, --overhead"
            )
        return parse_bytes(kv_memory, "--kv-memory")
    if gpu_memory is None:
        raise ValueError(
            "--kv-memory: missing; a size such as 40GiB is expected, or --gpu-memory and --weights"
        )
    if not 0 < utilisation <= 1:
        raise ValueError(f"--utilisation: {utilisation} is not above 0 and at most 1")
    if weights is None:
        raise ValueError("--weights: missing; the size of the model's weights is expected with --gpu-memory")
    own_bytes = parse_bytes(weights, "--weights") / max(1, gpus)
    if overhead is not None:
        own_bytes += parse_bytes(overhead, "--overhead", zero_ok=True)
    left_bytes = int(parse_bytes(gpu_memory, "--gpu-memory") * utilisation - own_bytes)
    if left_bytes <= 0:
        raise ValueError(
            f"--gpu-memory: {gpu_memory} x {utilisation} leaves no KV memory after {format_bytes(own_bytes)} "
            f"of weights and overhead on each GPU; a larger GPU or more of them are expected"
        )
    return left_bytes


def read_config_file(path: Path) -> dict[str, Any]:
    """A config.json. ValueError if there is none, or it is no JSON object."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"--model: {path}: {error.strerror}; the path of a config.json is expected"
        ) from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise ValueError(
            f"--model: {path}: more than {format_bytes(MAX_CONFIG_BYTES)}; a config.json is expected"
        )
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--model: {path}: not JSON ({error}); a config.json is expected") from None
    if not isinstance(config, dict):
        raise ValueError(f"--model: {path}: a {type(config).__name__}; a JSON object is expected")
    return config


def parse_lengths(text: str) -> tuple[int, ...]:
    """ "1024,8192" in that order, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= len(str(MAX_TOKENS)) for part in parts):
        raise ValueError(
            f"--lengths: {text[:80]!r} is no list of token counts; 1024,8192 for example is expected"
        )
    if len(parts) > MAX_LENGTHS:
        raise ValueError(f"--lengths: {len(parts)} lengths; at most {MAX_LENGTHS} are expected")
    return tuple(dict.fromkeys(int(part) for part in parts))


def plan_capacity(plan: CapacityPlan) -> tuple[Report, Plot]:
    """The figures for one instance of the model. ValueError names what is wrong in config or split."""
    model = read_config(plan.config, kv_dtype=plan.kv_dtype, assume_standard=plan.assume_standard)
    ranks = model.ranks(plan.tp, plan.pp)
    requests = [_request(plan, model, ranks, tokens) for tokens in plan.lengths]
    data = {**_totals(plan, model, ranks), "requests": requests}
    for name in ("bytes_at", "per_rank_bytes_at"):
        data[name] = {str(row["tokens"]): row.pop(name) for row in requests}
    return _report(plan, model, data), _plot(plan, model, ranks)


def _totals(plan: CapacityPlan, model: KvGeometry, ranks: tuple[KvGeometry, ...]) -> dict[str, Any]:
    dtype, reason = cache_dtype(plan.config, plan.kv_dtype)
    slots = paging.token_slots(ranks, plan.memory_bytes)
    kept = sum(rank.bytes_per_token for rank in ranks) * plan.tp
    return {
        "model_type": model.model_type,
        "layers": len(model.layers),
        "attention_layers": sum(layer.attention is not None for layer in model.layers),
        "state_layers": sum(bool(layer.states) for layer in model.layers),
        "windows_tokens": list(model.windows_tokens),
        "kv_dtype": dtype.name,
        "kv_dtype_reason": reason,
        "bytes_per_token": model.bytes_per_token,
        "growth_bytes_per_token": model.growth_bytes_per_token,
        "state_bytes_per_sequence": model.state_bytes,
        "tp": plan.tp,
        "pp": plan.pp,
        "dp": plan.dp,
        "stage_layers": list(stage_layers(len(model.layers), plan.pp)),
        "bytes_per_token_per_rank": max(rank.bytes_per_token for rank in ranks),
        "replication": kept / model.bytes_per_token if model.bytes_per_token else 1.0,
        "kv_memory_bytes": plan.memory_bytes,
        "token_slots": slots,
        "token_slots_all_dp": slots * plan.dp if slots is not None else None,
        "block_tokens": plan.block_tokens,
        "blocks": slots // plan.block_tokens if slots is not None else None,
        "mean_tail_waste_tokens": paging.mean_tail_waste_tokens(plan.block_tokens),
    }


def _request(
    plan: CapacityPlan, model: KvGeometry, ranks: tuple[KvGeometry, ...], tokens: int
) -> dict[str, Any]:
    end_tokens = tokens + plan.output_tokens
    start = paging.sequences_that_fit(ranks, plan.memory_bytes, tokens, plan.block_tokens)
    steps = (
        paging.steps_that_fit(
            ranks, plan.memory_bytes, start, tokens, plan.block_tokens, most_steps=plan.output_tokens
        )
        if start
        else None
    )
    return {
        "tokens": tokens,
        "bytes_at": model.sequence_bytes(tokens),
        "per_rank_bytes_at": max(rank.sequence_bytes(tokens) for rank in ranks),
        "allocated_tokens": paging.allocated_tokens(tokens, plan.block_tokens),
        "tail_waste_tokens": paging.tail_waste_tokens(tokens, plan.block_tokens),
        "concurrent": start,
        "output_tokens": plan.output_tokens,
        "bytes_at_end": model.sequence_bytes(end_tokens),
        "concurrent_at_end": paging.sequences_that_fit(
            ranks, plan.memory_bytes, end_tokens, plan.block_tokens
        ),
        "steps_until_full": steps,
    }


def _report(plan: CapacityPlan, model: KvGeometry, data: dict[str, Any]) -> Report:
    columns = ("tokens", "KV", "on a rank", "tail waste", "fit at start", "fit at end", "steps until full")
    rows = tuple(
        (
            f"{row['tokens']}",
            format_bytes(data["bytes_at"][str(row["tokens"])]),
            format_bytes(data["per_rank_bytes_at"][str(row["tokens"])]),
            f"{row['tail_waste_tokens']}",
            f"{row['concurrent']}",
            f"{row['concurrent_at_end']}",
            _steps(row["steps_until_full"], plan.output_tokens),
        )
        for row in data["requests"]
    )
    title = f"KV capacity of {model.model_type}, tp {plan.tp}, pp {plan.pp}, dp {plan.dp}"
    return Report(title, columns, rows, data, notes=_notes(plan, data))


def _steps(steps: int | None, output_tokens: int) -> str:
    if steps is None:
        return "-"
    return "all" if steps >= output_tokens else str(steps)


def _notes(plan: CapacityPlan, data: dict[str, Any]) -> tuple[str, ...]:
    notes = [
        f"{format_bytes(data['bytes_per_token'])} per token in {data['attention_layers']} attention layers "
        f"of {data['layers']}, {data['kv_dtype']} ({data['kv_dtype_reason']}).",
        f"{format_bytes(data['bytes_per_token_per_rank'])} per token on the fullest rank; all ranks together "
        f"keep {data['replication']:.2f} copies.",
    ]
    if data["token_slots"] is not None:
        notes.append(
            f"{data['token_slots']} token slots in {format_bytes(plan.memory_bytes)} of KV memory on each "
            f"GPU: {data['blocks']} blocks of {plan.block_tokens}; a sequence wastes "
            f"{data['mean_tail_waste_tokens']:g} tokens on average."
        )
    if data["windows_tokens"]:
        windows = ", ".join(map(str, data["windows_tokens"]))
        notes.append(
            f"Layers with a window keep {windows} tokens; past them a token adds "
            f"{format_bytes(data['growth_bytes_per_token'])}. Slots ignore the windows, requests do not."
        )
    if data["state_bytes_per_sequence"]:
        state = format_bytes(data["state_bytes_per_sequence"])
        notes.append(
            f"{state} of recurrent state per sequence, whatever its length, in {data['state_layers']} layers."
        )
    if plan.dp > 1:
        notes.append(f"Figures are for one of {plan.dp} instances: each has a cache of its own.")
    notes.append(
        f"fit at start: requests of that many prompt tokens at once; at end: with {plan.output_tokens} "
        "output tokens each; steps until full: decode steps the first number can make together."
    )
    return tuple(notes)


def _plot(plan: CapacityPlan, model: KvGeometry, ranks: tuple[KvGeometry, ...]) -> Plot:
    """Requests that fit over their length, at every power of two."""
    longest = max(131_072, *plan.lengths)
    lengths = [2**power for power in range(7, longest.bit_length() + 1)]
    fit = [paging.sequences_that_fit(ranks, plan.memory_bytes, n, plan.block_tokens) for n in lengths]
    shown = [(n, float(count)) for n, count in zip(lengths, fit, strict=True) if count]
    line = Series(model.model_type, [n for n, _ in shown], [count for _, count in shown])
    memory = format_bytes(plan.memory_bytes)
    return Plot(
        f"Requests that fit in {memory} of KV memory on each GPU (tp {plan.tp}, pp {plan.pp})",
        "tokens per request",
        "requests at once",
        (line,),
        log_x=True,
        log_y=True,
        marks=tuple((n, str(n)) for n in plan.lengths),
    )


def _check(field: str, value: int, least: int = 1) -> None:
    if not least <= value <= MAX_TOKENS:
        raise ValueError(
            f"{field}: {value} is not usable; a whole number from {least} to {MAX_TOKENS} is expected"
        )
