"""The check that every engine shares: is its library installed, and does it load?"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping

import attrs

from kvxfer.backends._machine import versions
from kvxfer.core.hostcheck import Finding, HostCheck, HostQuery, Level

__all__ = ["LibraryFacts", "judge_library", "library_check"]


@attrs.frozen(kw_only=True)
class LibraryFacts:
    """``found``: versions by distribution. ``error``: why ``module`` does not load."""

    backend: str
    module: str
    install: str
    """The command that installs it."""
    needs: str = ""
    """What the library itself needs of the system."""
    found: Mapping[str, str] = attrs.field(factory=dict)
    error: str = ""


def library_check(
    backend: str, distributions: Iterable[str], module: str, install: str, needs: str = ""
) -> HostCheck:
    """Any of ``distributions`` is installed, and ``module`` can be imported.

    Importing may end the process: the doctor sees that from outside.
    """
    wanted = tuple(distributions)

    def gather(_: HostQuery) -> LibraryFacts:
        error = ""
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as found:
            error = f"{type(found).__name__}: {found}"
        return LibraryFacts(
            backend=backend,
            module=module,
            install=install,
            needs=needs,
            found=versions(wanted),
            error=error,
        )

    return HostCheck("library", gather, judge_library)


def judge_library(facts: LibraryFacts) -> list[Finding]:
    """Missing, broken, or there."""
    there = ", ".join(f"{name} {version}" for name, version in sorted(facts.found.items()))
    if facts.error and not there:
        return [
            Finding(
                backend=facts.backend,
                level=Level.MISSING,
                what=f"its library is not installed ({facts.module})",
                next_step=facts.install,
            )
        ]
    if facts.error:
        needs = f"; it needs {facts.needs}" if facts.needs else ""
        return [
            Finding(
                backend=facts.backend,
                level=Level.ERROR,
                what=f"{there} is installed, but {facts.module} does not load: {facts.error}",
                next_step=f"install what the message names, or again: {facts.install}{needs}",
            )
        ]
    found = there or f"{facts.module} (of no distribution known to us)"
    return [Finding(backend=facts.backend, level=Level.OK, what=f"{found} loads")]
