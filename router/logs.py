"""Structured logs: one JSON object a line, on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Any

import orjson
import structlog
from structlog.typing import Processor


def configure(level: str) -> None:
    """Call once, before anything logs. Libraries (asyncio, uvicorn) are heard from warnings on."""
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    to_json = structlog.processors.JSONRenderer(serializer=_to_json)
    handler = logging.StreamHandler()
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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _to_json(event: dict[str, Any], **_: Any) -> str:
    return orjson.dumps(event, default=str).decode()
