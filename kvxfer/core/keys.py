"""Keys of the control channel: key files, the allow-list, and where they lie. Loads no zmq.

A process has one key pair in a secret file of its own.  The allow-list holds the public keys of
those it talks to, each under a name; several keys may have one name, which is what rotation needs.
The name is who a peer *is*: it is what an incarnation is bound to.

Files are lines of text.  A key file has ``name = ...``, ``public-key = ...`` and, if it is a secret
one, ``secret-key = ...``.  An allow-list is a directory of public key files (``*.pub``) or one file
with a ``name key`` per line.  Keys are 64 hexadecimal digits; the 40 characters of Z85, which zmq's
own tools write, are read as well.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kvxfer.errors import ConfigError, InvalidInputError

__all__ = [
    "AllowList",
    "KeyPair",
    "Security",
    "check_name",
    "key_name",
    "join_peer",
    "parse_key",
    "read_allow_list",
    "read_key_pair",
    "read_public_key",
    "split_peer",
]

KEY_NBYTES = 32
"""Curve25519."""
MAX_FILE_NBYTES = 1 << 20
"""Of a key file or an allow-list: room for 10,000 keys."""
MAX_KEYS = 16384
"""Of an allow-list: as many as a channel has routes at most."""
PUBLIC_SUFFIX = ".pub"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(r'\s*(name|public-key|secret-key)\s*=\s*"?([^"\s]+)"?\s*')
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_WITH_OTHERS = 0o077
_WRITTEN_BY_OTHERS = 0o022


# ---- values -----------------------------------------------------------------------------------


def check_name(name: object) -> str:
    """``name`` if it can name a peer.

    Raises:
        ConfigError: it cannot.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"a peer's name must be 1 to 64 letters, digits, dots, dashes or underscores, not "
            f"{name!r:.100}"
        )
    return name


def parse_key(text: object) -> bytes:
    """The 32 bytes of a key that is written in hexadecimal or Z85.

    Raises:
        ConfigError: neither of the two. The text is not repeated: it may be a secret.
    """
    if isinstance(text, str):
        if re.fullmatch(r"[0-9a-fA-F]{64}", text):
            return bytes.fromhex(text)
        if len(text) == 40 and set(text) <= set(_Z85):
            return _from_z85(text)
    raise ConfigError(
        "a key must be 64 hexadecimal digits or 40 characters of Z85",
        next_step="make keys with `kvxfer keys generate`",
    )


def _from_z85(text: str) -> bytes:
    out = bytearray()
    for i in range(0, len(text), 5):
        value = 0
        for character in text[i : i + 5]:
            value = value * 85 + _Z85.index(character)
        if value >= 2**32:
            raise ConfigError("a key of 40 characters is no Z85")
        out += value.to_bytes(4, "big")
    return bytes(out)


def key_name(public: bytes) -> str:
    """The name of a key that was given none: ``key-`` and the start of its hash."""
    digest = hashlib.sha256(public).digest()
    return "key-" + base64.b32encode(digest[:10]).decode().lower()


def _key_bytes(_: object, attribute: attrs.Attribute[bytes], value: object) -> None:
    if not isinstance(value, bytes) or len(value) != KEY_NBYTES:
        raise InvalidInputError(f"{attribute.name} must be {KEY_NBYTES} bytes")


@attrs.frozen(kw_only=True)
class KeyPair:
    """Who we are. The secret stays out of every text."""

    name: str = attrs.field(converter=check_name)
    public: bytes = attrs.field(validator=_key_bytes)
    secret: bytes = attrs.field(validator=_key_bytes, repr=False)


@attrs.frozen
class AllowList:
    """Whom we talk to: names by public key."""

    names: Mapping[bytes, str]

    def __len__(self) -> int:
        return len(self.names)

    def name(self, key: bytes) -> str | None:
        """Whose key it is; None if it is not allowed."""
        return self.names.get(key)

    def keys(self, name: str) -> tuple[bytes, ...]:
        """The keys of one peer, in the order of the list."""
        return tuple(key for key, whose in self.names.items() if whose == name)


# ---- configuration ----------------------------------------------------------------------------


def _path(_: object, attribute: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"Security.{attribute.name} must be the path of a file, not {value!r}")


