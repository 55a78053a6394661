"""Rows of our own making in every form in which the datasets are published, by dataset and form."""

from typing import Any

_SPAN = {"number": "", "date": {"day": "", "month": "", "year": ""}}
_PASSAGE = "The Reds kicked from 31 and 44 yards. The Blues kicked from 20 yards on 5 May 1990."

RAW: dict[str, dict[str, dict[str, Any]]] = {
    "gsm8k": {
        "original": {
            "question": "Ann has 1000 nuts and finds 234. How many are that?",
            "answer": "Together 1000+234=<<1000+234=1234>>1234.\n#### 1,234",
        },
        "aflow": {
            "question": "Ann has 1000 nuts and finds 234. How many are that?",
            "answer": "1,234",
            "cot": "Together 1000+234=<<1000+234=1234>>1234.",
            "id": "gsm8k-test-1",
        },
    },
    "humaneval": {
        "original": {
            "task_id": "Ours/1",
            "prompt": 'def double(x):\n    """Twice x."""\n',
            "entry_point": "double",
            "canonical_solution": "    return 2 * x\n",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        },
    },
    "mbpp": {
        "full": {
            "task_id": 2001,
            "text": "Write a function to add up the areas of boxes.",
            "code": (
                "import math\r\nclass Box:\r\n\tdef __init__(self, a, b):\r\n\t\tself.a, self.b = a, b\r\n"
                "def area(boxes):\r\n\treturn math.fsum(box.a * box.b for box in boxes)"
            ),
            "test_list": ["assert area([Box(2, 3)]) == 6", "assert area(SOME) == 10"],
            "test_setup_code": "SOME = [Box(2, 3), Box(2, 2)]",
            "challenge_test_list": ["assert area([]) == 0"],
        },
        "sanitized": {
            "source_file": "Ours.ipynb",
            "task_id": 2002,
            "prompt": "Write a function for the area of a circle.",
            "code": "import math\ndef circle(r):\n    return math.pi * r * r",
            "test_imports": ["import math"],
            "test_list": ["assert math.isclose(circle(1), 3.141592653589793)", "assert circle(0) == 0"],
        },
        "aflow": {
            "source_file": "Ours.ipynb",
            "task_id": 2003,
            "prompt": "Write a function to triple a number.\n\ndef triple(x):",
            "code": "def triple(x):\n    return 3 * x",
            "test_imports": [],
            "test_list": ["assert triple(1) == 3", "assert triple(-2) == -6"],
            "entry_point": "triple",
            "test": "def check():\n    assert triple(1) == 3\n    assert triple(-2) == -6\n",
        },
    },
    "math": {
        "original": {
            "problem": "Halve $3$.",
            "level": "Level 1",
            "type": "Prealgebra",
            "solution": "Not $\\boxed{3}$ but $\\boxed{\\frac{3}{2}}$.",
        },
        "math-500": {
            "problem": "Halve $3$.",
            "level": 1,
            "subject": "Prealgebra",
            "solution": "Not $\\boxed{3}$ but $\\boxed{\\frac{3}{2}}$.",
            "answer": "\\frac{3}{2}",
            "unique_id": "test/prealgebra/1.json",
        },
    },
    "mmlu": {
        "csv": {"question": "Which is a prime?", "A": "4", "B": "6", "C": "7", "D": "9", "answer": "C"},
        "hub": {
            "question": "Which is a prime?",
            "subject": "elementary_mathematics",
            "choices": ["4", "6", "7", "9"],
            "answer": 2,
        },
        "nested": {
            "train": {"question": "Which is a prime?", "subject": "", "choices": ["4", "6", "7", "9"], "answer": 2}
        },
    },
    "hotpotqa": {
        "original": {
            "_id": "5a0000000000000000000001",
            "question": "Where was the author of Wide Water born?",
            "answer": "Corvo",
            "type": "bridge",
            "level": "hard",
            "supporting_facts": [["Wide Water", 0], ["Ida Farrow", 1]],
            "context": [
                ["Wide Water", ["Wide Water is a novel by Ida Farrow."]],
                ["Ida Farrow", ["Ida Farrow is a writer.", " She was born in Corvo."]],
            ],
        },
        "hub": {
            "id": "5a0000000000000000000001",
            "question": "Where was the author of Wide Water born?",
            "answer": "Corvo",
            "type": "bridge",
            "level": "hard",
            "supporting_facts": {"title": ["Wide Water", "Ida Farrow"], "sent_id": [0, 1]},
            "context": {
                "title": ["Wide Water", "Ida Farrow"],
                "sentences": [
                    ["Wide Water is a novel by Ida Farrow."],
                    ["Ida Farrow is a writer.", " She was born in Corvo."],
                ],
            },
        },
    },
    "commonsenseqa": {
        "original": {
            "answerKey": "B",
            "id": "0a01",
            "question": {
                "question_concept": "boat",
                "stem": "Where is a boat?",
                "choices": [{"label": "A", "text": "roof"}, {"label": "B", "text": "lake"}],
            },
        },
        "hub": {
            "id": "0a01",
            "question": "Where is a boat?",
            "question_concept": "boat",
            "choices": {"label": ["A", "B"], "text": ["roof", "lake"]},
            "answerKey": "B",
        },
    },
    "drop": {
        "original": {
            "section_id": "ours_1",
            "passage": _PASSAGE,
            "question": "From how many yards did the Reds kick?",
            "query_id": "ours-1",
            "answer": {**_SPAN, "spans": ["31", "44"]},
            "validated_answers": [{**_SPAN, "spans": ["31", "44"]}, {**_SPAN, "number": "75", "spans": []}],
        },
        "hub": {
            "section_id": "ours_1",
            "passage": _PASSAGE,
            "question": "From how many yards did the Reds kick?",
            "query_id": "ours-1",
            "answers_spans": {"spans": ["31", "44"], "types": ["span", "span"]},
        },
        "aflow": {
            "context": f"Passage: {_PASSAGE}\nQuestion: From how many yards did the Reds kick?\nAnswer:",
            "completion": " 31 and 44",
            "ref_text": "31 and 44|75",
            "id": 1,
        },
    },
}

# The form that `original` gives back, where it is not called so.
ORIGINAL = {"mbpp": "full", "mmlu": "csv"}
