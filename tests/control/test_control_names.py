"""Looking names up beside everything else."""

from __future__ import annotations

import socket
import threading
import time

from kvxfer.core.control_names import NameResolver, system_lookup


class Lookup:
    """A name server that answers when told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = threading.Semaphore(0)
        self.busy = threading.Event()

    def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        self.busy.set()
        self.go.acquire()
        if host == "bad":
            raise socket.gaierror("unknown")
        return [f"10.0.0.{len(host)}"]


class Bell:
    def __init__(self) -> None:
        self.rung = threading.Semaphore(0)

    def __call__(self) -> None:
        self.rung.release()


def test_answers_come_with_a_notice() -> None:
    """Each answer rings once; an unknown name has an empty answer."""
    lookup, bell = Lookup(), Bell()
    names = NameResolver(bell, lookup)
    names.ask(1, "a")
    names.ask(2, "bad")
    lookup.go.release(2)
    assert bell.rung.acquire(timeout=10)
    assert bell.rung.acquire(timeout=10)
    assert names.answers() == [(1, ["10.0.0.1"]), (2, [])]
    assert names.answers() == []
    names.close()


def test_one_question_per_key() -> None:
    """However often a key asks while its name server hangs, the queue holds it once."""
    lookup, bell = Lookup(), Bell()
    names = NameResolver(bell, lookup)
    for _ in range(100):
        names.ask(1, "a")
        names.ask(2, "bb")
    lookup.go.release(3)
    assert bell.rung.acquire(timeout=10)
    assert bell.rung.acquire(timeout=10)
    assert [key for key, _ in names.answers()] == [1, 2]
    assert lookup.asked == ["a", "bb"]
    names.ask(1, "a")  # answered: may ask again
    assert bell.rung.acquire(timeout=10)
    assert [key for key, _ in names.answers()] == [1]
    names.close()


def test_forgotten_keys_have_no_answer() -> None:
    """A route that was hung up gets no answer, whether its name waits or is being looked up."""
    lookup, bell = Lookup(), Bell()
    names = NameResolver(bell, lookup)
    names.ask(1, "a")
    assert lookup.busy.wait(10)
    for key in range(2, 1000):
        names.ask(key, "bb")
        names.forget(key)
    names.forget(1)
    names.ask(1000, "ccc")
    lookup.go.release(2)
    assert bell.rung.acquire(timeout=10)
    assert bell.rung.acquire(timeout=10)
    assert names.answers() == [(1000, ["10.0.0.3"])]
    assert lookup.asked == ["a", "ccc"]
    names.close()


def test_close_does_not_wait_for_a_name_server() -> None:
    """A look-up that hangs does not hold up ``close``, and rings nowhere afterwards."""
    lookup, bell = Lookup(), Bell()
    names = NameResolver(bell, lookup)
    names.ask(1, "a")
    assert lookup.busy.wait(10)
    start = time.monotonic()
    names.close()
    assert time.monotonic() - start < 5
    thread = names._thread
    assert thread is not None
    lookup.go.release()
    thread.join(10)
    assert not thread.is_alive()
    assert not bell.rung.acquire(blocking=False)
    names.ask(2, "b")
    assert lookup.asked == ["a"]


def test_the_system_knows_localhost() -> None:
    """The real look-up gives literals, each once."""
    found = system_lookup("localhost")
    assert set(found) <= {"127.0.0.1", "::1"}
    assert len(found) == len(set(found)) > 0
