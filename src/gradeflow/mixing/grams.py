"""Contamination: a run of 13 words of an evaluation question within a training row.

The length is that of GPT-3's analysis (arXiv 2005.14165, appendix C). In Chinese, Japanese and Korean, where words are
not divided, each character counts as one.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import xxhash

N = 13

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(r"[^\W_]+")
_WORD_OR_CHARACTER = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")


def words(text: str) -> list[str]:
    return (_WORD if text.isascii() else _WORD_OR_CHARACTER).findall(text.casefold())


class Grams:
    """The 13-grams of texts, each found by its rarest pair of words: most rows have none of those, and are done."""

    def __init__(self, texts: Sequence[str]) -> None:
        told = [words(text) for text in texts]
        counts = Counter(pair for each in told for pair in set(pairwise(each)))
        self._owners: dict[int, int] = {}
        self._rare: set[tuple[str, str]] = set()
        for number, each in enumerate(told):
            for start in range(len(each) - N + 1):
                gram = each[start : start + N]
                self._owners.setdefault(_digest(gram), number)
                self._rare.add(min(pairwise(gram), key=lambda pair: (counts[pair], pair)))

    def __len__(self) -> int:
        return len(self._owners)

    def find(self, text: Sequence[str]) -> tuple[int, str] | None:
        """The first text that shares a 13-gram with these words, and that gram."""
        if len(text) < N or self._rare.isdisjoint(pairwise(text)):
            return None
        start = 0
        for place, pair in enumerate(pairwise(text)):
            if pair in self._rare:
                for start in range(max(start, place - N + 2), min(place, len(text) - N) + 1):  # noqa: B020
                    gram = text[start : start + N]
                    if (owner := self._owners.get(_digest(gram))) is not None:
                        return owner, " ".join(gram)
        return None


def _digest(gram: Sequence[str]) -> int:
    return xxhash.xxh3_64_intdigest(" ".join(gram).encode())
