"""Two hosts on one machine: network namespaces with a switch between them, which can be cut.

Needs root and iproute2.  Nothing of the machine's own network is touched, and all of it goes with
``close``, or with the next run if this one was killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["NotPermitted", "TwoHosts"]

_PREFIX = "kvxfer-net-"
_numbers = itertools.count()


class NotPermitted(Exception):
    """Network namespaces cannot be made here; the text says why."""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermitted(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")


def _sweep() -> None:
    """Remove what runs that were killed left behind."""
    folder = Path("/run/netns")
    for path in folder.glob(f"{_PREFIX}*") if folder.is_dir() else ():
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(NotPermitted):
                _ip("netns", "del", path.name)


class TwoHosts:
    """Hosts ``a`` and ``b``, joined by veth through a switch of their own.

    Args:
        version: 4 or 6. The hosts have addresses of this version only, so that nothing can take
            the other one.

    Raises:
        NotPermitted: no root, no iproute2, or a kernel that refuses.
    """

    def __init__(self, version: int) -> None:
        if os.geteuid():
            raise NotPermitted("network namespaces need root")
        if shutil.which("ip") is None:
            raise NotPermitted("network namespaces need ip (Debian: apt-get install iproute2)")
        _sweep()
        name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._switch = f"{name}-s"
        self._hosts = {"a": f"{name}-a", "b": f"{name}-b"}
        self.version = version
        network, bits = ("10.77.0.", "24") if version == 4 else ("fd77::", "64")
        self.addresses = {host: f"{network}{i}" for i, host in enumerate(self._hosts, start=1)}
        try:
            self._make(bits)
        except BaseException:
            self.close()
            raise

    def _make(self, bits: str) -> None:
        for namespace in (self._switch, *self._hosts.values()):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        # Without snooping, the neighbour discovery of IPv6 passes from the first moment on.
        bridge = ("type", "bridge", "stp_state", "0", "mcast_snooping", "0")
        _ip("-n", self._switch, "link", "add", "switch", *bridge)
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for host, namespace in self._hosts.items():
            port = ("name", f"port-{host}", "netns", self._switch)
            _ip("-n", namespace, "link", "add", "eth0", "type", "veth", "peer", *port)
            nodad = ("nodad",) if self.version == 6 else ()
            address = f"{self.addresses[host]}/{bits}"
            _ip("-n", namespace, "address", "add", address, "dev", "eth0", *nodad)
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", self._switch, "link", "set", f"port-{host}", "master", "switch", "up")

    def command(self, host: str, *words: str) -> Sequence[str]:
        """``words`` as a program on that host."""
        return ("ip", "netns", "exec", self._hosts[host], *words)

    def cut(self) -> None:
        """The switch forwards nothing from ``a`` any more. No host can see that: its own link is
        up, and no connection is told."""
        _ip("-n", self._switch, "link", "set", "port-a", "nomaster")

    def unplug(self) -> None:
        """As ``cut``, but host ``a`` sees its link go down."""
        _ip("-n", self._switch, "link", "set", "port-a", "down")

    def heal(self) -> None:
        """As before. Harmless if nothing is cut."""
        _ip("-n", self._switch, "link", "set", "port-a", "master", "switch", "up")

    def close(self) -> None:
        """Remove the hosts and the switch. What still runs there keeps its namespace, unnamed."""
        for namespace in (*self._hosts.values(), self._switch):
            with contextlib.suppress(NotPermitted):
                _ip("netns", "del", namespace)
