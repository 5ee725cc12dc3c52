"""Plug-in discovery: what is wrong with one is said, and spoils nothing else."""

from __future__ import annotations

import pickle
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.core.plugins import (
    OWN_ENTRY_POINTS,
    SOURCE_TREE,
    PluginCatalog,
    PluginGroup,
    PluginInfo,
    list_plugins,
    load_plugin,
)
from kvxfer.core.transport import Transport
from kvxfer.errors import ConfigError, PluginError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it there

Distribution = Callable[..., Path]

GOOD = "[kvxfer.retry_policies]\nsteady = json:loads\n"


def catalog(*folders: Path) -> PluginCatalog:
    return PluginCatalog([str(folder) for folder in folders])


def others(catalog: PluginCatalog, group: PluginGroup | str) -> list[PluginInfo]:
    """The rows of strangers."""
    return [info for info in catalog.plugins(group) if not info.ours]


# ---- our own ---------------------------------------------------------------------------------


def own_table() -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = {}
    for line in OWN_ENTRY_POINTS.strip().splitlines():
        if line.startswith("["):
            section = table.setdefault(line.strip("[]"), {})
        elif line:
            name, _, target = line.partition(" = ")
            section[name] = target
    return table


def test_source_tree_table_equals_the_package_metadata() -> None:
    """What the source tree offers is what pyproject.toml announces, in every group."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    groups = tomllib.loads(pyproject.read_text())["project"]["entry-points"]
    announced = {name: group for name, group in groups.items() if name.startswith("kvxfer.")}
    assert own_table() == announced
    assert set(announced) == {group.value for group in PluginGroup}


def test_own_plugins_are_found_without_any_metadata(tmp_path: Path) -> None:
    """From a bare source tree the built-in ones are there, and say where they come from."""
    found = catalog(tmp_path).plugins(PluginGroup.BACKENDS)
    assert {info.name for info in found} == set(own_table()["kvxfer.backends"])
    assert {info.distribution for info in found} == {SOURCE_TREE}


def test_own_metadata_wins_and_stale_metadata_is_completed(distribution: Distribution) -> None:
    """Installed metadata is used like a stranger's; a name that it lacks comes from the source."""
    site = distribution(
        "kvxfer", "[kvxfer.backends]\nshm = kvxfer.backends.shm:ShmTransport\n", version="0.0.9"
    )
    found = {info.name: info for info in catalog(site).plugins(PluginGroup.BACKENDS)}
    assert (found["shm"].distribution, found["shm"].version) == ("kvxfer", "0.0.9")
    assert found["loopback"].distribution == SOURCE_TREE
    assert not any(info.error for info in found.values())


def test_own_backends_load_by_name() -> None:
    """A built-in backend is loaded through the same door as a stranger's."""
    backend = load_plugin(PluginGroup.BACKENDS, "loopback", expect=Transport)
    assert backend.name == "loopback"
    assert backend is load_plugin("kvxfer.backends", "loopback")


# ---- what can be wrong with a stranger's -----------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[kvxfer.backends\nx = json:loads\n", "no section headers"),
        ("x = json:loads\n", "no section headers"),
        ("[kvxfer.backends]\nx = json:loads\nx = json:dumps\n", "'x'"),
        ("[kvxfer.backends]\n  \n!!!\n", "'!!!"),
        (b"[kvxfer.backends]\nx = \xff\xfe\n", "decode"),
    ],
    ids=["no bracket", "no section", "same name twice", "no target", "not UTF-8"],
)
def test_malformed_metadata(distribution: Distribution, text: str | bytes, cause: str) -> None:
    """A malformed file is reported with distribution and cause; the others work on."""
    distribution("bro-ken", text)
    site = distribution("good", GOOD)
    found = catalog(site)
    for group in PluginGroup:
        broken = [info for info in others(found, group) if info.error]
        assert [(info.name, info.distribution) for info in broken] == [("", "bro-ken")]
        assert cause in broken[0].error
        assert "entry_points.txt" in broken[0].error
    assert found.load(PluginGroup.RETRY_POLICIES, "steady")("1") == 1
    with pytest.raises(PluginError, match=r"no plug-in 'x' in .*not readable: .*bro_ken"):
        found.load(PluginGroup.BACKENDS, "x")


