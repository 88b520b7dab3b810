"""Names under which files are written before they are whole: no two writers take the same, on however many hosts.

A file of such a name belongs to its writer while that lives. Nobody else can tell whether it does, so leftovers are
taken away only by who knows that no writer is left: the run that has a data set for itself, or `trp-scale merge`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from pathlib import Path


def temporary_beside(path: Path) -> Path:
    """A hidden name in the directory of `path`: .NAME.HOST-PROCESS-RANDOM.tmp"""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
    # Host and process are for who finds it. They are not enough: containers share both.
    return path.with_name(f".{path.name}.{host}-{os.getpid()}-{secrets.token_hex(6)}.tmp")


def remove_leftovers(directory: Path) -> None:
    """Take away what writers that are gone have left in a directory."""
    for leftover in directory.glob(".*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
