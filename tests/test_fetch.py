import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gradeflow import fetch, jsonl, params
from gradeflow.errors import DataError, SettingsError

GOOD = b'{"question": "How many?", "answer": "#### 1"}\n' * 3


class StandInServer(BaseHTTPRequestHandler):
    """Answers by path: good bytes, faults first, a web page, half of the bytes."""

    failures = 0

    def do_GET(self) -> None:
        if self.path == "/flaky.jsonl" and StandInServer.failures < 2:
            StandInServer.failures += 1
            self.send_error(503)
            return
        if self.path == "/missing.jsonl":
            self.send_error(404)
            return
        body = GOOD
        self.send_response(200)
        self.send_header("content-type", "text/html" if self.path == "/page.jsonl" else "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.path == "/half.jsonl" else body)

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
    [("missing", "answered 404"), ("page", "web page"), ("half", "not reached after 3 tries")],
)
def test_a_url_that_gives_no_data_is_named(tmp_path: Path, server: str, path: str, said: str) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(DataError, match=said) as raised:
        run({"files": {"train": f"{server}/{path}.jsonl"}}, out)
    assert f"{server}/{path}.jsonl" in str(raised.value)
    assert not out.exists()


def test_an_unreachable_server_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9/x\.jsonl: not reached.*set the file's path"):
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
