"""Worlds that make certain situations common: each profile is a ``SimConfig``.

A promise that is only at stake when three rare things meet is not tested by a world in which all
things are equally rare.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvxfer.testing.sim.config import NodeFault, PostFault, SimConfig

__all__ = ["PROFILES"]


def _with(
    posts: Mapping[PostFault, float] | None = None,
    nodes: Mapping[NodeFault, float] | None = None,
    **others: float,
) -> SimConfig:
    base = SimConfig()
    return attrs.evolve(
        base,
        posts={**base.posts, **(posts or {})},
        nodes={**base.nodes, **(nodes or {})},
        **others,  # type: ignore[arg-type]
    )


PROFILES: Mapping[str, SimConfig] = {
    "mixed": SimConfig(),
    # Healthy processes: what they owe each other must arrive in time, whatever is lost. Their users
    # often change their minds.
    "calm": _with(
        lose=0.1,
        duplicate=0.1,
        writes=0.5,
        abort=0.4,
        aim=0.0,
        nodes=dict.fromkeys(NodeFault, 0.0),
    ),
    # Leases hardly longer than transfers; renewals that come late or not at all; readers that look
    # for news only after their lease may have ended.
    "leases": _with(
        lease=0.6,
        margin=0.3,
        late=2.0,
        delay=0.04,
        writes=0.1,
        renew=0.3,
        posts={PostFault.LATE: 0.06, PostFault.LATE_REPORT: 0.06},
        nodes={
            NodeFault.STALL: 0.03,
            NodeFault.PAUSE: 0.03,
            NodeFault.SLOW: 0.03,
            NodeFault.DEAF: 0.03,
            NodeFault.MUTE: 0.03,
        },
    ),
    # Pushes that are given up while their bytes are on the way for a long time, by sides that do
    # not hear of each other, over engines whose fences are often worth half.
    "fences": _with(
        writes=0.9,
        abort=0.2,
        abort_producer=0.05,
        fence_impossible=0.6,
        posts={
            PostFault.PARTIAL: 0.03,
            PostFault.FAILED: 0.03,
            PostFault.LATE: 0.25,
            PostFault.NEVER: 0.02,
        },
        nodes={
            NodeFault.KILL: 0.01,
            NodeFault.STALL: 0.02,
            NodeFault.CUT: 0.01,
            NodeFault.DEAF: 0.02,
        },
    ),
    # A bad network: much is lost, repeated and overtaken.
    "network": _with(
        lose=0.15,
        duplicate=0.15,
        delay=0.08,
        nodes={NodeFault.CUT: 0.02, NodeFault.DEAF: 0.02, NodeFault.MUTE: 0.02},
    ),
}
"""By name."""
