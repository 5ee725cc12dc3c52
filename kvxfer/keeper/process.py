"""The rim inside the keeper's process: lives exactly as long as its agent, and loops.

Three things end it, whichever comes first: the kernel's signal at the end of the thread that
started it (which lives as long as the agent does), the end of file on the socket to it, and the
look at who its parent is.  Signals that a terminal or a service manager sends to a whole group do
not: the agent may still have transfers to finish.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from kvxfer.errors import ConfigError, KvxferError, WireError
from kvxfer.keeper import messages as m
from kvxfer.keeper.core import Keeper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.core.control import ZmqChannel
    from kvxfer.core.control_config import ChannelAuth

__all__ = ["main"]

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # prctl(2)
_FRAME = 1 << 18
"""Bytes; above any frame, which has to fit into the socket's buffer."""
_LONGEST_WAIT = 0.5
"""Seconds between two looks at the parent."""
_TICK = 0.005
"""Seconds: what comes due within one goes out together."""
_AGAIN = 0.02
"""Seconds until news that the agent's full buffer refused are tried again."""
_BUDGET = 1024
"""Messages per turn."""


def main(arguments: Sequence[str]) -> int:
    """Run until the agent is gone."""
    descriptor, parent = (int(argument) for argument in arguments)
    _bind_to(parent)
    agent = socket.socket(fileno=descriptor)
    first = agent.recv(_FRAME)
    if not first:
        return 0
    setup = m.decode_setup(first)
    agent.setblocking(False)
    try:
        channel = _channel(setup)
    except KvxferError as error:
        print(f"kvxfer keeper of process {parent}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    channel.watch_descriptor(agent.fileno())
    try:
        _run(setup, channel, agent, parent)
    finally:
        channel.close()
        agent.close()
    return 0


def _bind_to(parent: int) -> None:
    """Die with the parent, also if it died before we could ask for that."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    libc.prctl(_PR_SET_NAME, b"kvxfer-keeper", 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _channel(setup: m.Setup) -> ZmqChannel:
    from kvxfer.core.control import ZmqChannel
    from kvxfer.core.control_config import ControlConfig

    return ZmqChannel(ControlConfig(**setup.control), auth=_auth(setup.auth))


def _auth(recipe: m.AuthRecipe | None) -> ChannelAuth | None:
    """What the agent described, made again here.

    Raises:
        ConfigError: there is no such factory.
    """
    if recipe is None:
        return None
    module, _, name = recipe.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the auth factory {recipe.factory!r} cannot be loaded: {error}"
        ) from error
    auth: ChannelAuth = factory(recipe.argument)
    return auth


def _run(setup: m.Setup, channel: ZmqChannel, agent: socket.socket, parent: int) -> None:
    keeper = Keeper(setup, channel, now=time.monotonic())
    frame: bytes | None = None
    while True:
        # The order of these four is the rule that makes a stopped keeper harmless: see ``holds``.
        inbound = channel.receive(_BUDGET)
        now = time.monotonic()
        orders, open_ = _read(agent)
        if not open_ or os.getppid() != parent:
            return
        channel.lost_routes()  # dialled ones come back by themselves, the others are over
        keeper.turn(inbound, orders, now)
        while frame is not None or keeper.has_news:
            frame = keeper.take_news() if frame is None else frame
            if not _write(agent, frame):
                break
            frame = None
        else:
            keeper.agent_was_told()
        wait = _LONGEST_WAIT
        next_at = keeper.next_at()
        if next_at is not None:
            wait = min(wait, max(next_at - time.monotonic(), _TICK))
        if frame is not None:
            wait = min(wait, _AGAIN)
        channel.wait(wait)


def _read(agent: socket.socket) -> tuple[list[list[m.Order]], bool]:
    """All orders that are there, and whether the agent still is."""
    found: list[list[m.Order]] = []
    while True:
        try:
            frame = agent.recv(_FRAME)
        except BlockingIOError:
            return found, True
        except OSError:
            return found, False
        if not frame:
            return found, False
        try:
            found.append(m.decode_orders(frame))
        except WireError:
            return found, False  # our own agent does not speak our language: let it start anew


def _write(agent: socket.socket, frame: bytes) -> bool:
    """False if the agent's buffer is full. One that is gone is noticed by ``_read``."""
    try:
        agent.send(frame, socket.MSG_NOSIGNAL)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
