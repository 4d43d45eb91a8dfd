"""Structured logs: one JSON object a line, on standard error, at no risk to what is logged about."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import queue
import sys
import threading
from typing import Any, TextIO, cast

import orjson
import structlog
from structlog.typing import Processor

MAX_QUEUED_LINES = 10_000
LAST_LINES_WITHIN_S = 1.0


class LogWriter:
    """A file for loggers that neither blocks nor raises: a thread writes, what it cannot write is dropped.

    Standard error can be a full disk, a pipe whose reader is gone, or one whose reader has stopped; none of
    them may hold or break a request.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lines: queue.Queue[str | threading.Event] = queue.Queue(MAX_QUEUED_LINES)
        self.dropped = 0
        """Counter: lines that were not written."""
        threading.Thread(target=self._run, name="kvroute-log", daemon=True).start()
        atexit.register(self.drain)

    def write(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Loggers call it after each line; the thread flushes."""

    def drain(self) -> None:
        """Give the thread a moment for the last lines."""
        written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(written)
            written.wait(LAST_LINES_WITHIN_S)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                self._file.write(line)
                self._file.flush()
            except (OSError, ValueError):
                self.dropped += 1


writer: LogWriter | None = None
"""The process's writer, once `configure` was called."""


def configure(level: str) -> None:
    """Call once, before anything logs. Libraries (asyncio, uvicorn) are heard from warnings on."""
    global writer  # noqa: PLW0603
    writer = LogWriter(sys.stderr)
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    to_json = structlog.processors.JSONRenderer(serializer=_to_json)
    handler = logging.StreamHandler(writer)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, to_json],
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *common],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    structlog.configure(
        processors=[*common, to_json],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, writer)),
        cache_logger_on_first_use=True,
    )


def _to_json(event: dict[str, Any], **_: Any) -> str:
    first = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    try:
        return orjson.dumps({**first, **event}, default=str).decode()
    except TypeError:  # a lone surrogate, out of a client's JSON
        return json.dumps({**first, **event}, default=str)
