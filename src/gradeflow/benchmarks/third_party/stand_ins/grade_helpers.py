"""What graders take from a package's `grade_helpers`."""


class InvalidSubmissionError(Exception):
    """The submission cannot be graded, and that is the submission's doing."""
