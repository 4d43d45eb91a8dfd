"""The sections of the configuration: what each field means, what it may be, and its default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from kvroute.endpoint import Endpoint
from kvroute.policies.costs.links import LINKS
from kvroute.preset_file import load_speed
from kvroute.types import EngineKind, Role

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]


class Group(BaseModel):
    """A section: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _zmq_endpoint(value: str) -> str:
    parts = re.fullmatch(r"(?:ipc://\S+|tcp://(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5}))", value)
    if parts is None or (parts[1] is not None and not 1 <= int(parts[1]) <= 65535):
        raise ValueError(f"{value!r} is no ZMQ endpoint; accepted: tcp://host:port, ipc:///path")
    return value


def _lookup_address(value: str) -> str:
    parts = re.fullmatch(r"(?:unix:///\S+|tcp://(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5}))", value)
    if parts is None or (parts[1] is not None and int(parts[1]) > 65535):
        raise ValueError(f"{value!r} is no lookup socket; accepted: unix:///path, tcp://host:port")
    return value


def _speed(value: str) -> str:
    load_speed(value)
    return value


SpeedName = Annotated[str, AfterValidator(_speed)]
"""A preset by name, or a file that `kvroute calibrate` wrote."""


def _p2p_address(value: str) -> str:
    parts = re.fullmatch(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})", value)
    if parts is None or not 1 <= int(parts[1]) <= 65535:
        raise ValueError(f"{value!r} is no address of a p2p tier; accepted: host:port")
    return value


def _link(value: str) -> str:
    if value not in LINKS:
        raise ValueError(f"{value!r} is no known link; known: {', '.join(LINKS)}")
    return value


LinkName = Annotated[str, AfterValidator(_link)]
P2pAddress = Annotated[str, AfterValidator(_p2p_address)]
ZmqEndpoint = Annotated[str, AfterValidator(_zmq_endpoint)]
LookupAddress = Annotated[str, AfterValidator(_lookup_address)]


class KvEvents(Group):
    """Where an engine publishes its KV events; only needed when it does not say so itself."""

    endpoint: ZmqEndpoint = Field(
        description="connected to; with a `*` we bind and the engine connects; rank i is at port + i"
    )
    replay_endpoint: ZmqEndpoint | None = Field(
        default=None, description="of the engine, whose host stands for a `*`; None: what is missed is lost"
    )
    topic: str = Field(default="", description="prefix of the topics to take; empty takes all")


class PlaceConfig(Group):
    """Where a worker stands; what is equal, and not empty, in two workers is what they share."""

    host: str = ""
    rack: str = ""
    zone: str = ""


class WorkerConfig(Group):
    """An engine to route to. A bare URL string is accepted in its place."""

    url: str
    engine: EngineKind | None = Field(default=None, description="discovered when not given")
    role: Role = Field(default=Role.BOTH, description="prefill, decode or both")
    place: PlaceConfig = PlaceConfig()
    bootstrap_port: Annotated[int, Field(gt=0, le=65535)] | None = Field(
        default=None, description="of a prefill worker, in place of pd.bootstrap_port"
    )
    p2p_address: P2pAddress | None = Field(
        default=None, description="host:port of its P2pNccl engine, where it does not register itself"
    )
    api_key: SecretStr | None = Field(
        default=None, description="sent to this worker in place of the client's key"
    )
    kv_events: KvEvents | None = Field(
        default=None, description="default: what the engine's /kv_event_sources says"
    )
    speed: SpeedName | None = Field(default=None, description="as `speed` at the top, for this worker")
    silent_tier_blocks: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="size of a CPU or disk tier that sends no events: what leaves the GPU is thought there",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("api_key")
    @classmethod
    def _fit_for_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not (
            value.get_secret_value().isascii() and value.get_secret_value().isprintable()
        ):
            raise ValueError("only printable ASCII characters are accepted")
        return value

    @field_validator("url")
    @classmethod
    def _usable_url(cls, value: str) -> str:
        return Endpoint.parse(value).url


class PolicyConfig(Group):
    """A policy by its entry-point name, with its options. A bare name is accepted in its place."""

    name: str = "ttft"
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Timeouts(Group):
    """Per phase of one upstream attempt, and for the client's side of the connection."""

    connect_s: Seconds = 5.0
    first_byte_s: Seconds = Field(
        default=600.0, description="request sent to first body byte; covers queue and prefill"
    )
    idle_s: Seconds = Field(default=300.0, description="longest silence between two body reads")
    total_s: Seconds = Field(default=3600.0, description="whole request, retries included")
    request_s: Seconds = Field(
        default=60.0, description="a client's request head and body must arrive within it"
    )
    client_idle_s: Seconds = Field(
        default=75.0, description="a client's connection without a request is closed after it"
    )
    client_stall_s: Seconds = Field(
        default=300.0, description="a client that reads nothing for so long is cut"
    )
    upstream_keep_alive_s: Seconds = Field(
        default=4.0, description="pooled connections are reused no later; below the engines' own 5 s"
    )