def test_entry_points_own_reader_would_stop_there(distribution: Distribution) -> None:
    """Why files are read one by one: the library's own group reader dies on the same folder."""
    import entrypoints

    distribution("bad", "[kvxfer.backends\n")
    site = distribution("good", GOOD)
    with pytest.raises(Exception, match="no section headers"):
        entrypoints.get_group_all("kvxfer.retry_policies", path=[str(site)])


def test_malformed_target(distribution: Distribution) -> None:
    """A target of another form is reported on its entry point, without a warning."""
    site = distribution("odd", "[kvxfer.backends]\nodd = not a target\nfine = json:loads\n")
    found = catalog(site)
    by_name = {info.name: info for info in others(found, PluginGroup.BACKENDS)}
    assert "not of the form module:object" in by_name["odd"].error
    assert by_name["fine"].error == ""
    with pytest.raises(PluginError, match=r"'odd'.*cannot be used.*not of the form"):
        found.load(PluginGroup.BACKENDS, "odd")


def test_values_are_taken_literally(distribution: Distribution) -> None:
    """A percent sign is no reference, and [DEFAULT] adds nothing to our groups."""
    text = "[DEFAULT]\nstray = json:loads\n[other]\nx = 100%\n"
    text += "[kvxfer.retry_policies]\nOk = json:loads\nOdd = %(Ok)s\n"
    rows = others(catalog(distribution("literal", text)), PluginGroup.RETRY_POLICIES)
    assert [(info.name, info.target) for info in rows] == [("Odd", "%(Ok)s"), ("Ok", "json:loads")]
    assert "not of the form module:object" in rows[0].error


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("raise RuntimeError('no such card')", "RuntimeError: no such card"),
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("", "AttributeError: .*no attribute 'Thing'"),
    ],
    ids=["raises", "missing dependency", "exits", "nothing there"],
)
def test_failing_import(
    distribution: Distribution, monkeypatch: pytest.MonkeyPatch, body: str, cause: str
) -> None:
    """A failing import names entry point, distribution and cause, and keeps the cause."""
    site = distribution("faulty", "[kvxfer.backends]\nfaulty = faulty_plugin:Thing\n")
    (site / "faulty_plugin.py").write_text(body)
    monkeypatch.syspath_prepend(str(site))
    found = catalog(site)
    with pytest.raises(
        PluginError,
        match=f"faulty = faulty_plugin:Thing of kvxfer.backends, from faulty 1.0.*{cause}",
    ) as caught:
        found.load(PluginGroup.BACKENDS, "faulty")
    assert caught.value.__cause__ is not None
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    tried = {info.name: info for info in found.plugins(PluginGroup.BACKENDS, load=True)}
    assert "cannot be imported" in tried["faulty"].error
    assert tried["loopback"].error == ""
    monkeypatch.delitem(sys.modules, "faulty_plugin", raising=False)


@pytest.mark.parametrize(
    ("group", "target", "cause"),
    [
        (PluginGroup.BACKENDS, "json:loads", "no subclass of kvxfer.core.transport.Transport"),
        (PluginGroup.BACKENDS, "json", "no subclass"),
        (PluginGroup.BACKENDS, "kvxfer.core.transport:Transport", "leaves out _close, _connect"),
        (PluginGroup.CLASSIFIERS, "sys:path", "not callable"),
        (PluginGroup.RETRY_POLICIES, "sys:version", "not callable"),
    ],
)
def test_wrong_type(
    distribution: Distribution, group: PluginGroup, target: str, cause: str
) -> None:
    """An object of the wrong kind is refused when it is loaded, not when it is used."""
    site = distribution("wrong", f"[{group.value}]\nwrong = {target}\n")
    with pytest.raises(PluginError, match=f"wrong = .*from wrong 1.0, is the wrong thing.*{cause}"):
        catalog(site).load(group, "wrong")


