import gzip
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradeflow import fetch, jsonl, params, sources
from gradeflow.errors import DataError, SettingsError
from gradeflow.fetching.download import Patience
from gradeflow.sources import gsm8k
from gradeflow.sources.published import File, Published
from support.file_server import FAULTS, Fault, FileServer

GOOD = b'{"question": "How many?", "answer": "#### 1"}\n' * 3
QUICK = Patience(tries=3, stall_s=0.2, wait_s=0.01, most_wait_s=0.05, redirects=3)


@pytest.fixture(autouse=True)
def downloads(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that keeps what was downloaded."""
    folder = tmp_path_factory.mktemp("downloads")
    monkeypatch.setenv("GRADEFLOW_DOWNLOADS", str(folder))
    return folder


class StandInServer(BaseHTTPRequestHandler):
    """Answers by path: good bytes, faults first, a web page, half of the bytes with or without their number, none."""

    failures = 0

    def do_GET(self) -> None:
        if self.path == "/flaky.jsonl" and StandInServer.failures < 2:
            StandInServer.failures += 1
            self.send_error(503)
            return
        if self.path == "/missing.jsonl":
            self.send_error(404)
            return
        body = {"/empty.jsonl": b"", "/large.jsonl": GOOD * 1000}.get(self.path, GOOD)
        self.send_response(200)
        self.send_header("content-type", "text/html" if self.path == "/page.jsonl" else "application/json")
        if self.path != "/cut.jsonl":
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.path in {"/half.jsonl", "/cut.jsonl"} else body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), StandInServer) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def run(source: dict[str, object], out: Path, name: str = "gsm8k") -> list[dict[str, object]]:
    tree = params.load(Path(__file__).parents[1] / "params.yaml").model_dump()
    tree["fetch"][name] = source
    fetch.main(params.validate(tree), dataset=name, out=out, patience=QUICK)
    return list(jsonl.read(out))


def test_a_procedural_source_is_made_in_three_splits(tmp_path: Path) -> None:
    rows = run({"train": 5, "validation": 2, "test": 3}, tmp_path / "x.jsonl", "places")
    assert [row["split"] for row in rows] == ["train"] * 5 + ["validation"] * 2 + ["test"] * 3


def test_files_are_read_from_a_path(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(GOOD)
    rows = run({"files": {"train": str(tmp_path / "train.jsonl")}}, tmp_path / "out.jsonl")
    assert rows == [{"question": "How many?", "answer": "#### 1", "split": "train"}] * 3


def test_files_are_read_from_a_url_even_if_it_fails_at_first(tmp_path: Path, server: str) -> None:
    assert len(run({"files": {"train": f"{server}/flaky.jsonl"}}, tmp_path / "out.jsonl")) == 3


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing", "answered 404"),
        ("page", "web page"),
        ("half", "not fetched in 3 tries"),
        ("cut", "line 2: not JSON: .* [(]the file seems cut off[)].* fetch.gsm8k.files.train"),
        ("empty", "holds no rows; check fetch.gsm8k.files.train"),
    ],
)
def test_a_url_that_gives_no_data_is_named_and_the_good_file_left_alone(
    tmp_path: Path, server: str, path: str, said: str
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(GOOD)
    with pytest.raises(DataError, match=f"^{server}/{path}.jsonl.*{said}"):
        run({"files": {"train": f"{server}/{path}.jsonl"}}, out)
    assert out.read_bytes() == GOOD
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_unreachable_server_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"127\.0\.0\.1:9/x\.jsonl: not fetched.*set the file's path.*gsm8k\.files\.train"
    ):
        run({"files": {"train": "http://127.0.0.1:9/x.jsonl"}}, tmp_path / "out.jsonl")


def test_a_wrong_checksum_leaves_the_good_file_alone(tmp_path: Path) -> None:
    file, out = tmp_path / "train.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(GOOD)
    right = {"files": {"train": str(file)}, "sha256": {"train": hashlib.sha256(GOOD).hexdigest()}}
    run(right, out)
    before = out.read_bytes()
    file.write_bytes(GOOD + b'{"question": "More?", "answer": "#### 2"}\n')
    with pytest.raises(DataError, match="checksum is"):
        run(right, out)
    assert out.read_bytes() == before


def test_a_row_that_does_not_convert_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(GOOD + b'{"question": "How many?", "answer": "none"}\n')
    with pytest.raises(DataError, match=r"train\.jsonl, line 4: field answer.* set fetch\.gsm8k\.bad_rows"):
        run({"files": {"train": str(file)}}, tmp_path / "out.jsonl")


def test_a_dataset_that_params_lack_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"fetch\.nosuch: not in params\.yaml"):
        fetch.main(params.load(Path(__file__).parents[1] / "params.yaml"), dataset="nosuch", out=tmp_path / "x")


def test_a_download_that_the_disk_does_not_hold_names_url_and_folder(
    small_disk: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADEFLOW_DOWNLOADS", str(small_disk))
    (small_disk / "fill").write_bytes(bytes((1 << 20) - 16384))
    out = tmp_path / "out.jsonl"
    with pytest.raises(
        DataError, match=rf"^{server}/large.jsonl: cannot be kept in {small_disk}: No space left.*GRADEFLOW_DOWNLOADS"
    ):
        run({"files": {"train": f"{server}/large.jsonl"}}, out)
    assert not out.exists()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_fetch_leaves_the_good_file_and_is_told_without_a_traceback(
    tmp_path: Path, end: signal.Signals
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(GOOD)
    command = [
        sys.executable,
        "-m",
        "gradeflow",
        "fetch",
        "places",
        "--out",
        str(out),
        "--fetch.places.train",
        "9999999",
    ]
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[1],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - a background job ignores it
    ) as running:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.jsonl.*.part")) and time.monotonic() < deadline:
            time.sleep(0.01)
        running.send_signal(end)
        said = running.communicate()[1]
    assert out.read_bytes() == GOOD
    if end == signal.SIGINT:
        assert (running.returncode, said) == (130, "gradeflow: interrupted; the same command goes on where it was\n")
        assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


def rows_of(text: bytes, split: str = "train") -> list[dict[str, object]]:
    return [{**json.loads(line), "split": split} for line in text.splitlines()]


def publish(monkeypatch: pytest.MonkeyPatch, *files: File, **more: object) -> None:
    """Let the dataset gsm8k be published there."""
    published = Published("http://127.0.0.1", "MIT", "nobody", files)
    source = SimpleNamespace(example=gsm8k.example, PUBLISHED=published, **more)
    monkeypatch.setattr(sources, "load", lambda name: source)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_without_settings_a_dataset_comes_from_where_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileServer({"/a/train.jsonl": GOOD, "/b/test.jsonl.gz": gzip.compress(GOOD)}) as server:
        publish(
            monkeypatch,
            File("train", {f"{server.url}/gone/train.jsonl": "", f"{server.url}/a/train.jsonl": sha256(GOOD)}),
            File("test", {f"{server.url}/b/test.jsonl.gz": ""}),
        )
        assert run({}, tmp_path / "out.jsonl") == rows_of(GOOD) + rows_of(GOOD, "test")


def test_what_was_fetched_once_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileServer({"/train.jsonl": GOOD}) as server:
        publish(monkeypatch, File("train", {f"{server.url}/gone.jsonl": "", f"{server.url}/train.jsonl": ""}))
        first = run({}, tmp_path / "out.jsonl")
    assert run({}, tmp_path / "out.jsonl") == first


def test_a_download_that_turns_out_to_be_broken_is_not_kept(tmp_path: Path) -> None:
    with FileServer({"/train.gz": gzip.compress(GOOD)}, ["cut file"]) as server:
        source = {"files": {"train": f"{server.url}/train.gz"}}
        with pytest.raises(DataError, match=f"^{server.url}/train.gz: cut off.*; set .* fetch.gsm8k.files.train"):
            run(source, tmp_path / "out.jsonl")
        assert run(source, tmp_path / "out.jsonl") == rows_of(GOOD)


def test_members_of_a_published_archive_are_chosen_wherever_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data/train/a.jsonl", GOOD)
        archive.writestr("data/test/a.jsonl", GOOD * 2)
    (tmp_path / "data.zip").write_bytes(file.getvalue())
    with FileServer({"/data.zip": file.getvalue()}) as server:
        urls = {f"{server.url}/data.zip": ""}
        publish(monkeypatch, File("train", urls, "data/train/*"), File("test", urls, "data/test/*"))
        both = run({}, tmp_path / "out.jsonl")
        assert len(server.asked) == 1
    assert Counter(row["split"] for row in both) == {"train": 3, "test": 6}
    assert len(run({"files": {"test": str(tmp_path / "data.zip")}}, tmp_path / "out.jsonl")) == 6
    with pytest.raises(SettingsError, match=r"files\.validation: .*data\.zip has no validation rows; it has train"):
        run({"files": {"validation": str(tmp_path / "data.zip")}}, tmp_path / "out.jsonl")
    (tmp_path / "data.zip").rename(tmp_path / "mine.zip")
    assert len(run({"files": {"test": str(tmp_path / "mine.zip")}}, tmp_path / "out.jsonl")) == 9


def test_a_mirror_is_tried_first_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mirror").mkdir()
    with FileServer({"/train.jsonl": GOOD, "/mirror/train.jsonl": GOOD}) as server:
        publish(monkeypatch, File("train", {f"{server.url}/train.jsonl?raw=1": sha256(GOOD)}))
        run({"mirror": f"{server.url}/mirror/"}, tmp_path / "out.jsonl")
        assert [path for path, _ in server.asked] == ["/mirror/train.jsonl"]
        server.files.clear()
        (tmp_path / "mirror" / "train.jsonl").write_bytes(GOOD + b"changed")
        with pytest.raises(
            DataError, match=r"mirror/train\.jsonl: checksum is .*; .*404.*; set .* fetch\.gsm8k\.mirror"
        ):
            run({"mirror": str(tmp_path / "mirror")}, tmp_path / "out.jsonl")
        (tmp_path / "mirror" / "train.jsonl").write_bytes(GOOD)
        assert run({"mirror": str(tmp_path / "mirror")}, tmp_path / "out.jsonl") == rows_of(GOOD)
        assert len(server.asked) == 2


def test_a_published_record_may_hold_several_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passages = {"one": {"questions": ["How many?", "How much?"]}}

    def divided(record: Mapping[str, list[str]]) -> Iterator[dict[str, object]]:
        return ({"question": question, "answer": "#### 1", "key": record["key"]} for question in record["questions"])

    (tmp_path / "train.json").write_text(json.dumps(passages))
    publish(monkeypatch, rows=divided)
    found = run({"files": {"train": str(tmp_path / "train.json")}}, tmp_path / "out.jsonl")
    assert [(row["question"], row["key"]) for row in found] == [("How many?", "one"), ("How much?", "one")]


@pytest.mark.parametrize(("name", "said"), [("places", "row counts"), ("gsm8k", r"set fetch\.gsm8k\.files")])
def test_a_dataset_that_is_not_published_says_what_to_set(
    tmp_path: Path, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(gsm8k, "PUBLISHED", raising=False)
    with pytest.raises(SettingsError, match=f"fetch.{name}: needs .*{said}"):
        run({}, tmp_path / "out.jsonl", name)


def test_all_data_files_of_a_folder_are_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "2.json").write_bytes(GOOD.splitlines()[0])
    (folder / "1.jsonl.gz").write_bytes(gzip.compress(GOOD))
    (folder / "README.md").write_text("about")
    (folder / ".cache.jsonl").write_text("junk")
    assert len(run({"files": {"train": str(folder)}}, tmp_path / "out.jsonl")) == 4
    with pytest.raises(DataError, match="2 files, for which no one checksum"):
        run({"files": {"train": str(folder)}, "sha256": {"train": "0"}}, tmp_path / "out.jsonl")
    (folder / "none").mkdir()
    with pytest.raises(DataError, match=r"none: no file there to read; .*; set .* fetch\.gsm8k\.files\.train"):
        run({"files": {"train": str(folder / "none")}}, tmp_path / "out.jsonl")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A hub client's own cache with a dataset of two files, as the client lays it out."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "datasets--ana--sums"
    for name in ("data/train-0.jsonl", "data/train-1.jsonl", "data/test.jsonl"):
        file = repo / "snapshots" / commit / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(GOOD)
    for revision in ("main", "refs/convert/parquet"):
        (repo / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
        (repo / "refs" / revision).write_text(commit)
    return repo.parent


def from_hub(address: str, hub: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """The hub's client reads its settings when it is imported, so it needs a process of its own."""
    command = [sys.executable, "-m", "gradeflow", "fetch", "gsm8k", "--out", str(out)]
    return subprocess.run(
        [*command, "--fetch.gsm8k.files.train", address],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_dataset_of_the_hub_is_named_with_its_revision(tmp_path: Path, hub: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = from_hub("hub:ana/sums@refs%2Fconvert%2Fparquet/data/train-*.jsonl", hub, out)
    assert done.returncode == 0, done.stderr
    assert list(jsonl.read(out)) == rows_of(GOOD * 2)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("hub:ana/sums/data/test.jsonl", "expected hub:OWNER/NAME@REVISION/PATH"),
        ("hub:ana/more@main/data/test.jsonl", "not to be had from the hub"),
        ("hub:ana/sums@main/data/dev*.jsonl", "no file there to read"),
    ],
)
def test_what_the_hub_does_not_have_is_named_with_the_setting(
    tmp_path: Path, hub: Path, address: str, said: str
) -> None:
    done = from_hub(address, hub, tmp_path / "out.jsonl")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"gradeflow: {address}: {said}")
    assert "fetch.gsm8k.files.train" in line


