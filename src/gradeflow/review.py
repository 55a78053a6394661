"""A model's review of an experiment, which may end an agent's work before its experiments are used up."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradeflow import prompt
from gradeflow.prompt import Message, user

LEAST_QUALITY = 0.7
LEAST_THOROUGHNESS = 0.6


class ReviewResult(BaseModel):
    """Scores are from 0 to 1. `metric_value` is a figure that the output shows, on whatever scale."""

    model_config = ConfigDict(frozen=True)

    is_buggy: bool
    summary: str
    metric_value: float | None = None
    lower_is_better: bool = True
    completion_state: Literal["blocked", "in_progress", "partial", "complete", "excellent", "unknown"] = "unknown"
    quality_score: float = Field(default=0.0, ge=0, le=1)
    thoroughness_score: float = Field(default=0.0, ge=0, le=1)
    should_continue: bool = True
    improvement_notes: str | None = None

    @property
    def finished(self) -> bool:
        """Whether there is nothing to gain from another experiment."""
        if self.is_buggy or self.should_continue or self.quality_score < LEAST_QUALITY:
            return False
        if self.completion_state in {"complete", "excellent"}:
            return True
        return self.completion_state == "partial" and self.thoroughness_score >= LEAST_THOROUGHNESS


def messages(task: str, code: str, observation: str) -> list[Message]:
    return user(prompt.load("agent_review").render(task=task, code=code, observation=observation))


def parse(reply: str) -> ReviewResult | None:
    """The review that a reply holds, be it amid other text; None where it holds none."""
    start, end = reply.find("{"), reply.rfind("}")
    try:
        return ReviewResult.model_validate_json(reply[start : end + 1])
    except ValidationError:
        return None
