"""The entry-point files of the distributions on a path, found one by one and not yet parsed."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence

import attrs

__all__ = ["EntryPointFile", "entry_point_files", "normal_name"]

_INFO_FOLDERS = (".dist-info", ".egg-info")

_Reader = Callable[[str], str]
"""Reads one file of a metadata folder. Raises KeyError or OSError where there is none."""


@attrs.frozen(kw_only=True)
class EntryPointFile:
    """A distribution's ``entry_points.txt``: its text, or the ``problem`` with reading it."""

    distribution: str
    version: str = ""
    source: str = ""
    text: str = ""
    problem: str = ""


def normal_name(distribution: str) -> str:
    """``distribution`` as PEP 503 compares names: "My.Plug_in" and "my-plug-in" are the same."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def entry_point_files(path: Sequence[str]) -> Iterator[EntryPointFile]:
    """One per distribution that has such a file, or has one that cannot be read.

    ``path`` is like ``sys.path``: folders, eggs and zip files.  Of a distribution that lies on it
    twice the first counts, as it does for imports, whether it has such a file or not.
    """
    seen: set[str] = set()
    for entry in path:
        if not isinstance(entry, str):  # importing ignores such entries, too
            continue
        for file in _files(entry or os.curdir):
            name = normal_name(file.distribution)
            if name not in seen:
                seen.add(name)
                if file.text or file.problem:
                    yield file


def _files(entry: str) -> Iterator[EntryPointFile]:
    is_egg = entry.rstrip("/\\").endswith(".egg")
    try:
        if os.path.isdir(entry):
            if is_egg:
                info = os.path.join(entry, "EGG-INFO")
                yield _file(os.path.basename(entry), info, _folder_reader(info))
            else:
                yield from _in_folder(entry)
        elif zipfile.is_zipfile(entry):
            yield from _in_zip(entry, is_egg)
    except (OSError, zipfile.BadZipFile) as error:
        yield EntryPointFile(
            distribution=entry, source=entry, problem=f"{entry} cannot be searched: {error}"
        )


def _in_folder(folder: str) -> Iterator[EntryPointFile]:
    names = sorted(os.listdir(folder))
    for suffix in _INFO_FOLDERS:  # an installation comes before what a build left beside it
        for name in names:
            # pip renames what it failed to remove to a name that begins with "~".
            if name.endswith(suffix) and not name.startswith("~"):
                info = os.path.join(folder, name)
                yield _file(name, info, _folder_reader(info))


def _in_zip(path: str, is_egg: bool) -> Iterator[EntryPointFile]:
    with zipfile.ZipFile(path) as archive:
        infos = {name.split("/", 1)[0] for name in archive.namelist()}
        for suffix in ("EGG-INFO",) if is_egg else _INFO_FOLDERS:
            for info in sorted(infos):
                if info.endswith(suffix):
                    stem = os.path.basename(path) if is_egg else info
                    yield _file(stem, f"{path}/{info}", _zip_reader(archive, info))


def _folder_reader(info: str) -> _Reader:
    def read(name: str) -> str:
        with open(os.path.join(info, name), encoding="utf-8") as file:
            return file.read()

    return read


def _zip_reader(archive: zipfile.ZipFile, info: str) -> _Reader:
    def read(name: str) -> str:
        return archive.read(f"{info}/{name}").decode("utf-8")

    return read


def _file(stem: str, info: str, read: _Reader) -> EntryPointFile:
    name, _, version = os.path.splitext(stem)[0].partition("-")
    version = re.sub(r"-py\d.*", "", version)  # eggs name the Python as well
    source = f"{info}/entry_points.txt"
    text = problem = ""
    try:
        text = read("entry_points.txt")
    except (KeyError, FileNotFoundError, NotADirectoryError):
        return EntryPointFile(distribution=name, version=version)  # most have none
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{source} cannot be read: {error}"
    name, version = _as_spelled(read, name, version)
    return EntryPointFile(
        distribution=name, version=version, source=source, text=text, problem=problem
    )


def _as_spelled(read: _Reader, name: str, version: str) -> tuple[str, str]:
    """Name and version as their author wrote them; folder names replace hyphens."""
    fields = {"Name": name, "Version": version}
    for header in ("METADATA", "PKG-INFO"):
        try:
            lines = read(header).splitlines()
        except (KeyError, OSError, UnicodeDecodeError):
            continue
        for line in lines:
            key, colon, value = line.partition(":")
            if not colon:  # the header ends where the description begins
                break
            if key in fields:
                fields[key] = value.strip()
        break
    return fields["Name"], fields["Version"]
