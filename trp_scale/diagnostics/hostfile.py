"""The hostfile of DeepSpeed's launcher, examined before a run: `trp-scale doctor --hostfile FILE`.

A file that is not there DeepSpeed passes over with a warning, and starts on this host alone; of a bad line it names the
line and not its number; a host that ssh asks for a password leaves the others waiting.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trp_scale.config.json_files import read_lines
from trp_scale.diagnostics.machine import Finding
from trp_scale.errors import RefusedError

_ENTRY = re.compile(r"([^\s-]\S{0,254})\s+slots=([0-9]{1,9})\s*(#.*)?")
"""A name that begins with "-" would be an option of ssh."""

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
"""Asks for nothing."""

AT_ONCE = 32


def examine_hostfile(path: Path) -> Iterator[Finding]:
    """Its lines, and whether each host can be reached as DeepSpeed reaches it: pdsh calls ssh."""
    try:
        lines = read_lines(path)
    except RefusedError as error:
        yield _wrong(
            str(error),
            "give a file that is there: without it deepspeed starts on this host alone, and only warns of it",
        )
        return
    slots: dict[str, int] = {}
    bad = False
    for number, line in enumerate(lines, 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        match = _ENTRY.fullmatch(entry)
        if match is None or int(match[2]) < 1:
            bad = True
            yield _wrong(
                f"{path}:{number}: {entry[:80]!r}", "write HOST slots=N, N the GPUs of the host, a host a line"
            )
        elif match[1] in slots:
            bad = True
            yield _wrong(f"{path}:{number}: {match[1]} once more", "name each host once")
        else:
            slots[match[1]] = int(match[2])
    if not slots:
        if not bad:
            yield _wrong(f"{path}: names no host", "write HOST slots=N, a host a line")
        return
    counts = sorted(set(slots.values()))
    if len(counts) > 1:
        yield Finding(
            check="hostfile",
            state="warning",
            found=f"{path}: hosts of {', '.join(map(str, counts))} slots",
            change="give hosts alike: what stays on a node, such as --megatron.tensor_parallel, must divide each",
        )
    with ThreadPoolExecutor(AT_ONCE) as pool:
        unreached = [each for each in pool.map(_unreached, slots) if each is not None]
    yield from unreached
    if not bad and not unreached:
        yield Finding(
            check="hostfile",
            state="ok",
            found=f"{path}: {len(slots)} hosts, {sum(slots.values())} slots; ssh reaches each without a password",
        )


def _unreached(host: str) -> Finding | None:
    """Why ssh does not reach a host; None: it does."""
    try:
        done = subprocess.run([*SSH, host, "true"], capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return _wrong(
            "there is no ssh here", "install it (apt install openssh-client pdsh): deepspeed reaches hosts by it"
        )
    except subprocess.TimeoutExpired:
        return _wrong(f"{host}: no answer from ssh after 30 s", "see what its login waits for")
    if done.returncode == 0:
        return None
    try:
        socket.getaddrinfo(host, None)
        change = f"let `ssh {host} true` work without a password: put this user's key into its authorized_keys"
    except OSError:
        change = "no address has this name here: mend the name, or add it to DNS or /etc/hosts"
    return _wrong(f"{host}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'ssh failed'}", change)


def _wrong(found: str, change: str) -> Finding:
    return Finding(check="hostfile", state="wrong", found=found, change=change)
