"""The section of the configuration for fleets in which prefill and decode are apart."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvroute.config_groups import Group, LinkName, Seconds

Port = Annotated[int, Field(gt=0, le=65535)]


class PdLinksConfig(Group):
    """What carries KV from a prefill to a decode worker, by what they share; measured as they go."""

    host: LinkName = "ib-8x400g"
    rack: LinkName = "ib-400g"
    zone: LinkName = "roce-100g"
    far: LinkName = Field(default="roce-100g", description="that share nothing, or of which nothing is known")


class PdConfig(Group):
    """Prefill and decode on different workers: in effect as soon as a worker is not for both."""

    connector: str | None = Field(
        default=None,
        description="nixl, mooncake, p2p-nccl, sglang, shared-storage, decode-first, or one of a plugin. "
        "Default: what the workers tell of themselves, else sglang for SGLang and nixl for all others",
    )
    kv_lease_s: Seconds = Field(
        default=30.0, description="how long the engines keep KV that nobody has fetched"
    )
    prefill_timeout_s: Seconds = Field(
        default=120.0, description="of a prefill leg; then another worker does it, or the decode worker all"
    )
    prefill_grace_s: Annotated[float, Field(ge=0, le=60)] = Field(
        default=1.0,
        description="a prefill leg that nobody waits for any more goes on for so long, since only its answer "
        "names the KV to be let go; one that is cut off in its last step keeps KV for the lease",
    )
    decode_timeout_s: Seconds = Field(
        default=120.0, description="from the handoff to the first byte of a stream; then another attempt"
    )
    prepare_timeout_s: Seconds = Field(
        default=2.0, description="what a connector has to ask a worker before it can be used"
    )
    client_fields: Literal["strip", "refuse", "forward"] = Field(
        default="strip", description="what becomes of transfer parameters and ranks that a client sends"
    )
    bootstrap_port: Port = Field(default=8998, description="of prefill workers (SGLang, Mooncake)")
    register_port: Port | None = Field(
        default=None, description="where P2pNccl workers register; None: they are listed with p2p_address"
    )
    cache_threshold: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8, description="decode-first: share of the prompt that a decode worker must hold"
    )
    links: PdLinksConfig = PdLinksConfig()
