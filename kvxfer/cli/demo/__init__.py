"""``kvxfer demo``: two processes, real KV-cache geometries, faults, and a verdict."""
