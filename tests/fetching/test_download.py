import hashlib
import json
import random
import threading
from pathlib import Path

import pytest

from gradeflow.errors import DataError
from gradeflow.fetching import download
from gradeflow.fetching.download import Patience
from support.file_server import FileServer

QUICK = Patience(tries=3, stall_s=0.3, wait_s=0.01, most_wait_s=0.05, redirects=3)
DATA = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


def get(server: FileServer, cache: Path, sha256: str = "", name: str = "a.bin") -> Path:
    return download.fetch(f"{server.url}/{name}", sha256, cache, lambda *_: None, QUICK)


def ranges(server: FileServer) -> list[str]:
    return [headers.get("range", "") for _, headers in server.asked]


def test_a_file_is_kept_under_its_name_and_asked_for_once(tmp_path: Path) -> None:
    with FileServer({"/a.bin": DATA}) as server:
        first, second = get(server, tmp_path), get(server, tmp_path)
    assert first == second
    assert first.name == "a.bin"
    assert first.read_bytes() == DATA
    assert len(server.asked) == 1


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    with FileServer({"/a.bin": DATA}) as server:
        download.fetch(f"{server.url}/a.bin", "", tmp_path, lambda _, have, total: told.append((have, total)), QUICK)
    assert told == sorted(told)
    assert told[-1] == (len(DATA), len(DATA))


@pytest.mark.parametrize("validators", ["etag", "date"])
def test_a_broken_download_goes_on_where_it_was(tmp_path: Path, validators: str) -> None:
    with FileServer({"/a.bin": DATA}, ["drop", "drop"], validators=validators) as server:  # type: ignore[arg-type]
        assert get(server, tmp_path).read_bytes() == DATA
    assert ranges(server)[0] == ""
    assert all(said.startswith("bytes=") for said in ranges(server)[1:])
    assert all("if-range" in headers for _, headers in server.asked[1:])


def test_what_cannot_be_told_apart_begins_anew_unless_a_checksum_tells(tmp_path: Path) -> None:
    with FileServer({"/a.bin": DATA}, ["drop"], validators="none") as server:
        get(server, tmp_path / "without")
        assert ranges(server) == ["", ""]
    with FileServer({"/a.bin": DATA}, ["drop"], validators="none") as server:
        get(server, tmp_path / "with", SHA256)
        assert ranges(server)[1].startswith("bytes=")


def test_a_download_that_brings_more_each_time_is_not_given_up(tmp_path: Path) -> None:
    data = DATA * 20
    with FileServer({"/a.bin": data}, ["drop"] * 4) as server:
        assert get(server, tmp_path).read_bytes() == data
    assert len(server.asked) == QUICK.tries + 2


@pytest.mark.parametrize("fault", ["wrong range", "longer range", "ignored range"])
def test_a_range_that_was_not_asked_for_begins_anew(tmp_path: Path, fault: str) -> None:
    with FileServer({"/a.bin": DATA}, ["drop", fault]) as server:  # type: ignore[list-item]
        assert get(server, tmp_path).read_bytes() == DATA


@pytest.mark.parametrize("validators", ["etag", "date", "none"])
def test_versions_are_never_mixed(tmp_path: Path, validators: str) -> None:
    later = random.Random(1).randbytes(300_000)
    with FileServer({"/a.bin": DATA}, ["drop", "changed"], later=later, validators=validators) as server:  # type: ignore[arg-type]
        assert get(server, tmp_path).read_bytes() == later


def test_versions_that_only_a_checksum_tells_apart_are_not_mixed_either(tmp_path: Path) -> None:
    later = random.Random(1).randbytes(300_000)
    faults = ["drop", "changed"]
    with FileServer({"/a.bin": DATA}, faults, later=later, validators="none") as server:  # type: ignore[arg-type]
        assert get(server, tmp_path, hashlib.sha256(later).hexdigest()).read_bytes() == later
    assert len(server.asked) == 3


def test_a_file_that_has_become_shorter_begins_anew(tmp_path: Path) -> None:
    shorter = DATA[:1000]
    faults = ["drop", "changed"]
    with FileServer({"/a.bin": DATA}, faults, later=shorter, validators="none") as server:  # type: ignore[arg-type]
        assert get(server, tmp_path, hashlib.sha256(shorter).hexdigest()).read_bytes() == shorter


def test_bytes_with_a_wrong_checksum_are_thrown_away_and_asked_for_once_more(tmp_path: Path) -> None:
    with FileServer({"/a.bin": DATA}, ["cut file"]) as server:
        assert get(server, tmp_path, SHA256).read_bytes() == DATA
    with FileServer({"/a.bin": DATA[1:]}) as server:
        with pytest.raises(DataError, match=f"^{server.url}/a.bin: checksum is [0-9a-f]{{64}}, expected {SHA256}"):
            get(server, tmp_path, SHA256)
        assert len(server.asked) == 2
        folder = tmp_path / hashlib.sha256(f"{server.url}/a.bin".encode()).hexdigest()[:32]
        assert [file.name for file in folder.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("fault", "said", "requests"),
    [
        ("404", "answered 404 Not Found", 1),
        ("web page", "a web page, not a data file", 1),
        ("web page as data", "a web page, not a data file", 1),
        ("redirect loop", "redirected more than 3 times", 4),
        ("503 for an hour", "asks to come back in 3600 s", 1),
        ("503", "not fetched in 3 tries [(].*503 Service Unavailable", 3),
        ("429", "not fetched in 3 tries [(].*429 Too Many Requests", 3),
        ("length too long", "not fetched in 3 tries", 5),
    ],
)
def test_what_no_try_mends_is_given_up_with_its_reason(tmp_path: Path, fault: str, said: str, requests: int) -> None:
    with FileServer({"/a.bin": DATA}, lambda number, path: fault) as server:  # type: ignore[arg-type, return-value]
        with pytest.raises(DataError, match=f"^{server.url}/a.bin: .*{said}"):
            get(server, tmp_path)
        assert len(server.asked) <= requests


