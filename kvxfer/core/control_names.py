"""Host names to IP literals, on a thread of their own.

libzmq would resolve names on its one I/O thread: a name server that does not answer would then
hold up every connection.  Here it holds up only the routes that were dialled by name.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["NameResolver", "system_lookup"]


def system_lookup(host: str) -> list[str]:
    """The literals of ``host`` in the system's order of preference, each once.

    Raises:
        OSError: the name is not known or the name server does not answer.
    """
    answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def _nobody() -> None:
    """Told when the asker has gone."""


class NameResolver:
    """Asks one name after the other. The thread starts with the first question.

    All methods are called from one thread.  A key that is still unanswered is not asked again, so
    there are never more questions than keys.
    """

    def __init__(
        self, notify: Callable[[], None], lookup: Callable[[str], list[str]] = system_lookup
    ) -> None:
        self._notify = notify
        self._lookup = lookup
        self._condition = threading.Condition()
        self._questions: deque[tuple[Hashable, str]] = deque()
        self._answers: deque[tuple[Hashable, list[str]]] = deque()
        self._open: set[Hashable] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    def ask(self, key: Hashable, host: str) -> None:
        """Have ``host`` looked up; ``answers`` gives the result under ``key``."""
        if self._closed or key in self._open:
            return
        self._open.add(key)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvxfer-names", daemon=True)
            self._thread.start()
        with self._condition:
            self._questions.append((key, host))
            self._condition.notify()

    def forget(self, key: Hashable) -> None:
        """Drop the question of ``key``, or its answer if it is just being looked up."""
        if key in self._open:
            self._open.discard(key)
            with self._condition:
                self._questions = deque(q for q in self._questions if q[0] != key)

    def answers(self) -> list[tuple[Hashable, list[str]]]:
        """What was found since the last call; an empty list of literals says not found."""
        found = []
        while self._answers:
            key, literals = self._answers.popleft()
            if key in self._open:
                self._open.discard(key)
                found.append((key, literals))
        return found

    def close(self) -> None:
        """Let the thread end. One that hangs in a look-up ends when the system gives up on it."""
        with self._condition:
            self._closed = True
            self._questions.clear()
            self._condition.notify()
            self._notify = _nobody
        if self._thread is not None:
            self._thread.join(timeout=0.05)  # an idle one ends at once; no other is waited for

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._questions and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                key, host = self._questions.popleft()
            try:
                literals = self._lookup(host)
            except (OSError, UnicodeError):  # UnicodeError: a name the IDNA codec refuses
                literals = []
            if self._closed:
                return
            self._answers.append((key, literals))
            self._notify()
