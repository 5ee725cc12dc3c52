"""Strategies that can be swapped: retry, classification, timeouts."""
