"""``kvxfer keys`` does what a person needs, and refuses what would give a secret away."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvxfer.cli import main
from kvxfer.core.keys import read_allow_list, read_key_pair


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[str, str]:
    assert main(["keys", *arguments]) == status
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_from_nothing_to_an_allow_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Generate, show, allow, list, forbid: each prints ``name key``, never a secret."""
    secret, allowed = str(tmp_path / "decode-0"), str(tmp_path / "allowed")
    out, _ = run(capsys, "generate", secret, "--name", "decode-0")
    assert stat.S_IMODE((tmp_path / "decode-0").stat().st_mode) == 0o600
    pair = read_key_pair(secret)
    line = f"decode-0 {pair.public.hex()}\n"
    assert out == line
    assert run(capsys, "show", secret)[0] == line
    assert run(capsys, "show", secret + ".pub")[0] == line
    assert run(capsys, "allow", allowed, secret + ".pub")[0] == line
    assert run(capsys, "allow", allowed, secret + ".pub")[0] == line  # twice is once
    assert run(capsys, "list", allowed)[0] == line
    assert read_allow_list(allowed).keys("decode-0") == (pair.public,)
    assert run(capsys, "forbid", allowed, "decode-0")[0] == f"removed {pair.public.hex()}\n"
    assert len(read_allow_list(allowed)) == 0
    assert pair.secret.hex() not in "".join(capsys.readouterr())


def test_a_file_as_allow_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list that is a file keeps its comments; a key may be given as text, in either spelling."""
    listing = tmp_path / "allowed.txt"
    listing.write_text("# ours\n")
    key = "ab" * 32
    run(capsys, "allow", str(listing), key, "--name", "router")
    run(capsys, "allow", str(listing), "cd" * 32)
    assert listing.read_text().startswith(f"# ours\nrouter {key}\nkey-")
    zmq_example = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"  # of the Z85 specification's authors
    run(capsys, "allow", str(listing), zmq_example, "--name", "other")
    assert len(read_allow_list(listing)) == 3
    run(capsys, "forbid", str(listing), key)
    assert len(read_allow_list(listing)) == 2
    assert listing.read_text().startswith("# ours\n")


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Writing over a secret, allowing a secret, a key under two names, nonsense."""
    secret, allowed = str(tmp_path / "a"), str(tmp_path / "allowed")
    run(capsys, "generate", secret, "--name", "a")
    assert "exists" in run(capsys, "generate", secret, status=2)[1]
    assert "holds a secret key" in run(capsys, "allow", allowed, secret, status=2)[1]
    run(capsys, "allow", allowed, secret + ".pub")
    error = run(capsys, "allow", allowed, secret + ".pub", "--name", "b", status=2)[1]
    assert "'a', not 'b'" in error
    error = run(capsys, "allow", allowed, read_key_pair(secret).public.hex(), status=2)[1]
    assert "as 'a'" in error
    assert "64 hexadecimal" in run(capsys, "allow", allowed, "nonsense", status=2)[1]
    assert "no key and no name" in run(capsys, "forbid", allowed, "nobody", status=2)[1]
    assert (
        "must be 1 to 64"
        in run(capsys, "generate", str(tmp_path / "x"), "--name", "a b", status=2)[1]
    )
