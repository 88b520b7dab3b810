"""`trp-scale doctor`: checks of the machines, or of a run directory."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from trp_scale.config.flags import read
from trp_scale.config.settings import check_settings, setting
from trp_scale.errors import RefusedError

if TYPE_CHECKING:
    from trp_scale.diagnostics.machine import Finding


@dataclass(kw_only=True)
class DoctorArguments:
    """Examine the machines before a run: GPUs and driver, versions, limits, shared memory, ports and network, speed of
    each rank, all-reduce and storage. Under torchrun, deepspeed or srun it examines all hosts of the job. With RUN_DIR
    it examines a run instead: which checkpoints are whole, where it would continue, why it ended, whether it is alive,
    what went wrong, room on the disk. Ends with status 1 where something is wrong, 0 otherwise."""

    run_dir: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")] = None
    """A run's directory, whether the run goes on or not: nothing in it is changed."""
    quick: bool = False
    """With RUN_DIR: compare files of checkpoints by their sizes, not by the checksums of every byte."""
    storage: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory on the storage that the hosts share: each rank writes a file there, reads another's and removes its
    own. Not given: storage is not measured."""
    hostfile: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Of deepspeed's launcher: its lines, and whether ssh reaches each host without a password."""
    mebibytes: Annotated[int, tyro.conf.arg(metavar="MIB")] = setting(64, at_least=1)
    """Size of each of those files, and of what is all-reduced."""
    timeout_minutes: float = setting(2.0, above=0)
    """How long ranks that have not come are awaited."""
    json: bool = False
    """Print one JSON object in place of lines."""


def doctor(argv: Sequence[str]) -> int:
    """`trp-scale doctor`."""
    arguments = read(DoctorArguments, argv, prog="trp-scale doctor")
    check_settings(arguments)
    findings = _examine_run(arguments.run_dir, arguments) if arguments.run_dir else _examine_machines(arguments)
    return int(any(finding.state == "wrong" for finding in findings))


def _examine_machines(arguments: DoctorArguments) -> list[Finding]:
    if arguments.quick:
        raise RefusedError("--quick is for a run; give its directory: trp-scale doctor RUN_DIR --quick")
    from trp_scale.diagnostics.machine import examine, examine_hostfile
    from trp_scale.distributed.environment import Environment

    with Environment(timeout_minutes=arguments.timeout_minutes) as environment:
        findings = examine(environment, arguments.storage, mebibytes=arguments.mebibytes)
        if (info := environment.info).rank == 0:
            findings += examine_hostfile(arguments.hostfile) if arguments.hostfile else ()
            job = {"ranks": info.world, "launcher": info.launcher, "device": environment.device.type}
            _print(job, findings, as_json=arguments.json)
        environment.world.barrier()  # no rank ends, and with it the job, before it is printed
    return findings


def _examine_run(run_dir: Path, arguments: DoctorArguments) -> list[Finding]:
    for name in ("storage", "hostfile"):
        if getattr(arguments, name) is not None:
            raise RefusedError(f"--{name} is for the machines, and {run_dir} for a run; give one of them")
    from trp_scale.diagnostics.run_directory import examine_run

    findings = examine_run(run_dir, quick=arguments.quick)
    _print({"run_dir": str(run_dir)}, findings, as_json=arguments.json)
    return findings


def _print(subject: Mapping[str, object], findings: Sequence[Finding], *, as_json: bool) -> None:
    document = {**subject, "findings": [asdict(finding) for finding in findings]}
    print(json.dumps(document, indent=1) if as_json else "\n".join(_format_lines(findings)), flush=True)


def _format_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """A line or more for each finding, and the count of each state."""
    width = min(120, shutil.get_terminal_size().columns)
    names = max(len(finding.check) for finding in findings)
    indent = " " * (8 + names + 2)
    hosts = {host for finding in findings for host in finding.where}
    for finding in findings:
        where = ", ".join(finding.where) if finding.where and {*finding.where} != hosts else ""
        first = f"{finding.state:<7} {finding.check:<{names}}  "
        text = finding.result + (f" ({where})" if where else "")
        yield textwrap.fill(text, width, initial_indent=first, subsequent_indent=indent)
        if finding.change:
            yield textwrap.fill(finding.change, width, initial_indent=f"{indent}to do: ", subsequent_indent=indent)
    counts = [(state, sum(finding.state == state for finding in findings)) for state in ("ok", "warning", "wrong")]
    yield ", ".join(f"{count} {state}" for state, count in counts)
