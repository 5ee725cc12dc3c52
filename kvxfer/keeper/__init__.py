"""The keeper: a small process beside an agent that keeps leases and liveness without its GIL.

``config`` is what users set, ``messages`` what agent and keeper say to each other, ``holds``,
``watches`` and ``peers`` decide, ``core`` ties them together, ``process`` is the rim inside the
child, ``port`` the agent's end of it.  Nothing here loads numpy: the process starts fast and stays
small.
"""
