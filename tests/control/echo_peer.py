"""A process with a control channel: prints its address, then sends back what it receives."""

from __future__ import annotations

import os
import sys

from kvxfer.core.control import ControlConfig, ZmqChannel


def main() -> None:
    parent = os.getppid()
    with ZmqChannel(ControlConfig(port=int(sys.argv[1]))) as channel:
        print(channel.address, flush=True)
        while os.getppid() == parent:
            channel.wait(0.5)
            for message in channel.receive():
                channel.send(message.route, message.data)


if __name__ == "__main__":
    main()
