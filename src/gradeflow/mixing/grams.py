"""Contamination: a run of 13 words of an evaluation question within a training row.

The length is that of GPT-3's analysis (arXiv 2005.14165, appendix C). In Chinese, Japanese and Korean, where words are
not divided, each character counts as one.
"""

import re
from collections.abc import Sequence

import xxhash

N = 13
PROBE = 4
STRIDE = N - PROBE + 1
"""A row is looked at in so many places apart: a run of 13 words holds the whole of one of its probes."""

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD_OR_CHARACTER = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_ASCII = bytes(ord(chr(code).lower()) if chr(code).isalnum() else ord(" ") for code in range(128)) + bytes(128)


def words(text: str) -> list[bytes]:
    """The words of a text in UTF-8, without a difference of case."""
    if text.isascii():
        return text.encode().translate(_ASCII).split()
    return [word.encode() for word in _WORD_OR_CHARACTER.findall(text.casefold())]


class Grams:
    """The 13-grams of texts, and their probes: most rows have none of those, and are done with after a few looks."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._owners: dict[int, int] = {}
        self._probes: set[bytes] = set()
        for number, text in enumerate(texts):
            told = words(text)
            if len(told) >= N:
                self._probes.update(b" ".join(told[start : start + PROBE]) for start in range(len(told) - PROBE + 1))
                for start in range(len(told) - N + 1):
                    self._owners.setdefault(_digest(told[start : start + N]), number)

    def find(self, text: Sequence[bytes]) -> tuple[int, str] | None:
        """The first text that shares a 13-gram with these words, and that gram."""
        if self._probes.isdisjoint(map(b" ".join, zip(*(text[start::STRIDE] for start in range(PROBE)), strict=False))):
            return None
        for place in range(0, len(text) - PROBE + 1, STRIDE):
            if b" ".join(text[place : place + PROBE]) in self._probes:
                for start in range(max(0, place - STRIDE + 1), min(place, len(text) - N) + 1):
                    gram = text[start : start + N]
                    if (owner := self._owners.get(_digest(gram))) is not None:
                        return owner, b" ".join(gram).decode()
        return None


def _digest(gram: Sequence[bytes]) -> int:
    return xxhash.xxh3_64_intdigest(b" ".join(gram))