def test_expect_a_class_or_a_check(distribution: Distribution) -> None:
    """``expect`` replaces the group's own check, by a class or by a function that says why."""
    site = distribution("some", "[kvxfer.backends]\nsome = collections:OrderedDict\n")
    found = catalog(site)
    assert found.load(PluginGroup.BACKENDS, "some", expect=dict).__name__ == "OrderedDict"
    assert found.load(PluginGroup.BACKENDS, "some", expect=lambda _: "").__name__ == "OrderedDict"
    with pytest.raises(PluginError, match=r"no subclass of builtins\.list"):
        found.load(PluginGroup.BACKENDS, "some", expect=list)
    with pytest.raises(PluginError, match="is the wrong thing: too ordered"):
        found.load(PluginGroup.BACKENDS, "some", expect=lambda _: "too ordered")


def test_two_distributions_with_one_name(distribution: Distribution) -> None:
    """A name that two distributions claim is usable from neither; other names are."""
    distribution("first", "[kvxfer.retry_policies]\nboth = json:loads\nmine = json:loads\n")
    site = distribution("second", "[kvxfer.retry_policies]\nboth = json:dumps\n")
    found = catalog(site)
    rows = [info for info in others(found, PluginGroup.RETRY_POLICIES) if info.name == "both"]
    assert [info.distribution for info in rows] == ["first", "second"]
    assert all("first" in info.error and "second" in info.error for info in rows)
    with pytest.raises(PluginError, match="first and second both register 'both'"):
        found.load(PluginGroup.RETRY_POLICIES, "both")
    assert found.load(PluginGroup.RETRY_POLICIES, "mine")


def test_a_stranger_cannot_take_one_of_our_names(distribution: Distribution) -> None:
    """A second "shm" is an error that names the stranger; it never replaces ours in silence."""
    site = distribution("impostor", "[kvxfer.backends]\nshm = json:loads\n")
    with pytest.raises(PluginError, match="impostor"):
        catalog(site).load(PluginGroup.BACKENDS, "shm")


# ---- the path --------------------------------------------------------------------------------


def test_same_distribution_twice_is_no_conflict(distribution: Distribution) -> None:
    """Spelled differently and in another version, the first on the path counts, as for imports."""
    first = distribution("my-plug.in", GOOD, version="2.0", folder="a")
    second = distribution("My_Plug_In", GOOD.replace("loads", "dumps"), folder="b", kind="egg-info")
    rows = others(catalog(first, second), PluginGroup.RETRY_POLICIES)
    assert [(info.version, info.target, info.error) for info in rows] == [("2.0", "json:loads", "")]
    rows = others(catalog(second, first), PluginGroup.RETRY_POLICIES)
    assert [(info.distribution, info.version) for info in rows] == [("My_Plug_In", "1.0")]


def test_a_distribution_without_entry_points_shadows_as_well(distribution: Distribution) -> None:
    """An older copy further down the path does not shine through."""
    new = distribution("changed", None, version="2.0", folder="a")
    old = distribution("changed", GOOD, version="1.0", folder="b")
    assert others(catalog(new, old), PluginGroup.RETRY_POLICIES) == []
    assert len(others(catalog(old, new), PluginGroup.RETRY_POLICIES)) == 1


def test_left_overs_of_pip_are_ignored(distribution: Distribution) -> None:
    """pip parks what it could not remove under a name that begins with "~"."""
    site = distribution("tilde", GOOD)
    (site / "tilde-1.0.dist-info").rename(site / "~ilde-1.0.dist-info")
    assert others(catalog(site), PluginGroup.RETRY_POLICIES) == []


