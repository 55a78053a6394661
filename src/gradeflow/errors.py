"""What can go wrong, drawn as a tree.

GradeflowError
├── SettingsError      params.yaml, a profile or the command line: which key, what it holds, what was expected
├── DataError          a dataset file: which file, line and field
├── Fault              something outside the policy broke; never a score
│   ├── ProviderError  an LLM endpoint did not answer, or answered nothing usable
│   ├── JudgeError     a judge gave no verdict
│   ├── SandboxError   the sandbox itself failed; what ran in it is not to blame
│   ├── GraderError    a grader crashed on a submission that it should have judged
│   └── TooManyFaults  so many of these that a stage stopped, to go on later
├── AuditError         a judge calls wrong answers right, or a task does not grade what it says
├── CollapseError      a policy collapsed again and again in training
├── EvaluationError    an evaluation has no whole results: none, half of them, of another version, or out of time
├── AdapterError       an adapter's files are missing, broken, do nothing, or belong to another base
├── TrackingError      the MLflow server or store cannot be used
│   └── Unsent         it was away when a run ended: what the run logged waits on disk
├── PromotionError     the gate cannot decide: no champion's samples, unequal settings, broken lineage
└── SetupError         the machine lacks something; the message says how to get it
"""

from collections.abc import Sequence

TIMED_OUT = 124
"""What `timeout` of GNU coreutils ends with."""

AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong with the command, and the same one goes on later."""

FINAL = frozenset({"bad_request", "too_long", "auth"})
"""Causes of a ProviderError that no further try mends."""


class GradeflowError(Exception):
    """Anything Gradeflow reports to its user in one line: what is wrong, what was expected, what to do.

    `status` is the exit status of a command that ends with it.
    """

    status = 1


class SettingsError(GradeflowError):
    status = 2


class DataError(GradeflowError): ...


class Fault(GradeflowError):  # noqa: N818 - the word the whole project uses
    """A breakdown outside the policy. `cause` is a short stable name for counting, such as `empty_reply`."""

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class ProviderError(Fault):
    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message, cause=cause)
        self.status = 1 if cause in FINAL else AGAIN


class JudgeError(Fault): ...


class SandboxError(Fault): ...


class GraderError(Fault): ...


class TooManyFaults(Fault):
    def __init__(self, message: str, *, cause: str, status: int = AGAIN) -> None:
        super().__init__(message, cause=cause)
        self.status = status


class AuditError(GradeflowError): ...


class CollapseError(GradeflowError): ...


class EvaluationError(GradeflowError):
    """`done` are the tasks that do have results."""

    def __init__(self, message: str, *, done: Sequence[str] = (), status: int = 1) -> None:
        super().__init__(message)
        self.done = tuple(done)
        self.status = status


class AdapterError(GradeflowError): ...


class TrackingError(GradeflowError): ...


class Unsent(TrackingError):  # noqa: N818 - says what there is, like Fault
    status = AGAIN


class PromotionError(GradeflowError): ...


class SetupError(GradeflowError): ...
