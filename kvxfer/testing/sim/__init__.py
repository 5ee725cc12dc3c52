"""A deterministic simulation of whole systems: the shipped agents in a world where all goes wrong.

``run(seed)`` lets producers and consumers exchange requests, READ and WRITE, while messages are
lost, repeated and overtake each other, posts are refused, half-posted, late or silent, and
processes are killed, stopped, restarted, cut off and crowded.  One thread and one seed: equal seeds
give equal runs.  After every step it checks that no block changes hands while something can still
touch it, that what was received is right, that every transfer ends exactly once and in time, that
leases hold on both clocks, and that all tables are empty at the end.
"""

from kvxfer.testing.sim.campaign import campaign, run, shrink
from kvxfer.testing.sim.config import NodeFault, PostFault, SimConfig
from kvxfer.testing.sim.network import SimChannel, SimNetwork
from kvxfer.testing.sim.profiles import PROFILES
from kvxfer.testing.sim.report import SimReport, Violation, coverage_table, expected_cells, merge
from kvxfer.testing.sim.world import World

__all__ = [
    "PROFILES",
    "NodeFault",
    "PostFault",
    "SimChannel",
    "SimConfig",
    "SimNetwork",
    "SimReport",
    "Violation",
    "World",
    "campaign",
    "coverage_table",
    "expected_cells",
    "merge",
    "run",
    "shrink",
]
