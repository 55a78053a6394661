"""Mixing many rows: beside the same work in pandas and with the datasets library, in one run, the same result checked.

    python perf/mix.py --rows 1000000
    python perf/mix.py --rows 100000 1000000 10000000 --arms gradeflow

The work: read GSM8K's format, convert it, drop equal questions and those that share 13 words in a row with a test
question, draw some of the rest and write them. The rows are made of random words; one in 20 is a copy, one in 100 holds
a test question. What is compared is how many rows were left to draw from and, with --draw 1, which.
Seconds and memory are those of a process of its own with all that it starts.
"""

import argparse
import hashlib
import json
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

TEST_ROWS = 2000
N = 13
SHIPPED = Path(__file__).parents[1] / "params.yaml"
WORD = re.compile(r"[^\W_]+")
ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")


def made(count: int) -> Iterator[dict[str, str]]:
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("aeioubcdfglmnprst", k=rng.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / place for place in range(1, len(vocabulary) + 1)]
    told = rng.choices(vocabulary, weights, k=1 << 20)

    def some(words: int) -> str:
        start = rng.randrange(len(told) - words)
        return " ".join([rng.choice(vocabulary), *told[start : start + words], rng.choice(vocabulary)])

    tests = [some(45) for _ in range(TEST_ROWS)]
    before = ""
    for number in range(count):
        question = f"{some(20)} {rng.choice(tests)[20:200]}?" if number % 100 == 50 else f"{some(42)} {number}?"
        question = before.upper() if number % 20 == 10 else question
        before = question
        yield {"question": question, "answer": f"{some(40)}\n#### {number % 1000:,}", "split": "train"}
    for number, question in enumerate(tests):
        split = "test" if number else "validation"
        yield {"question": question, "answer": f"{some(40)}\n#### 7", "split": split}


def grams(text: str) -> Iterator[str]:
    words = WORD.findall(text.casefold())
    return (" ".join(words[start : start + N]) for start in range(len(words) - N + 1))


def gradeflow(raw: Path, out: Path, draw: int) -> int:
    from gradeflow import mix, params

    tree = params.load(SHIPPED).model_dump()
    sizes = {"target_train_size": draw, "target_val_size": 1, "target_test_size": 2 * TEST_ROWS}
    tree["mix"] |= {
        "weights": {"gsm8k": 1},
        "type_ratios": {"math": 1},
        "near_duplicates": 0.0,
        "parquet_rows": 10**9,
        **sizes,
    }
    tree["fetch"] = {"gsm8k": {"files": {"train": "-"}}}
    mix.main(params.validate(tree), raw=raw.parent, out=out)
    left: int = json.loads((out / "dataset_stats.json").read_text())["dataset_stats"]["gsm8k"]["train"]
    return left


def pandas(raw: Path, out: Path, draw: int) -> int:
    import pandas as pd

    rows = pd.read_json(raw, lines=True)
    rows = pd.concat([rows[rows["split"] != "train"], rows[rows["split"] == "train"]])
    rows = rows[~rows["question"].str.casefold().str.split().str.join(" ").duplicated()]
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in rows["question"]]
    rows = rows.assign(
        id=[f"gsm8k-{digest}" for digest in digests],
        source="gsm8k",
        problem_type="math",
        ground_truth=rows["answer"].str.extract(ANSWER)[0].str.replace(",", ""),
    ).rename(columns={"question": "problem", "answer": "solution"})
    is_train = rows.pop("split") == "train"
    test, train = rows[~is_train], rows[is_train]
    known = {gram for text in test["problem"] for gram in grams(text)}
    train = train[[known.isdisjoint(grams(text)) for text in train["problem"]]]
    for name, some in (("train", train), ("test", test)):
        drawn = some.sample(min(draw, len(some)), random_state=0)
        drawn.to_json(out / f"{name}_mixed.jsonl", orient="records", lines=True)
    return len(train)


