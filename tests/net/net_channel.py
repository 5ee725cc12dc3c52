"""One end of a control channel. Its argument is JSON: the host to listen on, and whom to dial.

Without ``dial`` it sends back what it receives.  With it, it sends numbers and says which of them
came back.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from kvxfer.core.control import ControlConfig, ZmqChannel

NOTICED = 8.0
"""Seconds without an answer after which a connection counts as lost."""
PAUSE = 0.05
"""Seconds between two numbers."""


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    told, parent = json.loads(sys.argv[1]), os.getppid()
    config = ControlConfig(
        bind_host=told["host"],
        insecure=True,  # nobody else is on this network
        heartbeat_interval=2.0,
        heartbeat_timeout=NOTICED,
        connect_timeout=2.0,
        reconnect_max=0.5,
    )
    with ZmqChannel(config) as channel:
        say(op="address", address=channel.address)
        route = channel.dial(told["dial"]) if told["dial"] else None
        number, due, slowest, accepted = 0, time.monotonic(), 0.0, -1
        while os.getppid() == parent:
            now = time.monotonic()
            if route is not None and now >= due:
                taken = channel.send(route, b"%d" % number)
                slowest = max(slowest, time.monotonic() - now)
                say(op="sent", number=number, taken=taken, slowest=slowest)
                number, due = number + 1, now + PAUSE
            channel.wait(PAUSE / 4 if route else 0.5)
            for message in channel.receive():
                if route is None:
                    channel.send(message.route, message.data)
                else:
                    connections = channel.counters["dialled_connected"]
                    say(op="back", number=int(message.data), connections=connections)
            for _ in channel.lost_routes():
                say(op="lost")
            counters = channel.counters
            ended = counters["inbound_closed"] + counters["inbound_handshakes_failed"]
            if accepted != (accepted := counters["inbound_accepted"] - ended):
                say(op="accepted", connections=accepted)


if __name__ == "__main__":
    main()
