"""Connectors for serving engines, and what they share.

Each package here loads its engine; importing kvxfer loads none of them.  The modules beside them
know no engine: ``loads``, ``pushes`` and ``outcomes`` keep a connector's books, ``sources`` and
``router_ids`` read what routers say.
"""
