"""``kvxfer keys``: make key pairs, show public keys, and keep an allow-list."""

from __future__ import annotations

import argparse
import sys

__all__ = ["add_arguments"]


def add_arguments(keys: argparse.ArgumentParser) -> None:
    """Fill the parser of ``kvxfer keys``."""
    keys.description = (
        "Keys of the control channel. Every worker has a secret key file of its own; the "
        "allow-list of each side holds the public keys of the other. See docs/security.md."
    )
    commands = keys.add_subparsers(required=True, metavar="ACTION")

    generate = commands.add_parser("generate", help="make a key pair")
    generate.add_argument("file", help="the secret key file; the public one gets .pub added")
    generate.add_argument(
        "--name", default="", help="who has it: all keys of one instance may share a name"
    )
    generate.set_defaults(run=_generate)

    show = commands.add_parser("show", help="print the public key of a secret or public key file")
    show.add_argument("file")
    show.set_defaults(run=_show)

    allow = commands.add_parser("allow", help="add a public key to an allow-list")
    allow.add_argument("list", help="a directory (made if it does not exist) or a file")
    allow.add_argument("key", help="a public key file, or a key as `show` prints it")
    allow.add_argument("--name", default="", help="whose it is, if KEY is not a file")
    allow.set_defaults(run=_allow)

    forbid = commands.add_parser("forbid", help="remove a key, or all keys of a name, from it")
    forbid.add_argument("list")
    forbid.add_argument("who", help="a name or a key")
    forbid.set_defaults(run=_forbid)

    listing = commands.add_parser("list", help="print an allow-list")
    listing.add_argument("list")
    listing.set_defaults(run=_list)


def _generate(arguments: argparse.Namespace) -> int:
    from kvxfer.core.control_curve import generate_key_pair
    from kvxfer.core.keyfiles import write_key_pair

    pair = generate_key_pair(arguments.name)
    secret, public = write_key_pair(arguments.file, pair)
    sys.stdout.write(f"{pair.name} {pair.public.hex()}\n")
    sys.stderr.write(f"secret key: {secret} (keep it here)\npublic key: {public} (hand it out)\n")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from kvxfer.core.keys import read_key_pair, read_public_key
    from kvxfer.errors import ConfigError

    try:
        name, key = read_public_key(arguments.file)
    except ConfigError:
        pair = read_key_pair(arguments.file)
        name, key = pair.name, pair.public
    sys.stdout.write(f"{name} {key.hex()}\n")
    return 0


def _allow(arguments: argparse.Namespace) -> int:
    from kvxfer.core.keyfiles import allow

    name, key = allow(arguments.list, arguments.key, name=arguments.name)
    sys.stdout.write(f"{name} {key.hex()}\n")
    return 0


def _forbid(arguments: argparse.Namespace) -> int:
    from kvxfer.core.keyfiles import forbid

    for key in forbid(arguments.list, arguments.who):
        sys.stdout.write(f"removed {key.hex()}\n")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from kvxfer.core.keys import read_allow_list

    for key, name in sorted(read_allow_list(arguments.list).names.items(), key=lambda x: x[1]):
        sys.stdout.write(f"{name} {key.hex()}\n")
    return 0