class Limits(Group):
    """Every bound the gateway keeps."""

    body_bytes: Count = 64 * 2**20
    header_bytes: Count = 64 * 2**10
    buffered_bytes: Count = Field(
        default=2**30, description="request bodies held at once, over all connections"
    )
    connections: Count = Field(
        default=16_384, description="client connections; more are answered 429 and closed"
    )
    requests: Count = Field(default=8_192, description="requests in flight; more are answered 429")
    requests_per_worker: Count = Field(default=1_024, description="upstream connections in use per worker")
    held_requests: Annotated[int, Field(ge=0)] = Field(
        default=1_024, description="requests that wait for a worker to free, where the policy holds; 0: none"
    )
    held_s: Seconds = Field(
        default=300.0, description="longest such wait; then the best worker gets it as it is"
    )


class Retry(Group):
    """Attempts on other workers before the first relayed byte; never after it."""

    attempts: Count = Field(default=3, description="first one included")
    statuses: tuple[Annotated[int, Field(ge=400, le=599)], ...] = (429, 500, 502, 503)
    budget_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.2, description="retries per request, long run"
    )
    budget_burst: Annotated[int, Field(ge=0)] = Field(default=20, description="retries saved up at most")


class Health(Group):
    """Active probes; outcomes of real traffic count as well."""

    interval_s: Seconds = 1.0
    timeout_s: Seconds = 5.0
    unhealthy_after: Count = Field(default=3, description="failed probes in a row")
    healthy_after: Count = Field(default=1, description="good probes in a row")
    path: Annotated[str, Field(pattern=r"^/[!-~]*$")] = "/health"
    metrics_interval_s: Seconds = Field(
        default=1.0, description="poll of /metrics; backs off when the engine is slow"
    )
    models_interval_s: Seconds = Field(
        default=2.0, description="poll of /v1/models, for adapters loaded later"
    )
    stale_after_s: Seconds = Field(default=10.0, description="an older metrics sample is unknown")
    slow_start_s: Annotated[float, Field(ge=0)] = Field(
        default=10.0, description="ramp of a worker that joins; 0 is off"
    )


class Breaker(Group):
    """Per worker: opens on failures in a row, then lets one request through to see."""

    failures: Count = 5
    open_s: Seconds = 5.0


class Admin(Group):
    """Where workers are listed, added, drained and removed."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8081, description="0 takes a free one")
    token: SecretStr | None = Field(
        default=None, description="required as a Bearer token when host is not a loopback address"
    )
    enabled: bool = True

    @model_validator(mode="after")
    def _guarded(self) -> Admin:
        if self.enabled and self.host not in {"127.0.0.1", "::1", "localhost"} and self.token is None:
            raise ValueError("admin.token is required when admin.host is not 127.0.0.1, ::1 or localhost")
        return self


class PrefixIndex(Group):
    """What is known of the workers' caches: confirmed by KV events, or predicted from what was routed."""

    chunk_bytes: Annotated[int, Field(ge=64, le=65536)] = Field(
        default=512, description="block of a prompt whose tokens are not known"
    )
    max_bytes: Annotated[int, Field(ge=2**20)] = Field(
        default=512 * 2**20,
        description="memory of the index; a confirmed block takes about 40 bytes per engine that holds it. "
        "Predictions go first when it is full; that confirmed ones must go is logged",
    )
    prediction_s: Seconds = Field(
        default=10.0, description="a prediction that events have not confirmed by then is forgotten"
    )
    kv_events: bool = Field(default=True, description="follow the workers that publish KV events")


class DecisionLog(Group):
    """Decisions with every candidate's terms, and what came of them: in the log and at /admin/decisions."""

    ratio: Annotated[float, Field(ge=0, le=1)] = Field(default=0.0, description="share of requests logged")
    size: Count = Field(default=256, description="decisions kept for /admin/decisions")


class PrefillConfig(Group):
    """What prompt tokens of a model weigh and take, to tell what cache hits save."""

    token_s: Annotated[float, Field(ge=0)] = Field(default=0.0, description="GPU seconds per prompt token")
    attention_s: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="seconds per pair of a token and one before it"
    )
    kv_bytes_per_token: Annotated[int, Field(ge=0)] = 0
    gpus: Count = Field(default=1, description="that work on one prefill")


