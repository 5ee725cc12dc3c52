"""``kvxfer bench``: how fast the backends of this host are, measured beside baselines of one run.

The parent (``driver``) starts one ``worker`` process per contender, one after the other, so that an
engine that ends its process costs nobody else's results.  A worker holds one transport and a peer
process, both in ``rig``, and measures three things: bandwidth (``bandwidth``), latencies
(``concurrency``) and what a dead peer costs (``recovery``).  ``report`` and ``plots`` show them.
"""
