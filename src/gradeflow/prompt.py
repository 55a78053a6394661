"""Prompts are text files beside this one; a prompt's version is the digest of its text."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from gradeflow import digest


class Message(TypedDict):
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    text: str

    @property
    def version(self) -> str:
        return digest.of_bytes(self.text.encode())[:12]

    def render(self, **values: str) -> str:
        """Fill in the placeholders; braces in the values stay as they are."""
        return self.text.format_map(values)


@functools.cache
def load(name: str) -> Prompt:
    return Prompt(name, (Path(__file__).parent / "prompts" / f"{name}.txt").read_text(encoding="utf-8").strip())


def user(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]
