"""Connectors for serving engines. Each loads its engine; importing kvxfer loads none of them."""