def test_bad_rows_are_set_aside_with_their_reason_if_so_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out, aside = tmp_path / "train.jsonl", tmp_path / "out.jsonl", tmp_path / "out.bad.jsonl"
    bad = {"question": "How many?", "answer": "none"}
    file.write_bytes(GOOD + json.dumps(bad).encode() + b"\n" + GOOD)
    source = {"files": {"train": str(file)}, "bad_rows": "set aside"}
    assert run(source, out) == rows_of(GOOD * 2)
    (said,) = jsonl.read(aside)
    assert (said["where"], said["row"]) == (f"{file}, line 4", bad)
    assert said["reason"].startswith("field answer: ")
    assert "6 rows; " in (told := capsys.readouterr().out)
    assert "1 set aside" in told
    file.write_bytes(GOOD)
    run(source, out)
    assert not aside.exists()


def test_rows_that_are_all_bad_are_no_dataset(tmp_path: Path) -> None:
    file, out = tmp_path / "train.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"question": "How many?", "answer": "none"}\n')
    with pytest.raises(DataError, match="holds no rows to use; check fetch"):
        run({"files": {"train": str(file)}, "bad_rows": "set aside"}, out)
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


def test_a_kill_in_the_middle_costs_only_what_had_not_arrived(tmp_path: Path, downloads: Path) -> None:
    text = "".join(
        json.dumps({"question": f"How many is {number}?", "answer": f"#### {number}"}) + "\n" for number in range(8000)
    ).encode()
    out = tmp_path / "out.jsonl"
    with FileServer({"/train.jsonl": text}, ["stall"], stall_s=60) as server:
        command = [sys.executable, "-m", "gradeflow", "fetch", "gsm8k", "--out", str(out)]
        command += ["--fetch.gsm8k.files.train", f"{server.url}/train.jsonl"]
        with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL) as running:
            deadline = time.monotonic() + 60
            while (
                not list(downloads.glob("*/.part")) or next(downloads.glob("*/.part")).stat().st_size < len(text) // 2
            ):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            running.kill()
        assert not out.exists()
        sent = server.sent
        subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL, check=True)
        assert server.sent - sent < len(text) // 2
    assert list(jsonl.read(out)) == rows_of(text)


