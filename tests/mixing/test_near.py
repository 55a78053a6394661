import random

import numpy as np

from gradeflow.mixing import near

WORDS = [f"w{number}".encode() for number in range(2000)]


def test_similar_texts_share_a_band_and_others_do_not() -> None:
    rng = random.Random(0)
    originals = [rng.choices(WORDS, k=60) for _ in range(200)]
    changed = [[*original[:-1], b"other"] for original in originals]
    similar = near.jaccard(near.shingles(originals[0]), near.shingles(changed[0]))
    assert similar > 0.9
    found = set(near.pairs(near.bands([*originals, *changed])))
    assert {(number, 200 + number) for number in range(200)} <= found
    assert len(found) == 200


def test_the_bands_of_a_text_are_the_same_in_any_company() -> None:
    texts = [b"one two".split(), b"a b c d e f g".split(), []]
    assert np.array_equal(near.bands(texts)[1:2], near.bands(texts[1:2]))
    assert near.bands([]).shape == (0, near.BANDS)


def test_texts_shorter_than_a_shingle_are_compared_whole() -> None:
    assert near.jaccard(near.shingles([b"a", b"b"]), near.shingles([b"a", b"b"])) == 1
    assert near.jaccard(near.shingles([b"a", b"b"]), near.shingles([b"a", b"c"])) == 0
