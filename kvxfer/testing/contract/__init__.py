"""The sentences of the transport contract, as tests. ``kvxfer.testing.conformance`` joins them."""
