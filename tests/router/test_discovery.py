"""What engines say about themselves, from texts in the shape that vLLM and SGLang write."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvroute.router.discovery import (
    EngineMetrics,
    engine_of,
    read_cards,
    read_event_sources,
    read_metrics,
    read_server_info,
)
from kvroute.types import EngineKind

VLLM = """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 14787.0
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79598671399e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 100.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",engine="0",\
hash_block_size="None",mamba_block_size="None",num_gpu_blocks="128"} 1.0
"""

SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 5.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 7.0
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.5
# TYPE sglang:cache_config_info gauge
sglang:cache_config_info{num_pages="4096",page_size="64"} 1.0
"""


def test_vllm() -> None:
    assert read_metrics(VLLM) == EngineMetrics(
        engine=EngineKind.VLLM,
        running=3,
        waiting=2,
        kv_usage_ratio=0.25,
        block_size_tokens=32,
        kv_tokens=4096,
        data_parallel_size=1,
        started_at=1795986713.99,
    )


def test_sglang() -> None:
    assert read_metrics(SGLANG) == EngineMetrics(
        engine=EngineKind.SGLANG,
        running=5,
        waiting=7,
        kv_usage_ratio=0.5,
        block_size_tokens=64,
        kv_tokens=262_144,
    )


def test_series_of_several_engines_are_ranks_of_one_worker() -> None:
    ranks = "".join(
        f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {rank}.0\n'
        f'vllm:num_requests_waiting{{engine="{rank}",model_name="m"}} 1.0\n'
        f'vllm:kv_cache_usage_perc{{engine="{rank}",model_name="m"}} {rank / 10}\n'
        for rank in (8, 9)
    )
    found = read_metrics(ranks)
    assert (found.data_parallel_size, found.running, found.waiting) == (2, 17, 2)
    assert found.kv_usage_ratio == pytest.approx(0.85)


def test_the_older_name_of_the_usage_series() -> None:
    assert read_metrics('vllm:gpu_cache_usage_perc{model_name="m"} 0.75\n').kv_usage_ratio == 0.75


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00\xff not metrics",
        "<html>",
        "vllm:num_requests_running{",
        'vllm:num_requests_running{engine="0"} many\n',
        "num_requests_running_total 3\n",
        "# vllm:num_requests_running 3\n",
    ],
)
def test_what_is_not_there_is_unknown_and_not_zero(text: str) -> None:
    assert read_metrics(text) == EngineMetrics()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_a_number_that_is_none_is_unknown(value: str) -> None:
    found = read_metrics(
        f'vllm:num_requests_running{{engine="0"}} {value}\nvllm:kv_cache_usage_perc{{engine="0"}} {value}\n'
    )
    assert (found.running, found.kv_usage_ratio) == (None, None)


@pytest.mark.parametrize("size", ["None", "0", "-16", "16.0", "²", ""])
def test_a_block_size_that_is_none_is_unknown(size: str) -> None:
    assert read_metrics(f'vllm:cache_config_info{{block_size="{size}"}} 1.0\n').block_size_tokens is None


def test_labels_may_hold_braces_quotes_and_line_breaks() -> None:
    text = 'vllm:num_requests_running{model_name="a}b \\" c\\n",engine="1"} 4.0\n'
    assert (read_metrics(text).running, read_metrics(text).data_parallel_size) == (4, 1)


def test_cards_keep_every_field_and_what_is_no_card_is_left_out() -> None:
    card = {"id": "m", "owned_by": "vllm", "max_model_len": 4096, "permission": [{"id": "p"}]}
    assert read_cards({"object": "list", "data": [card, {"object": "model"}, {"id": 3}, "m"]}) == [card]


@pytest.mark.parametrize("answer", [None, [], "m", {}, {"data": None}, {"data": {"id": "m"}}])
def test_an_answer_that_is_no_list_of_models_has_no_cards(answer: Any) -> None:
    assert read_cards(answer) == []


@pytest.mark.parametrize(
    ("owner", "kind"), [("vllm", EngineKind.VLLM), ("sglang", EngineKind.SGLANG), ("me", None), (None, None)]
)
def test_the_owner_of_the_cards_tells_the_engine(owner: str | None, kind: EngineKind | None) -> None:
    assert engine_of([{"id": "m", "owned_by": owner}]) == kind


@pytest.mark.parametrize(
    ("answer", "size"),
    [
        ({"page_size": 64, "tp_size": 1}, 64),
        ({"vllm_config": {"cache_config": {"block_size": 16}}}, 16),
        ({"vllm_config": "a long string"}, None),
        ({"vllm_config": {"cache_config": None}}, None),
        ({"page_size": True}, None),
        ({"page_size": "64"}, None),
        ({"page_size": 0}, None),
        ([], None),
        (None, None),
    ],
)
def test_block_size_from_server_info(answer: Any, size: int | None) -> None:
    assert read_server_info(answer) == size


@pytest.mark.parametrize("answer", [None, [], "tcp", {"0": "tcp://a"}, {"0": {"endpoint": 1}}])
def test_no_event_sources(answer: Any) -> None:
    assert read_event_sources(answer) == {}


def test_event_sources_by_rank() -> None:
    ranks = {"0": {"endpoint": "tcp://a:1", "replay_endpoint": "tcp://a:2"}, "1": {"endpoint": "tcp://a:3"}}
    assert read_event_sources(ranks) == ranks


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_running{" + "a" * 60_000 + "} 1",
        'vllm:num_requests_running{a="' + "\\\\" * 60_000 + "} 1",
        'vllm:cache_config_info{block_size="' + "9" * 5000 + '"} 1',
        "vllm:num_requests_running 1e308\nvllm:num_requests_running 1e308",
    ],
)
def test_hostile_metrics_are_read_quickly_and_as_unknown(line: str) -> None:
    started = time.perf_counter()
    metrics = read_metrics(line)
    assert time.perf_counter() - started < 0.5
    assert metrics.running in (None, 1)
    assert metrics.block_size_tokens is None
