"""Commands that are no stages: they change settings, run several stages, check and repair."""
