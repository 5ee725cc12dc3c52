"""Warnings that cannot flood: a few lines per kind and minute, then a count of those left out.

Every line has the same form, ``TEXT [event=NAME agent=NAME ...]``, and the same fields are on the
record as ``record.kvxfer``, a dictionary, for formatters that write JSON.  ``event`` names the kind
of line; docs/reference/logs.md lists them.
"""

from __future__ import annotations

import logging
import threading

import attrs

from kvxfer.core.clock import Clock, SystemClock

__all__ = ["LimitedLog"]

_LINES = 5
"""Lines of one kind that pass in one window."""
_WINDOW = 60.0
"""Seconds. Five lines a minute show what is going on and fill no disk."""


@attrs.define
class _Window:
    began: float
    lines: int = 0
    suppressed: int = 0


@attrs.frozen
class _Line:
    level: int
    event: str
    message: str
    args: tuple[object, ...]
    fields: dict[str, object]
    error: BaseException | None = None


class LimitedLog:
    """One per agent, or per module without one. Any thread.

    Args:
        logger: where the lines go.
        clock: tells when a window is over.
        fields: on every line.

    The names of events are constants of the code, so that the table of them is bounded.
    """

    def __init__(
        self,
        logger: logging.Logger,
        clock: Clock | None = None,
        *,
        lines: int = _LINES,
        window: float = _WINDOW,
        **fields: object,
    ) -> None:
        self._logger = logger
        self._clock = clock or SystemClock()
        self._lines = lines
        self._window = window
        self._fields = fields
        self._windows: dict[str, _Window] = {}
        self._lock = threading.Lock()

    def detail(self, event: str, message: str, *args: object, **fields: object) -> None:
        """DEBUG; not limited: nobody keeps that on."""
        if self._logger.isEnabledFor(logging.DEBUG):
            self._write(_Line(logging.DEBUG, event, message, args, fields))

    def news(self, event: str, message: str, *args: object, **fields: object) -> None:
        """INFO."""
        self._limited(_Line(logging.INFO, event, message, args, fields))

    def problem(self, event: str, message: str, *args: object, **fields: object) -> None:
        """WARNING."""
        self._limited(_Line(logging.WARNING, event, message, args, fields))

    def failed(self, event: str, message: str, *args: object, error: BaseException) -> None:
        """ERROR, with the traceback of ``error``."""
        self._limited(_Line(logging.ERROR, event, message, args, {}, error))

    def _limited(self, line: _Line) -> None:
        if not self._logger.isEnabledFor(line.level):
            return
        now = self._clock.now()
        with self._lock:
            left_out = self._close_windows(now)
            window = self._windows.setdefault(line.event, _Window(now))
            passes = window.lines < self._lines
            if passes:
                window.lines += 1
            else:
                window.suppressed += 1
        self._tell(left_out)
        if passes:
            self._write(line)

    def flush(self) -> None:
        """Say what was left out and not told yet."""
        with self._lock:
            left_out = self._close_windows(float("inf"))
        self._tell(left_out)

    def _close_windows(self, now: float) -> list[tuple[str, int]]:
        over = [e for e, window in self._windows.items() if now - window.began >= self._window]
        closed = [(event, self._windows.pop(event).suppressed) for event in over]
        return [(event, count) for event, count in closed if count]

    def _tell(self, left_out: list[tuple[str, int]]) -> None:
        for event, count in left_out:
            fields: dict[str, object] = {"suppressed": count}
            self._write(_Line(logging.WARNING, event, "%d more suppressed", (count,), fields))

    def _write(self, line: _Line) -> None:
        fields = {"event": line.event, **self._fields, **line.fields}
        shown = " ".join(f"{name}={value}" for name, value in fields.items())
        self._logger.log(
            line.level,
            f"{line.message} [%s]",
            *line.args,
            shown,
            exc_info=line.error,
            extra={"kvxfer": fields},
            stacklevel=4,
        )
