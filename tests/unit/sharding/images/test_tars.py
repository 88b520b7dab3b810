"""Search of tars by patterns and lists, and of members by headers, including hostile files."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from braceexpand import braceexpand

from trp_scale.errors import DataError
from trp_scale.sharding.images.tars import expand_braces, find_tars, tar_members, unique_names


@pytest.mark.parametrize(
    "pattern",
    [
        "a-{000..012}.tar",
        "{a,b}-{1..3}.tar",
        "x{9..11}y",
        "{0..10..5}",
        "{3..1}",
        "s3://b/{train,val}/{00..01}.tar",
        "p",
    ],
)
def test_braces_are_expanded_as_by_webdataset(pattern: str) -> None:
    assert expand_braces(pattern) == list(braceexpand(pattern))


def test_braces_without_end(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1000000"):
        expand_braces("{0..99999999}.tar")
    assert expand_braces("a{x}b{1,2}") == ["a{x}b1", "a{x}b2"]
    with pytest.raises(DataError, match=r"/a/x/y\.tar"):
        unique_names(["/a/x/y.tar", "/a/x/y.tar"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a" * 20_000 + "{000000..999999}.tar\n", "20010 characters"),
        ("{" + "," * 900_000 + "}" + "x" * 10_000 + ".tar\n", "10004 characters"),
        ("{a,b}" * 2000 + ".tar\n", "2000 pairs"),
        ("{a}" * 2000 + ".tar\n", "2000 pairs"),
        ("x" * 2_000_000 + ".tar\n", "2000004 characters"),
        pytest.param(
            "".join(f"{n}-{{0..399999}}.tar\n" for n in range(9)), "line 3: .*1000000", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_short_list_of_endless_tars_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """The first took 20 GB, the third and fourth overflowed the stack, the last took a minute per million names."""
    path = tmp_path / "tars.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        find_tars(str(path))


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("size", [2 << 20, 1 << 40, 1 << 62])
def test_a_tar_whose_header_says_a_huge_size_is_refused(kind: bytes, size: int) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, size
    stream = io.BytesIO(header.tobuf(tarfile.GNU_FORMAT) + bytes(10_240))
    with pytest.raises(DataError, match=rf"x\.tar.*{size}.*byte 512"):
        list(tar_members("x.tar", stream))


def test_headers_that_all_members_repeat_are_not_kept_for_each(tmp_path: Path) -> None:
    """3 MB took 3 GB."""
    stream = io.BytesIO()
    settings = {f"key{number}": "1" for number in range(5000)}
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT, pax_headers=settings) as archive:
        for number in range(300):
            entry = tarfile.TarInfo(f"{number:04d}.txt")
            entry.pax_headers = {"comment": "own"}
            archive.addfile(entry)
    stream.seek(0)
    tracemalloc.start()
    assert len(list(tar_members("x.tar", stream))) == 300
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20
