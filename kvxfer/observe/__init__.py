"""What an agent shows to the tools of whoever operates it: metrics, traces, probes. All optional.

``metrics`` needs the extra ``metrics``, ``tracing`` the extra ``otel``; ``http`` serves both probes
and metrics.  Nothing here is imported by the agent: everything goes through ``Agent.add_observer``,
``Agent.health`` and ``Agent.snapshot``, as a user's own code would.
"""
