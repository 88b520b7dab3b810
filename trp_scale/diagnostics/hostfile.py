"""Checks of a hostfile of DeepSpeed's launcher: `trp-scale doctor --hostfile FILE`.

DeepSpeed only warns of a file that does not exist, and starts on this host alone; a host that ssh asks for a password
leaves the others waiting.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trp_scale.config.json_files import read_lines
from trp_scale.diagnostics.machine import Finding, judge
from trp_scale.errors import RefusedError

_ENTRY = re.compile(r"([^\s-]\S{0,254})\s+slots=([1-9][0-9]{0,8})\s*(#.*)?")
"""A name that begins with "-" would be an option of ssh."""

PARALLEL_LOGINS = 32


def examine_hostfile(path: Path) -> Iterator[Finding]:
    """Check each line, and that ssh reaches each host without a password."""
    try:
        lines = read_lines(path)
    except RefusedError as error:
        change = "give a file that exists: without it deepspeed starts on this host alone, and only warns of it"
        yield judge("hostfile", False, str(error), change, "wrong")
        return
    entries = [(number, line.strip()) for number, line in enumerate(lines, 1) if not line.strip().startswith("#")]
    problems: list[Finding] = []
    slots: dict[str, int] = {}
    for number, entry in entries:
        match = _ENTRY.fullmatch(entry)
        if entry and (match is None or match[1] in slots):
            change = "write HOST slots=N, N the GPUs of the host, one line for each host"
            problems.append(judge("hostfile", False, f"{path}:{number}: {entry[:80]!r}", change, "wrong"))
        elif match is not None:
            slots[match[1]] = int(match[2])
    if not slots and not problems:
        problems.append(judge("hostfile", False, f"{path}: names no host", "write HOST slots=N", "wrong"))
    with ThreadPoolExecutor(PARALLEL_LOGINS) as pool:
        for host, problem in zip(slots, pool.map(_log_in, slots), strict=True):
            change = f"let `ssh {host} true` work without a password, under a name that has an address"
            problems += [judge("hostfile", False, f"{host}: {problem}", change, "wrong")] if problem else []
    result = f"{path}: {len(slots)} hosts, {sum(slots.values())} slots; ssh reaches each without a password"
    yield from problems or [judge("hostfile", True, result, "")]


def _log_in(host: str) -> str:
    """Return why ssh does not reach a host, or ""."""
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", host, "true"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return "ssh is not installed (apt install openssh-client pdsh)"
    except subprocess.TimeoutExpired:
        return "no answer from ssh after 30 s"
    return "" if output.returncode == 0 else (output.stderr.strip().splitlines() or ["ssh failed"])[-1]
