"""Peers that live and die: real processes over real engines, killed, stopped, and cut off.

``Life`` drives one agent in this process, ``Worker`` is another process with an agent of its own.
"""

from __future__ import annotations

from kvxfer.testing.life.geometry import FREE, Geometry
from kvxfer.testing.life.rig import SLACK, TIMEOUTS, Backends, Life
from kvxfer.testing.life.worker import Worker

__all__ = ["FREE", "SLACK", "TIMEOUTS", "Backends", "Geometry", "Life", "Worker"]
