import csv
import gzip
import io
import json
import random
import string
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies
from pyarrow import parquet

from gradeflow.errors import DataError
from gradeflow.fetching import records
from gradeflow.fetching.archives import Limits

ROWS = [{"question": f"How many are {number}? Häuser \u2028", "answer": number} for number in range(3)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def rows(path: Path, member: str = "", limits: Limits = records.LIMITS) -> list[records.Row]:
    return [record.row for record in records.read(path, member, limits=limits)]


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def as_parquet(rows: Iterable[object]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(list(rows)), file)
    return file.getvalue()


def as_csv(rows: Iterable[Iterable[object]]) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file).writerows(rows)
    return file.getvalue().encode()


def as_tar(members: dict[str, bytes], change: Callable[[tarfile.TarInfo], None] = lambda info: None) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            change(info)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def as_zip(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


FORMATS = {
    "a.jsonl": LINES,
    "bom.jsonl": b"\xef\xbb\xbf" + LINES,
    "blank.jsonl": b"\n" + LINES.replace(b"\n", b"\r\n\r\n"),
    "list.json": json.dumps(ROWS, indent=2).encode(),
    "bom.json": b"\xef\xbb\xbf " + json.dumps(ROWS).encode(),
    "lines.json": LINES,
    "list.jsonl": json.dumps(ROWS).encode(),
    "a.parquet": as_parquet(ROWS),
    "unnamed": as_parquet(ROWS),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("packed", ["", ".gz", ".tar", ".tar.gz", ".zip"])
def test_the_same_rows_come_from_every_format_packed_or_not(tmp_path: Path, name: str, packed: str) -> None:
    content = FORMATS[name]
    member = name if "." in name else f"{name}.parquet"
    if packed in {".tar", ".tar.gz"}:
        content = as_tar({"README": b"about", f"data/{member}": content})
    if packed == ".zip":
        content = as_zip({"README": b"about", f"data/{member}": content})
    if packed.endswith(".gz"):
        content = gzip.compress(content)
    assert rows(write(tmp_path, name + packed, content)) == ROWS


def test_a_gzip_that_is_not_named_so_is_read_all_the_same(tmp_path: Path) -> None:
    assert rows(write(tmp_path, "a.jsonl", gzip.compress(LINES))) == ROWS


def test_members_of_an_archive_may_be_packed(tmp_path: Path) -> None:
    assert rows(write(tmp_path, "a.zip", as_zip({"a.jsonl.gz": gzip.compress(LINES)}))) == ROWS


def test_csv_with_a_header_gives_text_by_column(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", as_csv([["question", "answer"], ['say "a, b"\nand c', "1"]]))
    assert rows(path) == [{"question": 'say "a, b"\nand c', "answer": "1"}]


def test_six_columns_without_a_header_are_mmlu_s(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", as_csv([["Which?", "one", "two", "three", "four", "B"]]))
    assert rows(path) == [
        {"question": "Which?", "A": "one", "B": "two", "C": "three", "D": "four", "answer": "B"},
    ]
    named = write(tmp_path, "b.csv", as_csv([["question", "A", "B", "C", "D", "answer"], *[list("qabcdB")]]))
    assert [row["question"] for row in rows(named)] == ["q"]


def test_one_object_is_one_row(tmp_path: Path) -> None:
    row = {"problem": "1 + 1", "level": "Level 1", "solution": "\\boxed{2}"}
    assert rows(write(tmp_path, "1.json", json.dumps(row, indent=1).encode())) == [row]
    assert rows(write(tmp_path, "2.json", b"{}")) == [{}]


@pytest.mark.parametrize("count", [1, 3, records.HELD + 50])
def test_an_object_of_objects_is_a_row_of_each_with_its_key(tmp_path: Path, count: int) -> None:
    passages = {f"nfl_{number}": {"passage": "p", "qa_pairs": [{"question": "q"}]} for number in range(count)}
    found = rows(write(tmp_path, "a.json", json.dumps(passages).encode()))
    assert found == [{"key": key, **value} for key, value in passages.items()]


def test_a_record_says_where_it_stands(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tar", as_tar({"data/x.jsonl": LINES, "data/y.json": json.dumps(ROWS).encode()}))
    found = [record.where for record in records.read(path, name="the archive")]
    assert found[0] == "the archive, data/x.jsonl, line 1"
    assert found[5] == "the archive, data/y.json, row 3"


def test_a_glob_chooses_the_members(tmp_path: Path) -> None:
    members = {"data/test/a.jsonl": LINES, "data/val/b.jsonl": LINES[: LINES.index(b"\n")], "data/test/._a.jsonl": b"x"}
    for name, content in (("a.tar", as_tar(members)), ("a.zip", as_zip(members))):
        path = write(tmp_path, name, content)
        assert len(rows(path, "data/val/*.jsonl")) == 1
        with pytest.raises(DataError, match=rf"{name}: no file in it matches data/dev/\*; it has data/test/a.jsonl, "):
            rows(path, "data/dev/*")


def test_what_is_not_data_in_an_archive_is_passed_over(tmp_path: Path) -> None:
    junk = {"README.md": b"#", "__MACOSX/a.jsonl": b"\0", "data/.DS_Store": b"\0", "data/._a.jsonl": b"\0"}
    path = write(tmp_path, "a.zip", as_zip({**junk, "data/a.jsonl": LINES}))
    assert rows(path) == ROWS
    with pytest.raises(DataError, match=r"no file in it is of \.jsonl, .*; it has README\.md, "):
        rows(write(tmp_path, "b.zip", as_zip(junk)))


GOOD = b'{"a": 1}\n'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", GOOD + b'{"a": \n', "a.jsonl, line 2: not JSON: Expecting value"),
        ("a.jsonl", GOOD + b'{"a": "x', r"line 2: not JSON: Unterminated string.* \(the file seems cut off\)"),
        ("a.jsonl", GOOD + b"[1]\n", "line 2: expected an object, found list"),
        ("a.jsonl", GOOD + b"null\n", "line 2: expected an object, found NoneType"),
        ("a.jsonl", GOOD + b'{"a": 1, "a": 2}\n', "line 2: not JSON: 'a' stands twice"),
        ("a.jsonl", GOOD + b'{"a": NaN}\n', "line 2: not JSON: NaN is no JSON number"),
        ("a.jsonl", GOOD + b'{"a": -Infinity}\n', "line 2: not JSON: -Infinity is no JSON number"),
        ("a.jsonl", GOOD + b'{"a": 1e999}\n', "line 2: not JSON: the number 1e999 is too large"),
        ("a.jsonl", GOOD + b'{"a": ' + b"9" * 5000 + b"}\n", "line 2: not JSON: .*digits"),
        ("a.jsonl", GOOD + b'{"a": "\\ud83d"}\n', r"line 2: not JSON: \\ud83d is half a character"),
        ("a.jsonl", GOOD + b'{"a": ' + b"[" * 100_000, "line 2: not JSON: nested too deeply"),
        ("a.jsonl", GOOD + b'{"a": "\xff"}\n', "line 2: not UTF-8 at byte 8 of the line"),
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), "a.jsonl: UTF-16 text; save it as UTF-8"),
        ("a.json", "[{}]".encode("utf-16-be"), "a.json: UTF-16 text; save it as UTF-8"),
        ("a.json", b"\n <!DOCTYPE html>\n<html>", r"a.json: a web page \(HTML\), not data"),
        ("a.csv", b"<html><body>no", r"a.csv: a web page \(HTML\), not data"),
        ("a.json", b'[\n{"a": 1},\n{"a" 2}]', "a.json, line 3: not JSON: Expecting ':' delimiter"),
        ("a.json", b'[{"a": 1},\n{"a": 2}', r"line 2: not JSON: expected , or \] \(the file seems cut off\)"),
        ("a.json", b'[{"a": 1},\n', r"line 2: not JSON: Expecting value \(the file seems cut off\)"),
        ("a.json", b'[{"a": 1}\n{"a": 1}]', r"line 2: not JSON: expected , or \]"),
        ("a.json", b'[{"a": 1},]', "line 1: not JSON: Expecting value"),
        ("a.json", b'[{"a": 1}, 3]', "a.json, row 2: expected an object, found int"),
        ("a.json", b'[{"a": 1}] x', "line 1: not JSON: Expecting value"),
        ("a.json", b'[{"a": 1},\n{"a": NaN}]', "line 2: not JSON: NaN is no JSON number"),
        ("a.json", b'[{"a": [{"b": 1, "b": 1}]}]', "line 1: not JSON: 'b' stands twice"),
        ("a.json", b'{"a": {},\n"a": {}}', "line 2: not JSON: 'a' stands twice"),
        ("a.json", b'{"a": {}, b', "line 1: not JSON: expected a name in quotes"),
        ("a.json", b"[" * 100_000, "line 1: not JSON: nested too deeply"),
        ("a.json", b'["\\udc00"]', r"half a character"),
        ("a.json", b'[{"a": "' + b"x" * 2_000_000 + b'\xff"}]', "a.json: not UTF-8 at byte 2,000,009 of the file"),
        ("a.csv", b'q,a\n"x,1\n', "a.csv, line 2: not CSV: unexpected end of data"),
        ("a.csv", b'q,a\n"x"y,1\n', "a.csv, line 2: not CSV"),
        ("a.csv", b"q,a\nx\n", "a.csv, line 2: 1 cells, expected 2: q, a"),
        ("a.csv", b"q,q\nx,y\n", "a.csv, line 1: the header names a column twice or not at all"),
        ("a.csv", b"q,a\nx,\xe4\n", "a.csv, line 2: not UTF-8 at byte 3 of the line"),
        ("a.parquet", as_parquet(ROWS)[:-40], "a.parquet, after row 0: broken Parquet: "),
        ("a.parquet", as_parquet([{"a": float("nan")}]), "a.parquet, row 1, field a: no JSON value: "),
        ("a.parquet", as_parquet([{"a": b"x"}]), "a.parquet, row 1, field a: no JSON value: .*bytes"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-12], "a.jsonl.gz: cut off: its end is missing"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-8] + b"\0" * 8, "a.jsonl.gz: broken: CRC check failed"),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode())[:-4], "a.json.gz: cut off"),
        ("a.zip", as_zip({"a.jsonl": LINES})[:-30], "a.zip: broken or cut off: "),
        ("a.tar", as_tar({"a.jsonl": LINES})[:600], "a.tar, a.jsonl: broken: unexpected end of data"),
        ("a.tar", as_tar({"a.jsonl": LINES})[:1024], "a.tar: broken or cut off: the mark at the end"),
        ("a.tar", as_tar({"a.jsonl": LINES, "b.jsonl": LINES}).replace(b"b.jsonl", b"c.jsonl"), "a.tar: broken"),
        ("a.tar", b"", "a.tar: broken or cut off: empty file"),
        ("a.tgz", gzip.compress(as_tar({"a.jsonl": LINES}))[:-9], "a.tgz: cut off"),
        ("a.tar", as_tar({"a.jsonl": as_zip({"b.jsonl": LINES})}), "a.tar, a.jsonl: packed twice"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(LINES)), "a.jsonl.gz: packed twice"),
        ("a.tar", as_tar({"a.jsonl": GOOD + b"x"}), "a.tar, a.jsonl, line 2: not JSON"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        rows(write(tmp_path, name, content))
    assert str(caught.value).startswith(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: no such file"):
        rows(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        rows(tmp_path)


@pytest.mark.parametrize("name", ["/etc/a.jsonl", "../a.jsonl", "x/../../a.jsonl", "C:a.jsonl", "..\\a.jsonl"])
def test_a_name_that_leads_out_of_the_archive_is_refused(tmp_path: Path, name: str) -> None:
    for path in (
        write(tmp_path, "a.tar", as_tar({name: LINES})),
        write(tmp_path, "a.zip", as_zip({name: LINES})),
    ):
        with pytest.raises(DataError, match="leads out of the archive's folder"):
            rows(path, "*.jsonl")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname, info.size = kind, "secret", 0

    with pytest.raises(DataError, match=r"a\.jsonl: a link or a device"):
        rows(write(tmp_path, "a.tar", as_tar({"a.jsonl": b""}, change)))


def test_links_in_a_zip_are_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("a.jsonl")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(info, "secret")
    with pytest.raises(DataError, match=r"a\.jsonl: a link"):
        rows(tmp_path / "a.zip")


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    content = bytearray(as_zip({"a.jsonl": LINES}))
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(DataError, match=r"a\.zip, a\.jsonl: encrypted; unpack it"):
        rows(write(tmp_path, "a.zip", bytes(content)))


def test_a_member_whose_bytes_were_changed_is_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", LINES)
    content = file.getvalue().replace(b"How many", b"How mony", 1)
    with pytest.raises(DataError, match=r"a\.zip, a\.jsonl: broken: Bad CRC-32"):
        rows(write(tmp_path, "a.zip", content))


BOMB = b'{"a": "' + b"0" * 10_000_000 + b'"}\n'


@pytest.mark.parametrize(
    ("name", "content", "limits", "said"),
    [
        ("a.gz", gzip.compress(BOMB), Limits(free_bytes=1 << 20), "more than 200 times its size"),
        ("a.tar.gz", gzip.compress(as_tar({"a.jsonl": BOMB})), Limits(free_bytes=1 << 20), "more than 200 times"),
        ("a.zip", as_zip({"a.jsonl": BOMB}), Limits(free_bytes=1 << 20), "more than 200 times its size"),
        ("a.gz", gzip.compress(BOMB), Limits(total_bytes=1 << 20), "more than 1,048,576 bytes"),
        ("a.zip", as_zip({"a.jsonl": LINES, "b.jsonl": LINES}), Limits(total_bytes=len(LINES)), "unpacks to more than"),
        ("a.zip", as_zip({"a.jsonl": LINES}), Limits(member_bytes=20), "a.jsonl: .* bytes, more than the 20"),
        ("a.tar", as_tar({"a.jsonl": LINES}), Limits(member_bytes=20), "a.jsonl: .* bytes, more than the 20"),
        ("a.zip", as_zip(dict.fromkeys("abc", b"")), Limits(members=2), "holds more than 2 files"),
        ("a.tar", as_tar(dict.fromkeys("abc", b"")), Limits(members=2), "holds more than 2 files"),
        ("a.jsonl", GOOD + BOMB, Limits(row_bytes=1 << 20), "a.jsonl, line 2: longer than 1,048,576 bytes"),
        ("a.json", b"[{}," + BOMB + b"]", Limits(row_bytes=1 << 20), "line 1: a value longer than 1,048,576 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_unpacks_to_too_much_is_refused_before_it_is_in_memory(
    tmp_path: Path, name: str, content: bytes, limits: Limits, said: str
) -> None:
    path = write(tmp_path, name, content)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=said):
            rows(path, limits=limits)
        assert tracemalloc.get_traced_memory()[1] < len(BOMB)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["list", "keys"])
def test_a_long_list_is_never_in_memory_whole(tmp_path: Path, kind: str) -> None:
    text = string.ascii_letters * 40
    with (tmp_path / "a.json").open("w") as file:
        file.write("[" if kind == "list" else "{")
        for number in range(15_000):
            key = "" if kind == "list" else f'"{number}": '
            file.write(f"{',' if number else ''}{key}{json.dumps({'n': number, 'text': text})}\n")
        file.write("]" if kind == "list" else "}")
    tracemalloc.start()
    try:
        assert sum(1 for _ in records.read(tmp_path / "a.json")) == 15_000
        assert tracemalloc.get_traced_memory()[1] < 12 << 20 < (tmp_path / "a.json").stat().st_size
    finally:
        tracemalloc.stop()


JSON = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers(-(2**70), 2**70)
    | strategies.text(max_size=5)
    | strategies.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        strategies.lists(inner, max_size=3) | strategies.dictionaries(strategies.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    found=strategies.lists(strategies.dictionaries(strategies.text(max_size=3), JSON, max_size=3), max_size=4),
    indent=strategies.sampled_from([None, 2]),
    ascii_only=strategies.booleans(),
    chunk=strategies.integers(1, 40),
)
def test_a_list_is_read_alike_however_it_is_written_and_wherever_it_is_divided(
    tmp_path: Path, found: list[records.Row], indent: int | None, ascii_only: bool, chunk: int
) -> None:
    path = write(tmp_path, "a.json", json.dumps(found, indent=indent, ensure_ascii=ascii_only).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "CHUNK_BYTES", chunk)
        assert rows(path) == found


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(seed=strategies.integers(0, 10**9), name=strategies.sampled_from(sorted({*FORMATS, "a.zip", "a.tar", "a.tgz"})))
@example(seed=534, name="a.zip")  # a version of the format that zipfile does not know
@example(seed=1293, name="a.zip")  # a name that is no UTF-8
@example(seed=4354, name="a.zip")  # no name at all
def test_damaged_bytes_give_rows_or_one_clear_line(tmp_path: Path, seed: int, name: str) -> None:
    chance = random.Random(seed)
    whole = {
        "a.zip": as_zip({"a.jsonl": LINES}),
        "a.tar": as_tar({"a.jsonl": LINES}),
        "a.tgz": gzip.compress(as_tar({"a.jsonl": LINES})),
    }
    content = bytearray(whole.get(name) or FORMATS[name])
    for _ in range(chance.randint(1, 4)):
        content[chance.randrange(len(content))] = chance.randrange(256)
    del content[chance.choice([len(content), chance.randrange(len(content))]) :]
    path = write(tmp_path, name, bytes(content))
    said = ""
    try:
        rows(path)
    except DataError as error:
        said = str(error)
    assert not said or said.startswith(str(path))
    assert "\n" not in said
