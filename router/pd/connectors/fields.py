"""Names of what engines read of prefill and decode in a request."""

from __future__ import annotations

PARAMS = "kv_transfer_params"
THRESHOLD = "cache_hit_threshold"

SGLANG_FIELDS = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "data_parallel_rank",
    }
)
"""`data_parallel_rank` is the older name of `routed_dp_rank`."""

CLIENT_FIELDS = SGLANG_FIELDS | {PARAMS, THRESHOLD, "ec_transfer_params"}
"""Top-level fields of the body by which a client could read or strand another's KV, or end an engine. None is
passed on from a client, whatever the connector. vLLM's `ec_transfer_params` are to encoder outputs what
`kv_transfer_params` are to KV."""
