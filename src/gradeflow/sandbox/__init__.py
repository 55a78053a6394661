"""The one door for model-written code: `Sandbox.run`.

What it protects: the host's files, environment, processes and network, other runs, and the machine's
time, memory and disk. What it does not: a kernel with a hole, and the sum of the memory of one run's processes (the
limit is for each). By `landlock` it protects less than by `bubblewrap` (landlock.WEAKER), by `none` nothing but time
and the working folder's size; `Sandbox.layer` says which it is.
"""

from gradeflow.sandbox.conversation import Handler, Limit
from gradeflow.sandbox.output import RefusedOutputError, read_output
from gradeflow.sandbox.run import Execution, Probe, Sandbox, probe

__all__ = ["Execution", "Handler", "Limit", "Probe", "RefusedOutputError", "Sandbox", "probe", "read_output"]
