"""Which copier a transport has: what is built, and what is asked for."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from kvxfer.backends.shm import CopierChoice, ShmConfig, ShmTransport, copier, copiers
from kvxfer.backends.shm.copying import SCRATCH_BYTES
from kvxfer.errors import ConfigError


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """Nothing is asked for from outside, and what a test plants is forgotten."""
    monkeypatch.delenv(copiers.ENVIRONMENT, raising=False)
    copiers._compiled.cache_clear()
    yield
    copiers._compiled.cache_clear()


def opened(config=None):
    return contextlib.closing(ShmTransport(config))


@pytest.fixture
def not_built(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvxfer.backends.shm._copy", None)


@pytest.fixture
def built(monkeypatch):
    """A module as the build makes it, though it copies nothing."""
    module = types.SimpleNamespace(REVISION=copiers.REVISION, copy=lambda *_: None)
    monkeypatch.setitem(sys.modules, "kvxfer.backends.shm._copy", module)
    return module


def test_the_compiled_one_where_it_is_built(built):
    """Nothing has to be set for it."""
    assert copier().name == copier(CopierChoice.COMPILED).name == "compiled"


def test_python_where_it_is_not(not_built):
    """It works all the same, and says why."""
    found = copier()
    assert found.name == "python"
    assert "cannot be loaded" in found.reason
    with opened() as transport:
        assert transport.copier == found


def test_asked_for_but_not_there(not_built):
    """Who insists on the compiled one gets an error that says what to do."""
    with pytest.raises(ConfigError, match=r"cannot be loaded.*install kvxfer where a C compiler"):
        ShmTransport(ShmConfig(copier=CopierChoice.COMPILED))


def test_a_build_of_other_sources(built):
    """An older build beside newer Python code is not called, whatever it would do."""
    built.REVISION += 1
    assert copier().name == "python"
    assert "install kvxfer again" in copier().reason


def test_the_configuration_decides(built):
    """Python on request, also as a JSON value."""
    config = ShmConfig.from_options({"copier": "python"})
    with opened(config) as transport:
        assert transport.copier.name == "python"
        assert transport.copier.reason == "the configuration asks for it"
    with pytest.raises(ConfigError, match=r"ShmConfig\.copier"):
        ShmConfig.from_options({"copier": "fast"})


def test_the_environment_decides_what_is_left_open(built, monkeypatch):
    """It reaches processes whose configuration nobody can change, and yields to a configuration."""
    monkeypatch.setenv(copiers.ENVIRONMENT, "python")
    assert copier().name == "python"
    assert copiers.ENVIRONMENT in copier().reason
    assert copier(CopierChoice.COMPILED).name == "compiled"
    monkeypatch.setenv(copiers.ENVIRONMENT, "")
    assert copier().name == "compiled"
    monkeypatch.setenv(copiers.ENVIRONMENT, "quick")
    with pytest.raises(ConfigError, match=r"'auto', 'compiled', 'python', not 'quick'.*unset"):
        ShmTransport()


def test_revisions_agree():
    """The number in the C source is the one that Python expects."""
    source = Path(copiers.__file__).with_name("_copy.c")
    assert f'"REVISION", {copiers.REVISION})' in source.read_text()


def test_vectors_that_are_none():
    """C never reads beyond the end of a vector, nor takes other things for addresses."""
    module = pytest.importorskip(
        "kvxfer.backends.shm._copy", reason="shm's compiled copier is not built"
    )
    long, short = np.zeros(3, np.int64), np.zeros(2, np.int64)
    for vectors in ((long, long, short), (long, short, long), (short, long, long)):
        with pytest.raises(ValueError, match=r"vectors of lengths \d, \d and \d"):
            module.copy(*vectors)
    for other in (
        np.zeros(3, np.int32),
        np.zeros(3, np.uint64),
        np.zeros(3, ">i8"),
        np.zeros((3, 1), np.int64),
        np.zeros(3),
    ):
        with pytest.raises(TypeError, match="not a vector of int64"):
            module.copy(long, other, long)
    with pytest.raises(AttributeError):
        module.copy(long, [0, 0, 0], long)
    with pytest.raises(TypeError):
        module.copy(long, long)


def test_others_run_while_it_copies(each_copier):
    """The GIL is let go: another thread of Python sees a copy that is made in part."""
    nbytes = 1 << 28
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    pieces = [np.array([v], np.int64) for v in (target.ctypes.data, source.ctypes.data, nbytes)]
    scratch = np.empty(SCRATCH_BYTES, np.uint8)

    def seen_in_part():
        target[:] = 0
        thread = threading.Thread(target=each_copier.copy_pieces, args=(*pieces, scratch))
        thread.start()
        seen = False
        while thread.is_alive() and not seen:
            seen = target[0] != target[-1]
        thread.join()
        assert target[0] == target[-1] == 1
        return seen

    # A busy machine may not let us run during one copy: try again.
    assert any(seen_in_part() for _ in range(20))
