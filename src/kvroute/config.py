"""One configuration: YAML file, then `KVROUTE_` environment, then flags, the later the stronger.

Validated once, frozen, and printed resolved by `kvroute config`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvroute.config_groups import (
    Admin,
    Breaker,
    ConductorConfig,
    DecisionLog,
    Health,
    Limits,
    ModelConfig,
    PolicyConfig,
    PrefixIndex,
    RedisConfig,
    RetentionConfig,
    Retry,
    Seconds,
    Shutdown,
    SpeedName,
    Timeouts,
    WorkerConfig,
)
from kvroute.config_pd import PdConfig

PREFIX = "KVROUTE_"


class ConfigError(Exception):
    """The configuration cannot be used; the message names the field, the fault and what is accepted."""


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
    decision_log: DecisionLog = DecisionLog()
    speed: SpeedName | None = Field(
        default=None,
        description="how fast the workers are: a preset by name, or a file of `kvroute calibrate`; what is "
        "assumed at first, and corrected by their answers. Default: llama-3.1-8b-h100-tp1",
    )
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
    models: dict[str, ModelConfig] = Field(
        default_factory=dict,
        description="by served name; adapters use their base model's. Others get approximate keys",
    )
    conductor: ConductorConfig = ConductorConfig()
    retention: RetentionConfig = RetentionConfig()
    redis: RedisConfig = RedisConfig()
    pd: PdConfig = PdConfig()
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


OTHER_VARIABLES = {f"{PREFIX}{name}" for name in ("CONFIG", "PURE_PYTHON", "CALIBRATE_API_KEY", "VLLM_VENV")}
"""What is read elsewhere, by other commands or by `make test-engines`."""


def unknown_environment() -> list[str]:
    """`KVROUTE_` variables that set nothing: typing errors, mostly."""
    known = {f"{PREFIX}{name}".upper() for name in Config.model_fields} | OTHER_VARIABLES
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
    named = False
    for part in location[:-1]:
        if named or isinstance(part, int):  # the key of a mapping, or a place in a list
            named = False
            continue
        annotation = group.model_fields[part].annotation
        named = get_origin(annotation) is dict
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
