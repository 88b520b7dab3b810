"""DeepSpeed is pinned and allowed at the checked version; tests/distributed/test_shard_operations.py runs layouts."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from trp_scale.engines import zero_layout

ROOT = Path(__file__).parents[3]
CHECKED = r"checked against deepspeed (\d+\.\d+\.\d+)"


def test_one_version_is_checked_pinned_and_allowed() -> None:
    checked = re.search(CHECKED, " ".join((zero_layout.__doc__ or "").split()))
    written = re.search(CHECKED, " ".join((ROOT / "docs/decisions.md").read_text(encoding="utf-8").split()))
    pinned = re.search(r"^deepspeed==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert checked is not None and written is not None and pinned is not None
    assert checked[1] == written[1] == pinned[1]
    version = Version(checked[1])
    listed = re.findall(r'"(deepspeed[<>=!~][^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    allowed = [one.specifier for one in map(Requirement, listed)]
    assert allowed, "the project does not ask for deepspeed"
    for specifier in allowed:
        assert version in specifier
        assert Version(f"{version.major}.{version.minor + 1}.0") not in specifier, "a version that nobody has read"
