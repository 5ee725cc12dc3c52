"""``kvxfer doctor``: what this host can do, what is missing, and the next step for each.

* ``facts``, ``keyfacts``, ``portfacts``: look at the host; nothing is judged there.
* ``judge``: pure functions from facts to findings.
* ``probe``: starts a process per backend (``child``), so that an engine can end nothing but that.
* ``report``: the whole, as a table or as JSON.
"""

from kvxfer.cli.doctor.command import add_arguments

__all__ = ["add_arguments"]
