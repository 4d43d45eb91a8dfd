"""One configuration: YAML file, then `KVROUTE_` environment, then flags, the later the stronger.

Validated once, frozen, and printed resolved by `kvroute config`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvroute.endpoint import Endpoint
from kvroute.types import EngineKind

PREFIX = "KVROUTE_"
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]


class ConfigError(Exception):
    """The configuration cannot be used; the message names the field, the fault and what is accepted."""


class Group(BaseModel):
    """A section: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkerConfig(Group):
    """An engine to route to. A bare URL string is accepted in its place."""

    url: str
    engine: EngineKind | None = Field(default=None, description="discovered when not given")
    api_key: SecretStr | None = Field(
        default=None, description="sent to this worker in place of the client's key"
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

    name: str = "prefix_affinity"
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
        default=2.0, description="poll of /metrics; backs off when the engine is slow"
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
    """The approximate index: what was routed where, as byte-chunk keys."""

    chunk_bytes: Annotated[int, Field(ge=64, le=65536)] = 512
    max_bytes: Annotated[int, Field(ge=2**16)] = 256 * 2**20


class Shutdown(Group):
    """SIGTERM: /readyz turns 503, traffic is served for a while, then streams may end, then all is closed."""

    keep_serving_s: Annotated[float, Field(ge=0)] = 3.0
    drain_s: Annotated[float, Field(ge=0)] = 30.0


class Config(BaseSettings):
    """Every field can stand in the file, in `KVROUTE_<FIELD>` or in `KVROUTE_<GROUP>__<FIELD>`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
    )

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8080, description="0 takes a free one")
    workers: tuple[WorkerConfig, ...] = ()
    policy: PolicyConfig = PolicyConfig()
    shadow_policy: PolicyConfig | None = None
    policy_budget_s: Seconds = Field(default=0.005, description="a slower decision counts as an overrun")
    api_key: SecretStr | None = Field(
        default=None, description="clients must send it as a Bearer token; it is not forwarded"
    )
    upstream_ca_file: Path | None = Field(
        default=None, description="CA bundle for https workers; default the system's"
    )
    decision_headers: bool = Field(
        default=True, description="x-kvroute-worker and x-kvroute-decision on responses"
    )
    access_log: bool = Field(default=False, description="one log line per request, at level info")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    retry: Retry = Retry()
    health: Health = Health()
    breaker: Breaker = Breaker()
    admin: Admin = Admin()
    prefix_index: PrefixIndex = PrefixIndex()
    shutdown: Shutdown = Shutdown()

    @field_validator("workers")
    @classmethod
    def _no_duplicates(cls, workers: tuple[WorkerConfig, ...]) -> tuple[WorkerConfig, ...]:
        urls = [worker.url for worker in workers]
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ValueError(f"listed more than once: {', '.join(twice)}")
        return workers

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _EnvSource(settings_cls), _FileSource(settings_cls)


class _EnvSource(EnvSettingsSource):
    """JSON where a value is not plain; what is no JSON is judged by the field, which may take a string."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value


class _FileSource(InitSettingsSource):
    """Values of the YAML file that `load` is reading; the weakest source."""

    values: ClassVar[dict[str, Any]] = {}

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls, init_kwargs=self.values)


def unknown_environment() -> list[str]:
    """`KVROUTE_` variables that set nothing: typing errors, mostly."""
    known = {f"{PREFIX}{name}".upper() for name in Config.model_fields} | {f"{PREFIX}CONFIG"}
    names = (name for name in os.environ if name.upper().startswith(PREFIX))
    return sorted(name for name in names if name.upper().partition("__")[0] not in known)


def load(path: Path | None, flags: dict[str, Any]) -> Config:
    """Read, merge and validate; raises ConfigError. `flags` holds only what was given on the command line."""
    _FileSource.values = {} if path is None else _read_yaml(path)
    try:
        return Config(**flags)
    except ValidationError as error:
        raise ConfigError("; ".join(_fault(e["loc"], e["type"], e["msg"]) for e in error.errors())) from None
    finally:
        _FileSource.values = {}


def _fault(location: tuple[int | str, ...], kind: str, message: str) -> str:
    """Field, fault and what is accepted, in the words of a configuration file."""
    field = ".".join(map(str, location)) or "configuration"
    if kind == "extra_forbidden":
        return f"{field}: unknown field; accepted: {', '.join(_fields_beside(location))}"
    if kind == "tuple_type":
        return f"{field}: a list is expected (in the environment, as JSON)"
    return f"{field}: {message.removeprefix('Value error, ')}"


def _fields_beside(location: tuple[int | str, ...]) -> list[str]:
    """Names that would have been known where the last part of `location` was not."""
    group: type[BaseModel] = Config
    for part in location[:-1]:
        if isinstance(part, str):
            annotation = group.model_fields[part].annotation
            types = [item for item in (annotation, *get_args(annotation)) if isinstance(item, type)]
            group = next(item for item in types if issubclass(item, BaseModel))
    return list(group.model_fields)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: a mapping of field names is expected at the top")
    return values


def show(config: Config) -> str:
    """The resolved configuration as YAML; secrets are masked."""
    return str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
