"""Two real vLLM engines and a gateway in front of them, started once for the whole run."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from .fleet import (
    CALL_LIMIT_S,
    START_LIMIT_S,
    Server,
    engine_command,
    free_port,
    gateway_command,
    gateway_environment,
    started,
    vllm_environment,
)
from .pd import Answer, Body, ask

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def run_directory() -> Path:
    """Logs and pid files, kept after the run."""
    path = ROOT / "run" / "engines"
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter that has vLLM; `make test-engines` makes it."""
    python = ROOT / os.environ.get("KVROUTE_VLLM_VENV", ".venv-vllm") / "bin" / "python"
    assert python.exists(), f"{python} is missing: run `make test-engines`, or set KVROUTE_VLLM_VENV"
    return python


@pytest.fixture(scope="session")
def engines(vllm_python: Path, run_directory: Path) -> Iterator[list[Server]]:
    """Started side by side: on two cores that takes no longer than one after the other, and often less."""
    model = run_directory / "tiny-model"
    script = Path(__file__).with_name("make_tiny_model.py")
    subprocess.run([vllm_python, script, model], env=vllm_environment(), check=True, timeout=START_LIMIT_S)
    with ExitStack() as stack:
        servers = []
        for name in ("engine-a", "engine-b"):
            port = free_port()
            command = engine_command(vllm_python, model, port)
            servers.append(
                stack.enter_context(started(name, port, command, vllm_environment(), run_directory))
            )
        for server in servers:
            server.wait_for("/health", START_LIMIT_S)
        yield servers


@pytest.fixture(scope="session")
def gateway(engines: list[Server], run_directory: Path) -> Iterator[Server]:
    port = free_port()
    with started(
        "gateway", port, gateway_command(port, engines), gateway_environment(), run_directory
    ) as server:
        server.wait_for("/readyz", 30)
        yield server


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    """Headers as they came, no redirect followed, every call bounded."""
    with httpx.Client(timeout=CALL_LIMIT_S) as http:
        yield http


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


@pytest.fixture
def cold(engines: list[Server], client: httpx.Client) -> Callable[[str, Body], Answer]:
    """What an engine by itself answers to a prompt that it has not seen, in one piece."""

    def answer(path: str, body: Body) -> Answer:
        made = ask(client, engines[0].url + path, {**body, "stream": False})
        assert made.status == 200, made.body
        return made

    return answer