def datasets(raw: Path, out: Path, draw: int) -> int:
    from datasets import load_dataset

    def convert(row: dict[str, str]) -> dict[str, str]:
        found = ANSWER.search(row["answer"])
        assert found is not None
        return {
            "id": f"gsm8k-{hashlib.sha256(row['question'].encode()).hexdigest()[:16]}",
            "source": "gsm8k",
            "problem_type": "math",
            "problem": row["question"],
            "ground_truth": found[1].replace(",", ""),
            "solution": row["answer"],
            "key": " ".join(row["question"].casefold().split()),
        }

    count = psutil.cpu_count() or 1
    rows = load_dataset("json", data_files=str(raw), split="train", cache_dir=str(out / "cache"))
    rows = rows.map(convert, num_proc=count, remove_columns=["question", "answer"])
    seen: set[str] = set()

    def is_new(key: str) -> bool:
        return not (key in seen or seen.add(key))  # type: ignore[func-returns-value]

    test = rows.filter(lambda split: split != "train", input_columns="split").filter(is_new, input_columns="key")
    train = rows.filter(lambda split: split == "train", input_columns="split").filter(is_new, input_columns="key")
    known = {gram for text in test["problem"] for gram in grams(text)}
    train = train.filter(lambda text: known.isdisjoint(grams(text)), input_columns="problem", num_proc=count)
    for name, some in (("train", train), ("test", test)):
        drawn = some.shuffle(seed=0).select(range(min(draw, len(some)))).remove_columns(["split", "key"])
        drawn.to_json(out / f"{name}_mixed.jsonl", num_proc=count)
    return len(train)


ARMS: dict[str, Callable[[Path, Path, int], int]] = {"gradeflow": gradeflow, "pandas": pandas, "datasets": datasets}


def measured(arm: str, raw: Path, out: Path, draw: int) -> tuple[float, float, str]:
    """Seconds, peak memory of all its processes in GB (shared pages once), and what is compared of the result."""
    out.mkdir()
    began = time.perf_counter()
    command = [sys.executable, __file__, "--arm", arm, str(raw), str(out), str(draw)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, _memory(process.pid))
        time.sleep(0.2)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{arm} failed")
    left, drawn, total = int((out / "left").read_text()), 0, 0
    with (out / "train_mixed.jsonl").open(encoding="utf-8") as file:
        for line in file:
            drawn += 1
            total += int(json.loads(line)["id"].rpartition("-")[2], 16)
    return seconds, peak / 1e9, f"{left} left, {drawn} drawn" + (f": {total:x}" if drawn == left else "")


def _memory(pid: int) -> float:
    total = 0.0
    try:
        for process in [(parent := psutil.Process(pid)), *parent.children(recursive=True)]:
            total += process.memory_full_info().pss
    except psutil.Error:
        pass
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--draw", type=float, default=0.1, help="share of the rows that is drawn")
    parser.add_argument("--arm", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        name, raw, out, draw = given.arm
        left = ARMS[name](Path(raw), Path(out), int(draw))
        Path(out, "left").write_text(str(left))
        return
    print(f"{'rows':>10}{'MB':>8}  {'':10}{'seconds':>9}{'rows/s':>10}{'GB':>7}{'ratio':>8}")
    for count in given.rows:
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "gsm8k.jsonl"
            with raw.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in made(count))
            size = raw.stat().st_size / 1e6
            first: Any = None
            for arm in given.arms:
                seconds, peak, result = measured(arm, raw, Path(folder) / arm, int(count * given.draw))
                first = first or (seconds, result)
                same = "" if result == first[1] else "  another result"
                print(f"{count:10}{size:8.0f}  {arm:10}{seconds:9.1f}{count / seconds:10.0f}{peak:7.2f}", end="")
                print(f"{seconds / first[0]:8.1f}{same}", flush=True)


if __name__ == "__main__":
    multiprocessing.freeze_support()
    main()
