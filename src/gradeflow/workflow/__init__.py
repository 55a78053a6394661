"""Workflows that a policy writes: the prompt it answers, the check of its program, the operators, the run."""