def test_a_web_page_does_not_cost_the_part_that_is_here(tmp_path: Path) -> None:
    with FileServer({"/a.bin": DATA}, ["drop", "web page as data"]) as server:
        with pytest.raises(DataError, match="web page"):
            get(server, tmp_path)
        assert get(server, tmp_path).read_bytes() == DATA
        assert ranges(server)[2].startswith("bytes=")


def test_a_stalled_download_goes_on(tmp_path: Path) -> None:
    with FileServer({"/a.bin": DATA}, ["stall"]) as server:
        assert get(server, tmp_path).read_bytes() == DATA
    assert len(server.asked) == 2


def test_redirects_are_followed_with_the_range(tmp_path: Path) -> None:
    with FileServer({"/a.bin": DATA}, ["redirect", "drop", "redirect"]) as server:
        assert get(server, tmp_path).read_bytes() == DATA
    assert [path for path, _ in server.asked] == ["/a.bin", "/moved/a.bin"] * 2
    assert ranges(server)[3].startswith("bytes=")


def test_downloads_go_through_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileServer({"http://files.example/a.bin": DATA}) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("http_proxy", proxy.url)
        path = download.fetch("http://files.example/a.bin", "", tmp_path, lambda *_: None, QUICK)
    assert path.read_bytes() == DATA


def test_a_cache_that_cannot_be_written_serves_what_it_has(tmp_path: Path) -> None:
    with FileServer({"/a.bin": DATA}) as server:
        lock = get(server, tmp_path).parent / ".lock"
        lock.unlink()
        lock.mkdir()
        assert get(server, tmp_path).read_bytes() == DATA
        with pytest.raises(
            DataError, match=f"cannot be kept in {tmp_path}: Is a directory, or set GRADEFLOW_DOWNLOADS"
        ):
            get(server, tmp_path, "0" * 64)


def test_two_at_once_ask_the_server_once(tmp_path: Path) -> None:
    with FileServer({"/a.bin": DATA}, latency_s=0.2) as server:
        threads = [threading.Thread(target=get, args=(server, tmp_path)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(server.asked) == 1
        assert get(server, tmp_path).read_bytes() == DATA


def test_a_kept_file_that_was_damaged_is_fetched_again(tmp_path: Path) -> None:
    with FileServer({"/a.bin": DATA}) as server:
        get(server, tmp_path).write_bytes(DATA[:-1])
        assert not download.is_kept(f"{server.url}/a.bin", "", tmp_path)
        assert get(server, tmp_path).read_bytes() == DATA


def test_a_kept_file_with_another_checksum_stays_until_the_right_one_is_here(tmp_path: Path) -> None:
    with FileServer({"/a.bin": DATA}) as server:
        path = get(server, tmp_path)
        with pytest.raises(DataError, match="checksum is"):
            get(server, tmp_path, "0" * 64)
    assert path.read_bytes() == DATA


@pytest.mark.parametrize("noted", [b"", b"{", b"[]", b'{"validator": "\\"x\\"", "bytes": null}'])
def test_what_is_known_of_a_part_may_be_lost(tmp_path: Path, noted: bytes) -> None:
    with FileServer({"/a.bin": DATA}) as server:
        folder = get(server, tmp_path).parent
        for file in folder.iterdir():
            file.unlink()
        (folder / ".part").write_bytes(b"something else")
        (folder / ".part.json").write_bytes(noted)
        assert get(server, tmp_path).read_bytes() == DATA


def test_a_part_that_is_complete_needs_no_network(tmp_path: Path) -> None:
    with FileServer({"/a.bin": DATA}) as server:
        folder = get(server, tmp_path).parent
        (folder / "a.bin").rename(folder / ".part")
        (folder / ".part.json").write_text(json.dumps({"validator": '"x"', "bytes": len(DATA)}))
    assert get(server, tmp_path).read_bytes() == DATA


def test_a_password_in_a_url_is_not_told(tmp_path: Path) -> None:
    with FileServer({}) as server:
        url = server.url.replace("http://", "http://ana:correcthorse@")
        with pytest.raises(DataError, match="answered 404") as caught:
            download.fetch(f"{url}/a.bin", "", tmp_path, lambda *_: None, QUICK)
    assert "correcthorse" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://", "http://[::1", "ftp://127.0.0.1/a", "http://127.0.0.1:99999/a"])
def test_what_is_no_url_to_fetch_is_named(tmp_path: Path, url: str) -> None:
    with pytest.raises(DataError) as caught:
        download.fetch(url, "", tmp_path, lambda *_: None, QUICK)
    assert str(caught.value).startswith(f"{url}: ")
    assert "\n" not in str(caught.value)
