"""A kvxfer plug-in from another distribution."""
