"""The `kvroute` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import uvloop

from kvroute import __version__, cli_bench, cli_calibrate, cli_plan, cli_replay, cli_report, cli_simulate
from kvroute.config import Config, ConfigError, load, show, unknown_environment

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Cache-aware request router for fleets of LLM engines.",
)

app.add_typer(cli_bench.app, name="bench")
app.add_typer(cli_plan.app, name="plan")
app.command()(cli_calibrate.calibrate)
app.command()(cli_replay.replay)
app.command()(cli_report.report)
app.command()(cli_simulate.simulate)

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", envvar="KVROUTE_CONFIG", help="YAML file; environment and flags are stronger."),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on [default: 127.0.0.1].")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one [default: 8080].")]
PolicyName = Annotated[str | None, typer.Option("--policy", help="Policy by name [default: ttft].")]
ShadowName = Annotated[
    str | None, typer.Option("--shadow-policy", help="A policy that decides without effect.")
]
Workers = Annotated[
    list[str] | None,
    typer.Option("--worker", help="URL of an engine; repeat for more. http, https or unix:///path."),
]
Prefill = Annotated[list[str] | None, typer.Option("--prefill", help="URL of an engine that only prefills.")]
Decode = Annotated[list[str] | None, typer.Option("--decode", help="URL of an engine that decodes.")]
PdConnector = Annotated[
    str | None,
    typer.Option(
        "--pd-connector",
        help="nixl, mooncake, p2p-nccl, sglang, shared-storage or decode-first [default: as told].",
    ),
]
AdminPort = Annotated[int | None, typer.Option("--admin-port", help="Port of the admin API [default: 8081].")]
LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error.")]


def _resolve(path: Path | None, **flags: Any) -> Config:
    """The configuration, or exit status 2 with the reason."""
    given = {name: value for name, value in flags.items() if value is not None}
    if "admin_port" in given:
        given["admin"] = {"port": given.pop("admin_port")}
    for name in unknown_environment():
        typer.echo(f"kvroute: warning: the environment variable {name} sets nothing", err=True)
    try:
        return load(path, given)
    except ConfigError as error:
        _fail(str(error))


def _workers(
    both: list[str] | None, prefill: list[str] | None, decode: list[str] | None
) -> list[dict[str, str]] | None:
    """As the configuration has them; None where no flag names one."""
    halves = (("prefill", prefill), ("decode", decode))
    given = [{"url": url} for url in both or ()]
    return [*given, *({"url": url, "role": role} for role, urls in halves for url in urls or ())] or None


def _fail(message: str) -> NoReturn:
    typer.echo(f"kvroute: {message}", err=True)
    raise typer.Exit(2)


@app.command()
def serve(
    config: ConfigFile = None,
    host: Host = None,
    port: Port = None,
    policy: PolicyName = None,
    shadow_policy: ShadowName = None,
    worker: Workers = None,
    prefill: Prefill = None,
    decode: Decode = None,
    pd_connector: PdConnector = None,
    admin_port: AdminPort = None,
    log_level: LogLevel = None,
) -> None:
    """Route requests to the workers."""
    from kvroute.listening import CannotListen
    from kvroute.router import logs
    from kvroute.router.server import GatewayServer

    resolved = _resolve(
        config,
        host=host,
        port=port,
        policy=policy,
        shadow_policy=shadow_policy,
        workers=_workers(worker, prefill, decode),
        pd=pd_connector and {"connector": pd_connector},
        admin_port=admin_port,
        log_level=log_level,
    )
    logs.configure(resolved.log_level)
    try:
        uvloop.run(GatewayServer(resolved).run())
    except (ConfigError, CannotListen) as error:
        _fail(str(error))


@app.command(name="config")
def show_config(config: ConfigFile = None) -> None:
    """Print the configuration as `serve` would use it, as YAML; secrets are masked."""
    from kvroute.router.server import GatewayServer

    resolved = _resolve(config)
    try:
        GatewayServer(resolved)
    except ConfigError as error:
        _fail(str(error))
    typer.echo(show(resolved), nl=False)


@app.command()
def demo(seed: Annotated[int, typer.Option(help="Seed of the generated conversations.")] = 0) -> None:
    """Replay conversations through the gateway in front of mock engines, once per policy."""
    from rich.console import Console

    from kvroute.loadtests.demo import run_demo
    from kvroute.router import logs

    logs.configure("error")
    results = run_demo(seed, Console())
    raise typer.Exit(1 if any(result.failures for result in results) else 0)


@app.command(name="mock-engine")
def mock_engine(
    port: Annotated[
        int, typer.Option(help="Port of the first engine, the others follow; 0 takes free ones.")
    ] = 0,
    engines: Annotated[
        int | None, typer.Option(help="Engines of both roles [default: 1, or 0 beside other roles].")
    ] = None,
    prefill: Annotated[int, typer.Option(help="Engines of the prefill role, the first ones.")] = 0,
    decode: Annotated[int, typer.Option(help="Engines of the decode role, the last ones.")] = 0,
    pd_connector: Annotated[
        str, typer.Option(help="nixl, mooncake, sglang, shared-storage or p2p-nccl.")
    ] = "",
    kv_lease: Annotated[float, typer.Option(help="Seconds KV is kept for a decode engine.")] = 30.0,
    register_at: Annotated[str, typer.Option(help="ROUTER for p2p-nccl, as tcp://host:port.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of outputs and block hashes.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    model: Annotated[str, typer.Option(help="Name of the model served.")] = "mock",
    preset: Annotated[
        str, typer.Option(help="Model and GPU whose speed is simulated.")
    ] = "llama-3.1-8b-h100-tp1",
    speed: Annotated[float, typer.Option(help="Simulated seconds per second; inf answers at once.")] = 1.0,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 16,
    kv_blocks: Annotated[
        int | None, typer.Option(help="KV blocks per engine [default: the preset's].")
    ] = None,
    kv_events: Annotated[bool, typer.Option("--kv-events", help="Publish KV events over ZMQ.")] = False,
    cpu_blocks: Annotated[int, typer.Option(help="Blocks of a CPU tier below the GPU; 0: none.")] = 0,
    cpu_write: Annotated[
        str, typer.Option(help="When blocks go there: through, selective or back.")
    ] = "through",
    disk_blocks: Annotated[int, typer.Option(help="Blocks of a disk tier; 0: none.")] = 0,
    silent_tiers: Annotated[bool, typer.Option("--silent-tiers", help="No events from these tiers.")] = False,
    faults: Annotated[str, typer.Option(help="Such as ttft=3,gap=0.1,die_at=2.")] = "",
) -> None:
    """Serve mock engines: vLLM's API over a simulated scheduler and KV cache."""
    from kvroute.loadtests.mock_engine import Faults, MockOptions, run
    from kvroute.loadtests.mock_engine.faults import parse_header

    try:
        options = MockOptions(
            host=host,
            port=port,
            engines=prefill + decode + (engines if engines is not None else int(not prefill + decode)),
            prefill=prefill,
            decode=decode,
            connector=pd_connector,
            kv_lease_s=kv_lease,
            register_at=register_at,
            seed=seed,
            model=model,
            preset=preset,
            speed=speed,
            block_size_tokens=block_size,
            kv_blocks=kv_blocks,
            kv_events=kv_events,
            cpu_blocks=cpu_blocks,
            cpu_write=cpu_write,
            disk_blocks=disk_blocks,
            tier_events=not silent_tiers,
            faults=Faults().merged(parse_header(faults)),
        )
    except ValueError as error:
        _fail(str(error))
    try:
        run(options)
    except OSError as error:
        _fail(f"cannot listen on {host}, ports from {port}: {error.strerror}")


@app.command()
def conductor(
    config: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [default: 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the HTTP API [default: 13333].")] = None,
    lookup: Annotated[
        str | None, typer.Option(help="Where gateways ask: unix:///path or tcp://host:port.")
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Serve the prefix index alone: KV events in, lookups out."""
    from kvroute.conductor.core import Service
    from kvroute.conductor.service import ConductorOptions, ConductorServer
    from kvroute.listening import CannotListen
    from kvroute.router import logs

    given = {"host": host, "port": port, "lookup": lookup}
    resolved = _resolve(
        config,
        conductor={name: value for name, value in given.items() if value is not None} or None,
        log_level=log_level,
    )
    logs.configure(resolved.log_level)
    options = resolved.conductor
    try:
        server = ConductorServer(
            ConductorOptions(
                options.host,
                options.port,
                options.lookup,
                resolved.prefix_index.max_bytes,
                resolved.prefix_index.prediction_s,
                options.snapshot_file,
                options.snapshot_interval_s,
                tuple(Service(**service.model_dump()) for service in options.services),
            )
        )
        uvloop.run(server.run())
    except (CannotListen, ValueError) as error:
        _fail(str(error))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"kvroute {__version__}")
