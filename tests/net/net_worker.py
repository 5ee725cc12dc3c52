"""A worker of the soak with an agent on a real network address, over the backend that it is told.

Its one argument is JSON: name, backend, options, and the host whose address it listens on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "soak"))

from soak_worker import BLOCKS, FREE, Worker

from kvxfer.agent import Agent, AgentConfig
from kvxfer.core.control_config import ControlConfig
from kvxfer.core.events import Event, PeerDown, PeerUp
from kvxfer.core.plugins import create_transport
from kvxfer.keeper.config import KeeperConfig
from kvxfer.policies.timeouts import Timeouts

TIMEOUTS = Timeouts(connect=10.0, queue=10.0, post=10.0, transfer=20.0, ack=15.0, drain=2.0)
LEASE, MARGIN = 20.0, 0.5
LONGEST = TIMEOUTS.connect + TIMEOUTS.queue + TIMEOUTS.transfer + TIMEOUTS.ack + LEASE + MARGIN
"""No transfer may be open for longer, in seconds."""
NOTICED = 10.0
"""Seconds within which a connection that is dead counts as lost."""


class NetWorker(Worker):
    """Says when peers come and go, and ends when it is told to, whatever is open."""

    def on_event(self, event: Event) -> None:
        if isinstance(event, PeerUp | PeerDown):
            self.say(op="up" if isinstance(event, PeerUp) else "down")
        super().on_event(event)

    def begin(self, command: dict[str, Any]) -> bool:
        if command["op"] != "count":
            return super().begin(command)
        strays = int((self.memory[:, self.free] != FREE).any(axis=2).sum())
        free = len(self.free) + sum(map(len, self.held.values()))
        self.say(op="counted", trespasses=self.trespasses + strays, leaked=BLOCKS - free)
        return True


def main() -> None:
    told = json.loads(sys.argv[1])
    control = ControlConfig(
        bind_host=told["host"],
        insecure=True,  # nobody else is on this network
        heartbeat_interval=1.0,
        heartbeat_timeout=NOTICED,
        reconnect_max=1.0,
        connect_timeout=2.0,
    )
    config = AgentConfig(
        name=told["name"],
        lease=LEASE,
        lease_margin=MARGIN,
        keeper=KeeperConfig(beat_interval=1.0, peer_timeout=NOTICED),
    )
    transport = create_transport(told["backend"], told["options"])
    NetWorker(Agent(transport, config=config, control=control, timeouts=TIMEOUTS)).run()


if __name__ == "__main__":
    main()
