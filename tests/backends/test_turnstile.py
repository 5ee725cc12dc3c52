"""A poller that never waits is not starved by threads that take the engine again and again."""

from __future__ import annotations

import threading
import time

from kvxfer.backends._background import MISSES, Turnstile


def test_a_poller_gets_in_between_threads_that_never_stop() -> None:
    """Promise 4, nothing stuck: completions are seen although others keep the engine busy."""
    turnstile, stop = Turnstile(), threading.Event()

    def churn() -> None:
        while not stop.is_set():
            with turnstile:
                time.sleep(0.002)  # inside the engine, the GIL released; the next one waits already

    threads = [threading.Thread(target=churn, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    entered = 0
    try:
        for _ in range(500):  # looks now and then, as a progress thread does
            if turnstile.try_enter():
                entered += 1
                turnstile.leave()
            time.sleep(0.001)
            if entered == 10:
                break
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert entered == 10, f"{entered} of 500 looks got in"


def test_it_waits_for_nobody_who_does_not_poll() -> None:
    """What missed its turn and never comes back costs the others one short wait."""
    turnstile = Turnstile()
    with turnstile:
        assert not any(turnstile.try_enter() for _ in range(MISSES))
    for _ in range(3):
        with turnstile:
            assert not turnstile.try_enter()
    assert turnstile.try_enter()
    turnstile.leave()


def test_the_others_step_back_only_after_several_misses() -> None:
    """One collision must not cost a post a wait."""
    turnstile = Turnstile()
    with turnstile:
        assert not turnstile.try_enter()
    assert turnstile._served.is_set()
    with turnstile:
        for _ in range(MISSES - 1):
            turnstile.try_enter()
        assert not turnstile._served.is_set()
    assert turnstile.try_enter()
    assert turnstile._served.is_set()
    turnstile.leave()
