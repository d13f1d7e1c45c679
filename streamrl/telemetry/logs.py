"""Logging: JSON lines to a file, readable lines to a terminal; for our own logs and the libraries'.

Each part calls `configure_logging` once, first thing. If stderr is no terminal and a file is given, only the file is
written: the process that started the part has that file, and a crash before this call still shows on stderr. Tracebacks
omit the values of variables, which may contain passwords.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import structlog
from structlog.dev import RichTracebackFormatter
from structlog.processors import ExceptionRenderer
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger

_CHATTY = ("httpx", "httpcore")  # they log each request, hundreds a second in a worker
# Messages may contain text from a model or a stranger; a terminal would obey its control characters.
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def configure_logging(part: str, file: Path | None, level: str = "INFO", *, quiet: bool = False) -> None:
    """Configure logging; every line carries `part`. `level` is the standard library's: DEBUG, INFO, WARNING, ERROR.

    `quiet` writes nothing to the terminal, because something is drawn on it.
    """
    terminal = sys.stderr.isatty()
    handlers: list[logging.Handler] = []
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        tracebacks = ExceptionRenderer(ExceptionDictTransformer(show_locals=False))
        to_file = logging.FileHandler(file, encoding="utf-8")
        handlers.append(_formatted(to_file, part, tracebacks, structlog.processors.JSONRenderer()))
    if not quiet and (terminal or file is None):
        in_colour = RichTracebackFormatter(show_locals=False)
        readable = structlog.dev.ConsoleRenderer(colors=terminal, exception_formatter=in_colour)
        to_terminal = logging.StreamHandler(sys.stderr)
        handlers.append(_formatted(to_terminal, part, _strip_control_characters, readable))
    logging.basicConfig(handlers=handlers, level=level, force=True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def _formatted(handler: logging.Handler, part: str, *rendering: Processor) -> logging.Handler:
    processors: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        lambda logger, method, event: {**event, "part": part},
        _drop_internals,
        *rendering,
    ]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=processors))
    return handler


def _drop_internals(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Drop structlog's internal keys, which would look like the caller's."""
    return {name: value for name, value in event.items() if not name.startswith("_")}


def _strip_control_characters(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    return {
        name: _CONTROL_CHARACTERS.sub("?", value) if isinstance(value, str) and name != "exception" else value
        for name, value in event.items()
    }
