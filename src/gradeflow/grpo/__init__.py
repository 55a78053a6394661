"""GRPO for workflows: the environment that grades what the policy wrote, the advantages, and the training loop."""
