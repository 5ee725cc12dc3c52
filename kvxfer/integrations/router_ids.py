"""For routers that put the addresses of both sides into the request id. Optional.

Such a router sends one request to prefill and to decode under the same id, of the form
``___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_UNIQUE``; vLLM puts words before and behind it.
The ports must be those of kvxfer's control channels: see ``port_range``.
"""

from __future__ import annotations

import re
from typing import TypeVar

from kvxfer.integrations.sources import Push

__all__ = ["push_of_request_id"]

P = TypeVar("P", bound=Push)

_ADDRESS = r"\[?[0-9A-Za-z.:-]+?\]?:[0-9]{1,5}"
_FORM = re.compile(
    rf"___prefill_addr_{_ADDRESS}___decode_addr_(?P<host>[^_]+):(?P<port>[0-9]{{1,5}})"
    r"_(?P<unique>[0-9A-Za-z]{8,64})"
)


def push_of_request_id(request_id: str, *, ranks: int = 1, kind: type[P]) -> P | None:
    """The push between the peers that the id names; None if it names none.

    Args:
        ranks: of the consumer. Rank ``r`` listens ``r`` ports above the one that the id names.
        kind: the class of what is returned.
    """
    found = _FORM.search(request_id)
    if found is None:
        return None
    port = int(found["port"])
    if not 0 < port <= 65536 - ranks:
        return None
    addresses = [f"tcp://{found['host']}:{port + rank}" for rank in range(ranks)]
    return kind.to_addresses(found["unique"], addresses)