class ModelConfig(Group):
    """How prompts of one model become token ids, and what they cost. A bare path stands for `tokenizer`."""

    tokenizer: Path | None = Field(
        default=None, description="directory of tokenizer.json and tokenizer_config.json, or the former"
    )
    chat_template: Path | None = Field(default=None, description="default: the tokenizer's own")
    source: Literal["local", "engine", "bytes"] = Field(
        default="local",
        description="local: this tokenizer; engine: the worker's /tokenize; bytes: approximate keys only",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="the engine's own --default-chat-template-kwargs"
    )
    engine: EngineKind = Field(default=EngineKind.VLLM, description="whose rules turn requests into prompts")
    tokenize_timeout_s: Seconds = Field(
        default=0.05, description="with source engine: after that a prompt is routed by approximate keys"
    )
    prefill: PrefillConfig = PrefillConfig()

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"tokenizer": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _complete(self) -> ModelConfig:
        if (self.source == "local") != (self.tokenizer is not None):
            raise ValueError(
                "give `tokenizer`, or another `source` than local: engine, bytes"
                if self.tokenizer is None
                else f"`tokenizer` goes with source local, not with {self.source}"
            )
        return self


class ServiceConfig(Group):
    """A publisher of KV events that `kvroute conductor` follows from its start; see POST /register."""

    endpoint: ZmqEndpoint
    instance_id: Annotated[str, Field(min_length=1, max_length=256)]
    modelname: Annotated[str, Field(min_length=1, max_length=256)]
    block_size: Count
    type: Literal["vLLM", "SGLang", "Mooncake"] = "vLLM"
    replay_endpoint: ZmqEndpoint | None = None
    lora_name: str = ""
    tenant_id: str = "default"
    dp_rank: Annotated[int, Field(ge=0)] = 0
    additionalsalt: str = ""


class ConductorConfig(Group):
    """The index as a service of its own: how `kvroute conductor` serves it, and how a gateway asks it."""

    connect: LookupAddress | None = Field(
        default=None,
        description="a remote conductor's lookup socket, which this gateway asks: "
        "unix:///path or tcp://host:port",
    )
    budget_s: Seconds = Field(
        default=0.005, description="a lookup that takes longer is done without, by what this gateway routed"
    )
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=13333, description="0 takes a free one")
    lookup: LookupAddress | None = Field(
        default=None, description="where `kvroute conductor` takes gateways' lookups"
    )
    snapshot_file: Path | None = Field(
        default=None, description="the index survives a restart in it; for the gateway's own index as well"
    )
    snapshot_interval_s: Seconds = 60.0
    services: tuple[ServiceConfig, ...] = Field(
        default=(), description="publishers that `kvroute conductor` follows without being asked"
    )

    @field_validator("services")
    @classmethod
    def _no_duplicates(cls, services: tuple[ServiceConfig, ...]) -> tuple[ServiceConfig, ...]:
        ids = [f"{one.instance_id}|{one.tenant_id}|{one.dp_rank}" for one in services]
        twice = sorted({name for name in ids if ids.count(name) > 1})
        if twice:
            raise ValueError(f"instance, tenant and rank listed more than once: {', '.join(twice)}")
        return services


class RedisConfig(Group):
    """What several gateway replicas share; without `url` each knows only itself."""

    url: SecretStr | None = Field(default=None, description="redis://, rediss:// or unix://; Valkey as well")
    prefix: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] = Field(
        default="kvroute", description="of all keys, before a colon; replicas of one gateway have the same"
    )


class RetentionConfig(Group):
    """What engines are told of a request's KV, in fields of their own; they must be started for it."""

    hints: bool = Field(default=False, description="add such fields to requests")
    offloading: Literal["native", "lmcache"] = Field(
        default="native", description="the connector of vLLM's lower tiers"
    )
    cpu_tier_ratio: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="CPU tier over GPU cache of an engine; up to 1, one-offs are kept out of the tier",
    )
    sglang: Literal["session", "priority"] = Field(
        default="session",
        description="session: needs --enable-session-radix-cache; priority: --radix-eviction-policy "
        "priority, and orders the queue too",
    )
    session_idle_s: Seconds = Field(
        default=600.0, description="a session that sends nothing for so long is closed at its engines"
    )
    p2p: dict[str, P2pAddress] = Field(
        default_factory=dict,
        description="worker URL to host:port of its vLLM p2p tier; they pull from each other",
    )
    p2p_port: Annotated[int, Field(gt=0, le=65535)] | None = Field(
        default=None, description="of all others, at the worker's own host; None: they have no such tier"
    )
    p2p_link: LinkName = Field(default="roce-100g", description="what they pull over, for the price of it")
    pull_floor_s: Seconds = Field(
        default=1.0, description="what a first byte may take beyond three times the expected, with a pull"
    )
    pull_max_s: Seconds = Field(default=15.0, description="and what it may take at all")

    @field_validator("p2p")
    @classmethod
    def _canonical_urls(cls, value: dict[str, str]) -> dict[str, str]:
        return {Endpoint.parse(url).url: address for url, address in value.items()}


class Shutdown(Group):
    """SIGTERM: /readyz turns 503, traffic is served for a while, then streams may end, then all is closed."""

    keep_serving_s: Annotated[float, Field(ge=0)] = 3.0
    drain_s: Annotated[float, Field(ge=0)] = 30.0
