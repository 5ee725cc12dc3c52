"""What each backend of kvxfer says of itself, and what the conformance suite skips because of it.

The one place: the lanes compare every engine with its row, and ``docs/reference/backends.md`` shows
the same table.  A capability that changes, and with it what is tested, changes here first.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvxfer.core.capabilities import Cancel, Capabilities, DataPathAuth, FenceScope, Visibility
from kvxfer.core.memory import MemoryKind
from kvxfer.core.verdict import Op

__all__ = ["EXPECTED", "Expected", "table"]

_DRAM = frozenset((op, MemoryKind.DRAM, MemoryKind.DRAM) for op in Op)
_ALL = frozenset((op, a, b) for op in Op for a in MemoryKind for b in MemoryKind)


@attrs.frozen(kw_only=True)
class Expected:
    """One backend, configured as it comes.

    ``skips`` counts the tests of ``TransportTests`` that its capabilities rule out, far sides in
    this process and in another one taken together.
    """

    capabilities: Capabilities
    skips: int


EXPECTED: Mapping[str, Expected] = {
    "loopback": Expected(
        capabilities=Capabilities(
            ops=_DRAM,
            visibility=Visibility.VISIBLE,
            cancel=Cancel.BEST_EFFORT,
            fence=FenceScope.PEER,
            data_path_auth=DataPathAuth.SECRET,
            ip_versions=frozenset(),
            process_local=True,
        ),
        skips=112,
    ),
    "shm": Expected(
        capabilities=Capabilities(
            ops=_DRAM,
            visibility=Visibility.VISIBLE,
            cancel=Cancel.BEST_EFFORT,
            fence=FenceScope.PEER,
            max_pieces=65536,
            credits=1 << 20,
            data_path_auth=DataPathAuth.SECRET,
            ip_versions=frozenset(),
        ),
        skips=8,
    ),
    "moriio": Expected(
        capabilities=Capabilities(
            ops=_ALL,
            visibility=Visibility.ACKED,
            read_visibility=Visibility.VISIBLE,
            fence=FenceScope.ENGINE,
            max_pieces=4096,
            max_nbytes=1 << 30,
            credits=4096,
            atomic_refusal=False,
            may_block_in_post=True,
            ip_versions=frozenset({4}),
        ),
        skips=8,
    ),
    "nixl": Expected(
        capabilities=Capabilities(
            ops=_ALL,
            visibility=Visibility.VISIBLE,
            fence=FenceScope.ENGINE,
            max_pieces=16384,
            may_block_in_post=True,
        ),
        skips=16,
    ),
    "mooncake": Expected(
        capabilities=Capabilities(
            ops=_DRAM,
            visibility=Visibility.VISIBLE,
            read_visibility=Visibility.VISIBLE,
            fence=FenceScope.ENGINE,
            max_pieces=256,
            credits=768,
            may_block_in_post=True,
            ip_versions=frozenset({4}),
        ),
        skips=10,
    ),
}


def table() -> str:
    """``EXPECTED`` as a Markdown table, one column for each backend."""
    names = list(EXPECTED)
    rows = [["", *(f"`{name}`" for name in names)], ["---"] * (len(names) + 1)]
    columns = [_words(EXPECTED[name]) for name in names]
    rows += [[what, *(column[what] for column in columns)] for what in columns[0]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _words(expected: Expected) -> dict[str, str]:
    caps = expected.capabilities
    kinds = sorted({kind.value for _, *pair in caps.ops for kind in pair})
    fallback = Capabilities(ops=caps.ops, visibility=caps.visibility)
    return {
        "ops": " and ".join(op.value for op in Op if any(o is op for o, *_ in caps.ops)),
        "memory": ", ".join(kinds),
        "DONE of a READ means": caps.visible(Op.READ).name.lower(),
        "DONE of a WRITE means": caps.visible(Op.WRITE).name.lower(),
        "`fence`": caps.fence.value,
        "`cancel`": caps.cancel.value.replace("_", " "),
        "`max_pieces`": _limit(caps.max_pieces, fallback.max_pieces),
        "`max_nbytes`": _limit(caps.max_nbytes, fallback.max_nbytes),
        "`credits`": "any" if caps.credits is None else str(caps.credits),
        "`atomic_refusal`": _yes(caps.atomic_refusal),
        "`may_block_in_post`": _yes(caps.may_block_in_post),
        "`data_path_auth`": caps.data_path_auth.value,
        "`ip_versions`": ", ".join(map(str, sorted(caps.ip_versions))) or "no network",
        "`process_local`": _yes(caps.process_local),
        "`signal`": caps.signal.value,
        "contract tests skipped": str(expected.skips),
    }


def _limit(value: int, unlimited: int) -> str:
    return "any" if value == unlimited else str(value)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