def test_odd_path_entries(distribution: Distribution, tmp_path: Path) -> None:
    """Missing folders, plain files and broken archives on the path stop nothing."""
    site = distribution("good", GOOD)
    plain = tmp_path / "plain.txt"
    plain.write_text("x")
    broken = tmp_path / "broken.zip"
    with zipfile.ZipFile(broken, "w") as file:
        file.writestr("some-1.0.dist-info/entry_points.txt", GOOD)
    broken.write_bytes(broken.read_bytes().replace(b"PK\x01\x02", b"XX\x01\x02"))
    path = [str(tmp_path / "missing"), str(plain), str(broken), None, b"bytes", str(site)]
    found = PluginCatalog(path)
    rows = others(found, PluginGroup.RETRY_POLICIES)
    assert [info.name for info in rows if not info.error] == ["steady"]
    assert [info.distribution for info in rows if info.error] == [str(broken)]


@pytest.mark.parametrize(
    ("archive", "folder"),
    [("bundle.zip", "zipped-3.0.dist-info"), ("zipped-3.0-py3.11.egg", "EGG-INFO")],
)
def test_archives(tmp_path: Path, archive: str, folder: str) -> None:
    """Zip files and eggs on the path are read like folders."""
    path = tmp_path / archive
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{folder}/entry_points.txt", GOOD)
    rows = others(catalog(path), PluginGroup.RETRY_POLICIES)
    assert [(i.name, i.distribution, i.version) for i in rows] == [("steady", "zipped", "3.0")]


def test_unpacked_egg(tmp_path: Path) -> None:
    """So are eggs that are folders."""
    egg = tmp_path / "flat-4.0-py3.11.egg"
    (egg / "EGG-INFO").mkdir(parents=True)
    (egg / "EGG-INFO" / "entry_points.txt").write_text(GOOD)
    rows = others(catalog(egg), PluginGroup.RETRY_POLICIES)
    assert [(i.distribution, i.version) for i in rows] == [("flat", "4.0")]


# ---- the catalog -----------------------------------------------------------------------------


def test_cached_until_refreshed(distribution: Distribution) -> None:
    """What was found stays until somebody refreshes."""
    site = distribution("good", GOOD)
    found = catalog(site)
    assert len(others(found, PluginGroup.RETRY_POLICIES)) == 1
    distribution("later", "[kvxfer.retry_policies]\nlater = json:dumps\n")
    assert len(others(found, PluginGroup.RETRY_POLICIES)) == 1
    found.refresh()
    assert [i.name for i in others(found, PluginGroup.RETRY_POLICIES)] == ["steady", "later"]


def test_answers_are_copies(distribution: Distribution) -> None:
    """Changing a list that was handed out changes nothing for the next."""
    found = catalog(distribution("good", GOOD))
    found.plugins(PluginGroup.RETRY_POLICIES).clear()
    assert len(others(found, PluginGroup.RETRY_POLICIES)) == 1


def test_unknown_group_and_name() -> None:
    """Both are errors that list what there is."""
    with pytest.raises(ConfigError, match=r"'kvxfer\.backend' is no plug-in group.*kvxfer\.back"):
        list_plugins("kvxfer.backend")
    with pytest.raises(
        PluginError, match=r"no plug-in 'shn' in kvxfer\.backends; there are: .*shm"
    ):
        load_plugin(PluginGroup.BACKENDS, "shn")
    with pytest.raises(PluginError, match="no plug-in ''"):
        load_plugin(PluginGroup.BACKENDS, "")


def test_many_threads_get_one_object(
    distribution: Distribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen threads list and load at once, each plug-in asking for plug-ins at import itself."""
    site = distribution("busy", "[kvxfer.classifiers]\nbusy = busy_plugin:make\n")
    (site / "busy_plugin.py").write_text(
        "from kvxfer.core.plugins import list_plugins\n"
        "seen = list_plugins('kvxfer.classifiers')\n"
        "def make(): return []\n"
    )
    monkeypatch.syspath_prepend(str(site))
    found = catalog(site)
    barrier = threading.Barrier(16)
    results: list[object] = []

    def work() -> None:
        barrier.wait()
        results.append(found.load(PluginGroup.CLASSIFIERS, "busy"))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 16
    assert len(set(map(id, results))) == 1
    monkeypatch.delitem(sys.modules, "busy_plugin")
