"""A hostfile is examined as DeepSpeed reads it, and its hosts as DeepSpeed reaches them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from deepspeed.launcher.runner import _parse_hostfile

from trp_scale.diagnostics.hostfile import examine_hostfile


@pytest.fixture(autouse=True)
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of this name that reaches hosts called node*, and asks the others for a password."""
    program = tmp_path / "ssh"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "assert sys.argv[1:5] == ['-o', 'BatchMode=yes', '-o', 'ConnectTimeout=5'] and sys.argv[6] == 'true'\n"
        "sys.exit(0 if sys.argv[5].startswith('node') else f'root@{sys.argv[5]}: Permission denied (publickey).')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def examined(tmp_path: Path, text: str) -> list[tuple[str, str, str]]:
    path = tmp_path / "hosts"
    path.write_text(text)
    found = [(each.state, each.result.replace(f"{path}", "hosts"), each.change) for each in examine_hostfile(path)]
    try:
        _parse_hostfile(text.splitlines(keepends=True))
        theirs = True
    except ValueError:
        theirs = False
    lines = [each for each in found if each[0] == "wrong" and each[1].startswith("hosts")]
    assert theirs or lines, "DeepSpeed refuses what was found to be good"
    return found


def test_a_good_file(tmp_path: Path) -> None:
    assert examined(tmp_path, "# two\nnode1 slots=8\n\n node2   slots=8  # spare\n") == [
        ("ok", "hosts: 2 hosts, 16 slots; ssh reaches each without a password", "")
    ]


@pytest.mark.parametrize(
    ("text", "state", "found", "change"),
    [
        ("node1 slots=8\nnode2:8\n", "wrong", "hosts:2: 'node2:8'", "write HOST slots=N"),
        ("node1 slots=0\n", "wrong", "hosts:1: 'node1 slots=0'", "write HOST slots=N"),
        ("node1 slots=8\nnode1 slots=8\n", "wrong", "hosts:2: 'node1 slots=8'", "one line for each host"),
        ("# none\n", "wrong", "hosts: names no host", "write HOST slots=N"),
        ("localhost slots=8\n", "wrong", "localhost: root@localhost: Permission denied", "`ssh localhost true` work"),
        ("no.such.invalid slots=8\n", "wrong", "no.such.invalid: root@", "under a name that has an address"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_change(
    tmp_path: Path, text: str, state: str, found: str, change: str
) -> None:
    first = examined(tmp_path, text)[0]
    assert first[0] == state and first[1].startswith(found) and change in first[2]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (only,) = examine_hostfile(tmp_path / "nowhere")
    assert only.state == "wrong" and "not found" in only.result and "starts on this host alone" in only.change


def test_there_is_no_ssh(tmp_path: Path) -> None:
    (tmp_path / "ssh").unlink()
    state, found, _ = examined(tmp_path, "node1 slots=1\n")[0]
    assert state == "wrong" and "ssh is not installed" in found
