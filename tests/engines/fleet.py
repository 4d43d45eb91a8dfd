"""Real processes for the tests: vLLM engines on the CPU, and the gateway in front of them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

MODEL = "tiny"
START_LIMIT_S = 240.0
CALL_LIMIT_S = 60.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Server:
    """A process that answers HTTP on a port of this machine."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, path: str, limit_s: float) -> None:
        """Until `path` answers 200; a process that died or is late fails with the end of its log."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self.process.returncode}\n{self.log_tail()}")
            try:
                if httpx.get(self.url + path, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        raise AssertionError(f"{self.name}: no 200 from {path} in {limit_s:.0f} s\n{self.log_tail()}")

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def running_requests(self) -> int:
        """`vllm:num_requests_running`, summed over the engine's ranks."""
        return int(self.metric("vllm:num_requests_running"))

    def generated_tokens(self) -> int:
        """Counts up at every step of every request, so it stands still when the engine works on none."""
        return int(self.metric("vllm:generation_tokens_total"))

    def metric(self, name: str, label: str = "") -> float:
        """A metric's value, summed over its series, or over those that have this label."""
        text = httpx.get(f"{self.url}/metrics", timeout=CALL_LIMIT_S).text
        found = re.findall(
            rf"^{re.escape(name)}\{{[^}}]*{re.escape(label)}[^}}]*\}} (\S+)$", text, re.MULTILINE
        )
        assert found, f"{self.name} has no metric {name} {label}"
        return sum(map(float, found))

    def run_on(self, cores: set[int]) -> None:
        """All its threads, its children's too."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):
                if os.getpgid(int(process.name)) != self.process.pid:
                    continue
                for thread in (process / "task").iterdir():
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(int(thread.name), cores)

    def signal(self, number: signal.Signals) -> None:
        """To the process and all that it started: vLLM's API server has its engine in a child."""
        os.killpg(self.process.pid, number)


@contextmanager
def started(
    name: str, port: int, command: Sequence[str], env: Mapping[str, str], run: Path
) -> Iterator[Server]:
    """Its log stays in `run`, its pid while it lives; at the end it is asked to go, then made to.

    setpriv ties it to this process, so that a test run which is killed outright leaves nothing behind.
    """
    log = run / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that a signal reaches its children and nobody else
        )
    (run / f"{name}.pid").write_text(f"{process.pid}\n")
    try:
        yield Server(name, port, process, log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        (run / f"{name}.pid").unlink()


def vllm_environment() -> dict[str, str]:
    """One thread per engine, one address, no call to the outside."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def engine_command(python: Path, model: Path, port: int) -> list[str]:
    """On the CPU a block is a multiple of 32 tokens; the cache must hold one request: 288 * 32 > 8192."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:0",
        "replay_endpoint": "tcp://*:0",
        "topic": f"kv@127.0.0.1:{port}@{MODEL}",
    }
    options = {
        "model": model,
        "served-model-name": MODEL,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 8192,
        "max-num-seqs": 16,
        "block-size": 32,
        "num-gpu-blocks-override": 288,
        "kv-cache-memory-bytes": 64 * 2**20,
        "distributed-executor-backend": "uni",
        "kv-events-config": json.dumps(events),
    }
    flags = ["--enforce-eager", "--enable-prompt-tokens-details", "--enable-request-id-headers"]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *flags]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    return command


def gateway_command(port: int, workers: Sequence[Server]) -> list[str]:
    command = [sys.executable, "-m", "kvroute", "serve", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin"]
    for worker in workers:
        command += ["--worker", worker.url]
    return command


def gateway_environment() -> dict[str, str]:
    """Only these settings: none of the caller's `KVROUTE_` variables, and an admin port that is free."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVROUTE_")}
    return {**kept, "KVROUTE_ADMIN__PORT": "0"}


def serving(response: httpx.Response, engines: Sequence[Server]) -> Server:
    """The engine that answered, as the gateway's own header tells."""
    label = response.headers["x-kvroute-worker"]
    (engine,) = [e for e in engines if re.search(rf"\b{e.port}\b", label)]
    return engine


def eventually(check: Callable[[], bool], limit_s: float) -> float | None:
    """Seconds until `check` was true, or None when it was not within `limit_s`."""
    start = time.monotonic()
    while (elapsed := time.monotonic() - start) < limit_s:
        if check():
            return elapsed
        time.sleep(0.02)
    return None