def _text_of_path(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _interval(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0.01 <= value <= 86400:  # type: ignore[operator,arg-type]
        raise ConfigError(
            f"Security.{attribute.name} must be None or a number of seconds from 0.01 to 86400, "
            f"not {value!r}"
        )


@attrs.frozen(kw_only=True)
class Security:
    """Keys of a control channel, by the paths of their files. Pickles; holds no key itself.

    The files are read when a channel is made, and again when they change.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    secret_key_file: str = attrs.field(converter=_text_of_path, validator=_path)
    """Our own key pair. The file must belong to us and be readable by nobody else (mode 0600)."""

    allowed_keys: str = attrs.field(converter=_text_of_path, validator=_path)
    """The allow-list: a directory of ``*.pub`` files, or a file of ``name key`` lines. Nobody but
    its owner may be able to write it."""

    reload_interval: float | None = attrs.field(default=5.0, validator=_interval)
    """How often, in seconds, the files are looked at for changes; None: only when asked to."""


# ---- files ------------------------------------------------------------------------------------


def _read(path: Path, forbidden: int, what: str) -> str:
    """The text of a file of ours that others cannot tamper with, or for ``0o077`` cannot read."""
    try:
        # Not waiting: a named pipe in place of the file must not hold us up.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from error
    try:
        _check_owner(os.fstat(fd), path, forbidden, what)
        data = os.read(fd, MAX_FILE_NBYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MAX_FILE_NBYTES:
        raise ConfigError(f"{what} {path} is larger than {MAX_FILE_NBYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path} is no text") from None


def _check_owner(found: os.stat_result, path: Path, forbidden: int, what: str) -> None:
    directory = stat.S_ISDIR(found.st_mode)
    if not directory and not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{what} {path} is no regular file")
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{what} {path} belongs to uid {found.st_uid}, not to ours ({os.geteuid()}) or root",
            next_step=f"chown it to uid {os.geteuid()}",
        )
    mode = stat.S_IMODE(found.st_mode)
    # A sticky directory, as container platforms mount them: what others put in belongs to them,
    # and is refused file by file.
    if mode & forbidden and not (directory and mode & stat.S_ISVTX):
        kept = mode & ~forbidden
        verb = "read" if forbidden == _WITH_OTHERS else "changed"
        raise ConfigError(
            f"{what} {path} has mode {mode:04o}: it could be {verb} by others",
            next_step=f"chmod {kept:04o} {path}",
        )


def _fields(text: str, path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue  # comments, and sections of zmq's own certificates
        field, value = match.groups()
        if field in found:
            raise ConfigError(f"{path} has two lines of {field}")
        found[field] = value
    return found


def read_key_pair(path: str | os.PathLike[str]) -> KeyPair:
    """Our own keys.

    Raises:
        ConfigError: the file cannot be read, may be read by others, or holds no key pair.
    """
    path = Path(path)
    fields = _fields(_read(path, _WITH_OTHERS, "the secret key file"), path)
    if "secret-key" not in fields or "public-key" not in fields:
        raise ConfigError(
            f"{path} holds no key pair (lines of public-key and secret-key)",
            next_step="make one with `kvxfer keys generate`",
        )
    public = parse_key(fields["public-key"])
    return KeyPair(
        name=fields.get("name") or key_name(public),
        public=public,
        secret=parse_key(fields["secret-key"]),
    )


def read_public_key(path: str | os.PathLike[str]) -> tuple[str, bytes]:
    """Name and key of a public key file; the file's own name if it says none.

    Raises:
        ConfigError: the file cannot be read, may be changed by others, or holds no public key.
    """
    path = Path(path)
    fields = _fields(_read(path, _WRITTEN_BY_OTHERS, "the public key file"), path)
    if "secret-key" in fields:
        raise ConfigError(
            f"{path} holds a secret key",
            next_step="hand out the public key only (`kvxfer keys show`), and make a new pair if "
            "this one was seen by others",
        )
    if "public-key" not in fields:
        raise ConfigError(f"{path} has no line of public-key")
    return check_name(fields.get("name") or path.stem), parse_key(fields["public-key"])


def read_allow_list(path: str | os.PathLike[str]) -> AllowList:
    """Everybody we talk to; may be empty.

    Raises:
        ConfigError: it does not exist, may be changed by others, or an entry is wrong (which one
            is said). Nothing of a list with a wrong entry is used.
    """
    path = Path(path)
    names: dict[bytes, str] = {}
    for name, key, where in _entries(path):
        if names.setdefault(key, name) != name:
            raise ConfigError(f"{where} gives {name!r} a key that {names[key]!r} has already")
        if len(names) > MAX_KEYS:
            raise ConfigError(f"the allow-list {path} has more than {MAX_KEYS} keys")
    return AllowList(names)


def _entries(path: Path) -> list[tuple[str, bytes, str]]:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(
            f"the allow-list {path} cannot be read: {error.strerror}",
            next_step="without an allow-list of public keys nobody is let in: make a directory and "
            "`kvxfer keys allow` the peers' keys",
        ) from error
    if stat.S_ISDIR(found.st_mode):
        _check_owner(found, path, _WRITTEN_BY_OTHERS, "the allow-list")
        files = sorted(x for x in path.iterdir() if x.suffix == PUBLIC_SUFFIX)
        return [(*read_public_key(file), str(file)) for file in files]
    entries = []
    text = _read(path, _WRITTEN_BY_OTHERS, "the allow-list")
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{path}, line {number},"
        if len(words) > 2:
            raise ConfigError(f"{where} is not `name key`")
        key = parse_key(words[-1])
        name = check_name(words[0]) if len(words) == 2 else key_name(key)
        entries.append((name, key, where))
    return entries


# ---- addresses --------------------------------------------------------------------------------


def split_peer(address: str) -> tuple[str, str]:
    """``tcp://10.0.0.5:41001#prefill-0`` as the address and whose it is; empty if not said.

    Raises:
        InvalidInputError: not a text, or the name is none.
    """
    if not isinstance(address, str):
        raise InvalidInputError(f"address must be text, not {address!r}")
    text, mark, name = address.partition("#")
    if not mark:
        return text, ""
    try:
        return text, check_name(name)
    except ConfigError as error:
        raise InvalidInputError(f"address {address!r:.200}: {error}") from None


def join_peer(address: str, name: str) -> str:
    """Inverse of ``split_peer``."""
    return f"{address}#{name}" if name else address
