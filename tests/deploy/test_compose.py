"""compose.yaml against the configuration and the command line that it uses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.main import get_command

from kvroute.cli import app
from kvroute.config import Config, load

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def options(service: str) -> dict[str, Any]:
    """The service's command as our command line understands it."""
    name, *arguments = SERVICES[service]["command"]
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    parsed: dict[str, Any] = command.make_context(name, list(arguments)).params
    return parsed


def config() -> Config:
    return load(DEPLOY / COMPOSE["configs"]["kvroute"]["file"], {})


def engine_ports() -> set[int]:
    given = options("engines")
    return set(range(given["port"], given["port"] + given["engines"]))


def seconds(duration: str) -> float:
    (number,) = re.fullmatch(r"(\d+)s", duration).groups()  # type: ignore[union-attr]
    return float(number)


def test_services() -> None:
    assert set(SERVICES) == {"gateway", "engines", "redis", "prometheus"}


@pytest.mark.parametrize("name", SERVICES)
def test_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert not service.get("privileged")


@pytest.mark.parametrize("name", SERVICES)
def test_files_that_are_named_exist(name: str) -> None:
    for used in SERVICES[name].get("configs", ()):
        assert (DEPLOY / COMPOSE["configs"][used["source"]]["file"]).is_file()
    if build := SERVICES[name].get("build"):
        assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_gateway_reads_the_file_that_is_mounted_and_listens_on_the_published_port() -> None:
    (mounted,) = SERVICES["gateway"]["configs"]
    arguments = SERVICES["gateway"]["command"]
    assert arguments == ["serve", "--config", mounted["target"]]
    assert config().host == "0.0.0.0"
    assert SERVICES["gateway"]["ports"] == [f"127.0.0.1:8080:{config().port}"]


def test_every_mock_engine_is_a_worker() -> None:
    assert options("engines")["host"] == "0.0.0.0"
    workers = [urlsplit(worker.url) for worker in config().workers]
    assert {w.hostname for w in workers} == {"engines"}
    assert {w.port for w in workers} == engine_ports()


def test_prometheus_scrapes_the_gateway_and_every_engine() -> None:
    scrape = yaml.safe_load((DEPLOY / COMPOSE["configs"]["prometheus"]["file"]).read_text())["scrape_configs"]
    targets = {t for job in scrape for group in job["static_configs"] for t in group["targets"]}
    assert targets == {f"gateway:{config().port}"} | {f"engines:{port}" for port in engine_ports()}


def test_stop_leaves_time_to_drain() -> None:
    shutdown = config().shutdown
    assert seconds(SERVICES["gateway"]["stop_grace_period"]) > shutdown.keep_serving_s + shutdown.drain_s


def test_nothing_is_set_beside_the_file() -> None:
    """The environment is stronger than the file, so a variable here would hide what the file says."""
    assert not any(service.get("environment") or service.get("env_file") for service in SERVICES.values())
