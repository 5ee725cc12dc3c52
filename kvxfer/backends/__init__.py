"""The transports kvxfer ships. They are found through entry points, like a stranger's."""
