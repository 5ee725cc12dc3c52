"""A distribution of somebody else, installed by pip and used by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvxfer.core.batch import Batch
from kvxfer.core.memory import span_of
from kvxfer.core.plugins import (
    PluginGroup,
    PluginInfo,
    create_transport,
    list_plugins,
    load_backend,
)
from kvxfer.core.verdict import Op
from kvxfer.errors import ConfigError, ErrorKind, PeerLostError
from kvxfer.policies.classify import ClassifierRegistry
from kvxfer.policies.retry import load_policy
from kvxfer.testing.conformance import IN_PROCESS, TransportTests


def test_listed_with_name_distribution_version_and_target(sample_on_path: Path) -> None:
    """The list shows what the author wrote, with the author's spelling of the name."""
    assert list_plugins(PluginGroup.BACKENDS)[-1] == PluginInfo(
        name="sample",
        distribution="kvxfer-sample",
        version="1.2.3",
        target="kvxfer_sample.transport:SampleTransport",
        error="",
    )


def test_nothing_is_imported_until_asked_for(
    installed_sample: Path, run_python: Callable[..., str]
) -> None:
    """Listing imports neither the plug-in nor numpy; loading does. In a fresh interpreter."""
    program = (
        "import sys\n"
        "from kvxfer.core import plugins\n"
        "assert 'entrypoints' not in sys.modules\n"
        "names = [p.name for g in plugins.PluginGroup for p in plugins.list_plugins(g)]\n"
        "assert {'shm', 'sample', 'builtin', 'patient', 'default'} <= set(names), names\n"
        "foreign = [m for m in sys.modules if m.startswith(('kvxfer_sample', 'kvxfer.backends',"
        " 'kvxfer.policies', 'numpy', 'tenacity', 'zmq'))]\n"
        "assert not foreign, foreign\n"
        "plugins.load_backend('sample')\n"
        "assert 'kvxfer_sample.transport' in sys.modules\n"
        "assert 'kvxfer_sample.policies' not in sys.modules\n"
        "print('ok')\n"
    )
    assert run_python(program, installed_sample) == "ok\n"


@pytest.mark.parametrize("op", list(Op))
def test_moves_bytes(sample_on_path: Path, op: Op) -> None:
    """Found by name, it moves exactly the bytes it is told to."""
    near, far = create_transport("sample"), create_transport("sample", greeting="hello")
    mine = np.arange(64, dtype=np.uint8)
    theirs = np.arange(64, dtype=np.uint8)[::-1].copy()
    before = (mine.copy(), theirs.copy())
    local, remote = near.register(span_of(mine)), far.register(span_of(theirs))
    peer, _ = near.connect(far.local_info()).poll()
    assert peer is not None
    path, _ = near.prepare(peer, [(local, remote.descriptor)]).poll()
    assert path is not None
    attempt = near.post(op, path, Batch([0, 0], [0, 40], [8, 16], [4, 3]))
    assert near.progress() == [attempt]
    assert attempt.drained
    if op is Op.READ:
        before[0][0:4], before[0][40:43] = before[1][8:12], before[1][16:19]
    else:
        before[1][8:12], before[1][16:19] = before[0][0:4], before[0][40:43]
    assert mine.tolist() == before[0].tolist()
    assert theirs.tolist() == before[1].tolist()
    assert near.close() == far.close() == []


def test_options_are_checked_before_anything_is_made(sample_on_path: Path) -> None:
    """An option that the backend does not take is named, and the error says what it takes."""
    with pytest.raises(ConfigError, match=r"backend 'sample': .*'colour'.*greeting: "):
        create_transport("sample", colour="red")


def test_a_mapping_reaches_a_backend_without_a_config_class(sample_on_path: Path) -> None:
    """Its entries are keyword arguments: what a configuration file says reaches strangers too."""
    create_transport("sample", {"greeting": "hello"}).close()
    with pytest.raises(ConfigError, match="'colour'"):
        create_transport("sample", {"colour": "red"})
    with pytest.raises(ConfigError, match="'greeting' given twice"):
        create_transport("sample", {"greeting": "hello"}, greeting="hello")


def test_its_classifier_and_retry_policy_are_used(sample_on_path: Path) -> None:
    """The other two groups work for strangers as well."""
    transport = create_transport("sample")
    gone = create_transport("sample")
    info = gone.local_info()
    gone.close()
    _, error = transport.connect(info).poll()
    assert isinstance(error, PeerLostError)
    verdict = ClassifierRegistry.from_plugins().classify_exception(error, "sample")
    assert (verdict.rule, verdict.kind, verdict.retryable) == (
        "sample.gone",
        ErrorKind.PEER_LOST,
        False,
    )
    policy = load_policy("patient")
    assert policy.wait is not None
    transport.close()


@pytest.mark.usefixtures("sample_on_path")
class TestConformance(TransportTests):
    """What a stranger wrote against the public contract passes the suite."""

    modes = (IN_PROCESS,)

    def make_transport(self):
        return load_backend("sample")()
