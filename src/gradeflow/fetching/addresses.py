"""Where a file is said to be: a URL, a file, a folder of files, or `hub:OWNER/NAME@REVISION/PATH` of a dataset there.

A hub's revision is a commit, a tag or a branch, with %2F for slashes; its path may be a glob. The hub's own client
fetches it, keeps it, and honours HF_ENDPOINT and HF_HUB_OFFLINE.
"""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from gradeflow import digest
from gradeflow.errors import DataError
from gradeflow.fetching import archives, download
from gradeflow.fetching.download import Patience, Report
from gradeflow.redact import redact

HUB = re.compile(r"hub:(?P<repo>[^/@\s]+/[^/@\s]+)@(?P<revision>[^/\s]+)/(?P<path>\S+)")


@dataclass(frozen=True, slots=True)
class Found:
    """What an address has given: files on this machine, each under the name that messages call it.

    Those that are `doubtful` were downloaded without a checksum to tell whether they are whole.
    """

    address: str
    files: Mapping[str, Path]
    doubtful: bool = False


def obtain(addresses: Mapping[str, str], cache: Path, report: Report, patience: Patience) -> Found:
    """What the first address gives that gives anything: addresses with checksums or "", in order of preference.

    Those that need no network come first. Downloads are kept in the folder `cache`.

    Raises:
        DataError: why each of them gives nothing.
    """
    reasons = []
    for address in sorted(addresses, key=lambda address: not _is_here(address, addresses[address], cache)):
        try:
            if _is_url(address):
                path = download.fetch(address, addresses[address], cache, report, patience)
                return Found(redact(address), {redact(address): path}, doubtful=not addresses[address])
            files = _from_hub(address) if address.startswith("hub:") else _from_disk(address)
            _require_checksum(files, addresses[address], address)
        except DataError as error:
            reasons.append(str(error))
        else:
            return Found(address, files)
    raise DataError("; ".join(reasons))


def _is_url(address: str) -> bool:
    return "://" in address


def _is_here(address: str, sha256: str, cache: Path) -> bool:
    return download.is_kept(address, sha256, cache) if _is_url(address) else Path(address).exists()


def _from_disk(address: str) -> dict[str, Path]:
    path = Path(address)
    if not path.exists():
        raise DataError(f"{address}: no such file")
    if not path.is_dir():
        return {address: path}
    inside = {file: file.relative_to(path).as_posix() for file in sorted(path.rglob("*")) if file.is_file()}
    return _require_files(address, {str(file): file for file in inside if archives.readable(inside[file])})


def _from_hub(address: str) -> dict[str, Path]:
    import httpx
    import huggingface_hub

    asked = HUB.fullmatch(address)
    if asked is None:
        raise DataError(f"{address}: expected hub:OWNER/NAME@REVISION/PATH, slashes within the revision as %2F")
    repo, revision, wanted = asked.groups()
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repo, repo_type="dataset", revision=unquote(revision), allow_patterns=wanted
            )
        )
    except (httpx.HTTPError, OSError, ValueError) as error:
        said = redact(" ".join(str(error).split()))
        raise DataError(f"{address}: not to be had from the hub ({type(error).__name__}: {said})") from None
    inside = {file: file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file()}
    matching = {file: path for file, path in inside.items() if fnmatch.fnmatchcase(path, wanted)}
    return _require_files(address, {f"hub:{repo}@{revision}/{path}": file for file, path in matching.items()})


def _require_files(address: str, files: dict[str, Path]) -> dict[str, Path]:
    if not files:
        raise DataError(f"{address}: no file there to read; expected some of {', '.join(archives.READABLE)}")
    return files


def _require_checksum(files: Mapping[str, Path], sha256: str, address: str) -> None:
    if sha256 and len(files) > 1:
        raise DataError(f"{address}: {len(files)} files, for which no one checksum (sha256) can stand")
    for called, path in files.items() if sha256 else ():
        if (found := digest.of_file(path)) != sha256.lower():
            raise DataError(f"{called}: checksum is {found}, expected {sha256}: another version, or a broken download")