def test_200_faults_of_a_server_end_in_the_right_rows_or_in_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a checksum, a cut shows only in a format that has an end: files that are cut are gzip here."""
    chance = random.Random(0)
    versions = [
        "".join(
            json.dumps({"question": f"{word} {chance.randbytes(600).hex()}?", "answer": "#### 1"}) + "\n"
            for _ in range(300)
        ).encode()
        for word in ("How many", "How much")
    ]
    published = params.load(Path(__file__).parents[1] / "params.yaml", {"fetch.gsm8k.seed": "0"})
    right = [rows_of(version) for version in versions]
    packed = [gzip.compress(version, 1) for version in versions]
    injected: Counter[Fault] = Counter()
    ends: Counter[str] = Counter()
    number = 0
    while injected.total() < 200:
        number += 1
        planned: list[Fault] = []
        for fault in chance.choices(FAULTS, k=chance.randint(1, 3)):
            planned += ["drop", fault] if fault.endswith("range") else [fault]

        def next_fault(request: int, path: str, planned: list[Fault] = planned) -> Fault | None:
            injected.update(planned[request : request + 1])
            return planned[request] if request < len(planned) else None

        first, later = packed if {"cut file", "length too short"} & {*planned} or chance.random() < 0.5 else versions
        checked = chance.random() < 0.5
        accepted = right[:1] if checked else right
        server = FileServer(
            {"/a/train.gz": first, "/b/train.gz": first},
            next_fault,
            later=later,
            validators=chance.choice(["etag", "date", "none"]),
            stall_s=0.3,
        )
        out = tmp_path / f"{number}.jsonl"
        with server:
            urls = {f"{server.url}/{folder}/train.gz": sha256(first) if checked else "" for folder in "ab"}
            publish(monkeypatch, File("train", dict(list(urls.items())[: chance.randint(1, 2)])))
            try:
                fetch.main(published, dataset="gsm8k", out=out, patience=QUICK)
            except DataError as error:
                said = str(error)
                assert said.startswith(f"{server.url}/")
                assert "fetch.gsm8k.files.train" in said
                assert "\n" not in said
                assert not out.exists()
                ends["a clear error"] += 1
            else:
                assert list(jsonl.read(out)) in accepted, planned
                ends["the right rows"] += 1
    with capsys.disabled():
        print(f"\n{number} fetches, {injected.total()} faults: {dict(ends)}; {dict(injected)}")
    assert set(injected) == set(FAULTS)
    assert ends["the right rows"] > number / 3
