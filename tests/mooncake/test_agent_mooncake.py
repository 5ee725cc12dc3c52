"""Agents over the real Mooncake engine. The demo over it is a check of the lane."""

from __future__ import annotations

from kvxfer.testing.agents import AgentTests


class TestMooncake(AgentTests):
    backend = "mooncake"
