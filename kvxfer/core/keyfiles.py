"""Writing key files and allow-lists: whole files, put in place at once, for their owner only."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from kvxfer.core.keys import (
    PUBLIC_SUFFIX,
    AllowList,
    KeyPair,
    check_name,
    key_name,
    parse_key,
    read_allow_list,
    read_public_key,
)
from kvxfer.errors import ConfigError

__all__ = ["allow", "forbid", "public_text", "write_key_pair"]

_SECRET_MODE = 0o600
_PUBLIC_MODE = 0o644


def public_text(name: str, key: bytes) -> str:
    """What a public key file holds."""
    return f"# kvxfer public key\nname = {name}\npublic-key = {key.hex()}\n"


def write_key_pair(path: str | os.PathLike[str], pair: KeyPair) -> tuple[Path, Path]:
    """Write the secret file (mode 0600), and beside it the public one (``.pub``); both paths.

    Raises:
        ConfigError: a file is there already, or cannot be written.
    """
    secret = Path(path)
    public = secret.with_name(secret.name + PUBLIC_SUFFIX)
    for each in (secret, public):
        if each.exists():
            raise ConfigError(
                f"{each} exists",
                next_step="name another file; to rotate keys, move the new one over the old one "
                "once all peers allow it",
            )
    text = (
        "# kvxfer secret key. Whoever reads it can speak as us: mode 0600, never copied around.\n"
        f"name = {pair.name}\npublic-key = {pair.public.hex()}\nsecret-key = {pair.secret.hex()}\n"
    )
    _write(secret, text, _SECRET_MODE)
    _write(public, public_text(pair.name, pair.public), _PUBLIC_MODE)
    return secret, public


def allow(path: str | os.PathLike[str], key: str, *, name: str = "") -> tuple[str, bytes]:
    """Add a public key to an allow-list; the name and key that are now in it.

    Args:
        path: a directory, which is made if it does not exist, or an existing file.
        key: a public key file, or the key itself.
        name: whose it is, where ``key`` is the key itself.

    Raises:
        ConfigError: ``key`` is none, the list is not right, or it has the key under another name.
    """
    path = Path(path)
    if os.path.exists(key):
        whose, public = read_public_key(key)
        if name and name != whose:
            raise ConfigError(
                f"{key} says that it is {whose!r}, not {name!r}",
                next_step="a key has one name, in its own file and in every allow-list",
            )
    else:
        public = parse_key(key)
        whose = check_name(name or key_name(public))
    try:
        # Nobody else may be able to add to it; two processes may come here at once.
        path.mkdir(mode=0o755, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}") from error
    known = read_allow_list(path)
    if known.name(public) not in (None, whose):
        raise ConfigError(f"{path} has this key already, as {known.name(public)!r}")
    if known.name(public) is not None:
        return whose, public
    if path.is_dir():
        file = path / f"{whose}.{key_name(public)[4:]}{PUBLIC_SUFFIX}"
        _write(file, public_text(whose, public), _PUBLIC_MODE)
    else:
        text = path.read_text()
        line = f"{whose} {public.hex()}\n"
        _write(path, text + ("" if text.endswith("\n") or not text else "\n") + line, _PUBLIC_MODE)
    return whose, public


def forbid(path: str | os.PathLike[str], who: str) -> list[bytes]:
    """Remove a key, or all keys of a name, from an allow-list; which ones.

    Raises:
        ConfigError: the list is not right, or has nothing of that.
    """
    path = Path(path)
    known = read_allow_list(path)
    going = _matching(known, who)
    if not going:
        raise ConfigError(f"{path} has no key and no name {who:.100}")
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.suffix == PUBLIC_SUFFIX and read_public_key(file)[1] in going:
                file.unlink()
    else:
        kept = [line for line in path.read_text().splitlines() if not _names_one(line, going)]
        _write(path, "".join(f"{line}\n" for line in kept), _PUBLIC_MODE)
    return going


def _matching(known: AllowList, who: str) -> list[bytes]:
    by_name = list(known.keys(who))
    if by_name:
        return by_name
    try:
        key = parse_key(who)
    except ConfigError:
        return []
    return [key] if known.name(key) is not None else []


def _names_one(line: str, keys: list[bytes]) -> bool:
    words = line.split()
    if not words or words[0].startswith("#"):
        return False
    return parse_key(words[-1]) in keys


def _write(path: Path, text: str, mode: int) -> None:
    """Put a whole file in place: who reads it meanwhile sees the old one or the new one."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            os.fchmod(fd, mode)  # whatever the umask says
            with os.fdopen(fd, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
