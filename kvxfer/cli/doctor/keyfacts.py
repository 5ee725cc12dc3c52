"""What the key files hold, and whether peers take our key. Looks, and judges nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from kvxfer.core.keys import (
    PUBLIC_SUFFIX,
    AllowList,
    KeyPair,
    Security,
    read_allow_list,
    read_key_pair,
    read_public_key,
    split_peer,
)
from kvxfer.errors import KvxferError

__all__ = ["KeyFacts", "PeerFacts", "gather"]

_PEER_S = 5.0
"""Seconds for a peer to answer; a refusal is known at once."""


@attrs.frozen(kw_only=True)
class PeerFacts:
    """``error``: what is wrong with the address. ``refused``: handshakes that failed."""

    error: str = ""
    connected: bool = False
    refused: int = 0


@attrs.frozen(kw_only=True)
class KeyFacts:
    """``None`` where a file was not named or could not be read; then ``errors`` may say why."""

    secret_key_file: str | None
    allowed_keys: str | None
    errors: Mapping[str, tuple[str, str]]
    """By ``secret``, ``public`` or ``allowed``: what is wrong, and the next step."""
    own: KeyPair | None = None
    derived: bytes | None = None
    """The public key that belongs to the secret one."""
    beside: tuple[str, bytes] | None = None
    """Name and key in the ``.pub`` file beside the secret one; None where there is none."""
    allowed: AllowList | None = None
    peers: Mapping[str, PeerFacts] = attrs.field(factory=dict)


def gather(secret_key_file: str | None, allowed_keys: str | None, peers: Sequence[str]) -> KeyFacts:
    """Read what was named; dial ``peers`` if both files can be used, or if there are none."""
    errors: dict[str, tuple[str, str]] = {}
    own = derived = beside = allowed = None
    if secret_key_file is not None:
        try:
            own = read_key_pair(secret_key_file)
            derived = _derived(own)
        except (KvxferError, ValueError) as error:
            errors["secret"] = (str(getattr(error, "message", error)), _step(error))
        public = Path(secret_key_file + PUBLIC_SUFFIX)
        if public.exists():
            try:
                beside = read_public_key(public)
            except KvxferError as error:
                errors["public"] = (error.message, error.next_step)
    if allowed_keys is not None:
        try:
            allowed = read_allow_list(allowed_keys)
        except KvxferError as error:
            errors["allowed"] = (error.message, error.next_step)
    facts = KeyFacts(
        secret_key_file=secret_key_file,
        allowed_keys=allowed_keys,
        errors=errors,
        own=own,
        derived=derived,
        beside=beside,
        allowed=allowed,
    )
    if errors or (secret_key_file is None) != (allowed_keys is None):
        return facts
    if allowed is not None and not allowed:
        return facts
    return attrs.evolve(facts, peers={peer: _dial(facts, peer) for peer in peers})


def _step(error: Exception) -> str:
    return str(getattr(error, "next_step", "")) or "make a pair with `kvxfer keys generate`"


def _derived(pair: KeyPair) -> bytes:
    from kvxfer.core.control_curve import public_of

    return public_of(pair.secret)


def _dial(facts: KeyFacts, peer: str) -> PeerFacts:
    from kvxfer.core.control import ControlConfig, ZmqChannel

    security = None
    if facts.secret_key_file is not None and facts.allowed_keys is not None:
        security = Security(
            secret_key_file=facts.secret_key_file,
            allowed_keys=facts.allowed_keys,
            reload_interval=None,
        )
    log = logging.getLogger("kvxfer.control")
    level = log.level
    log.setLevel(logging.ERROR)  # what it would warn of is what we report
    try:
        with ZmqChannel(ControlConfig(security=security)) as channel:
            split_peer(peer)
            channel.dial(peer)
            deadline = time.monotonic() + _PEER_S
            while time.monotonic() < deadline:
                channel.receive()
                counters = channel.counters
                if counters["dialled_connected"]:
                    return PeerFacts(connected=True)
                if counters["dialled_handshakes_failed"] > len(facts.allowed or ()):
                    break  # every key of theirs was tried
                channel.wait(0.05)
            return PeerFacts(refused=channel.counters["dialled_handshakes_failed"])
    except KvxferError as error:
        return PeerFacts(error=str(error))
    finally:
        log.setLevel(level)
