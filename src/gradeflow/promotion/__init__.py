"""What the gate is given and what is told of its decision: evaluation runs, conditions, reports."""
