"""Stand-ins that tests use by name."""
