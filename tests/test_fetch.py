import hashlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gradeflow import fetch, jsonl, params
from gradeflow.errors import DataError, SettingsError

GOOD = b'{"question": "How many?", "answer": "#### 1"}\n' * 3


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
    fetch.main(params.validate(tree), dataset=name, out=out)
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
        ("cut", "line 2: not JSON: .* [(]the file seems cut off[)]"),
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
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9/x\.jsonl: not fetched.*set the file's path"):
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
    with pytest.raises(DataError, match=r"train\.jsonl, row 4: field answer"):
        run({"files": {"train": str(file)}}, tmp_path / "out.jsonl")


def test_a_dataset_that_params_lack_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"fetch\.nosuch: not in params\.yaml"):
        fetch.main(params.load(Path(__file__).parents[1] / "params.yaml"), dataset="nosuch", out=tmp_path / "x")


def test_a_download_that_the_disk_does_not_hold_names_url_and_folder(
    small_disk: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    (small_disk / "fill").write_bytes(bytes((1 << 20) - 4096))
    out = tmp_path / "out.jsonl"
    with pytest.raises(
        DataError, match=rf"^{server}/large.jsonl: cannot be kept in {small_disk}/.*No space left.*TMPDIR"
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
