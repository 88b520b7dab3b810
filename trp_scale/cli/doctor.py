"""`trp-scale doctor`: what of the machines would stop or slow a run, or, with a directory, how a run stands."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from trp_scale.config.flags import read
from trp_scale.errors import RefusedError

if TYPE_CHECKING:
    from trp_scale.diagnostics.machine import Finding
    from trp_scale.distributed.environment import Environment


@dataclass(kw_only=True)
class DoctorArguments:
    """Examine the machines before a run: GPUs and driver, versions, CPUs, limits, shared memory, ports and network,
    clocks, speed of each rank, all-reduce and storage. Under torchrun, deepspeed or srun it examines all hosts of the
    job. With RUN_DIR it examines a run in their place: which checkpoints are whole, where it would go on, why it
    ended, whether it is alive, what went wrong, room on the disk. Ends with status 1 where something is wrong, 0
    otherwise."""

    run_dir: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")] = None
    """A run's directory, whether the run goes on or not: nothing in it is changed."""
    quick: bool = False
    """With RUN_DIR: compare files of checkpoints by their sizes, not by the checksums of every byte."""
    storage: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory on the storage that the hosts share: each rank writes a file there, reads another's and removes its
    own. Not given: storage is not measured."""
    hostfile: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Of deepspeed's launcher: its lines, and whether ssh reaches each host without a password."""
    mebibytes: Annotated[int, tyro.conf.arg(metavar="MIB")] = 64
    """Size of each of those files, and of what is all-reduced."""
    timeout_minutes: float = 2.0
    """How long ranks that have not come are awaited."""
    json: bool = False
    """Print one JSON object in place of lines."""


def doctor(argv: Sequence[str]) -> int:
    """`trp-scale doctor`."""
    arguments = read(DoctorArguments, argv, prog="trp-scale doctor")
    if arguments.mebibytes < 1:
        raise RefusedError(f"--mebibytes is {arguments.mebibytes}; allowed: 1 or more")
    if arguments.timeout_minutes <= 0:
        raise RefusedError(f"--timeout_minutes is {arguments.timeout_minutes}; allowed: above 0")
    if arguments.run_dir is not None:
        return _of_a_run(arguments.run_dir, arguments)
    if arguments.quick:
        raise RefusedError("--quick is for a run; give its directory: trp-scale doctor RUN_DIR --quick")
    from trp_scale.diagnostics.hostfile import examine_hostfile
    from trp_scale.diagnostics.machine import examine
    from trp_scale.distributed.environment import Environment

    with Environment(timeout_minutes=arguments.timeout_minutes) as environment:
        findings = examine(environment, arguments.storage, mebibytes=arguments.mebibytes)
        if environment.info.rank == 0:
            findings += examine_hostfile(arguments.hostfile) if arguments.hostfile else ()
            print(_as_json(environment, findings) if arguments.json else "\n".join(_lines(findings)), flush=True)
        environment.world.barrier()  # nobody ends, and with it the job, before it is printed
    # Of a hostfile the first rank alone knows: it ends with that.
    return int(any(each.state == "wrong" for each in findings))


def _of_a_run(run_dir: Path, arguments: DoctorArguments) -> int:
    given = [f"--{name}" for name in ("storage", "hostfile") if getattr(arguments, name) is not None]
    if given:
        raise RefusedError(f"{given[0]} is for the machines, and {run_dir} for a run; give one of them")
    from trp_scale.diagnostics.run_directory import examine_run

    findings = examine_run(run_dir, quick=arguments.quick)
    document = {"run_dir": str(run_dir), "findings": [asdict(each) for each in findings]}
    print(json.dumps(document, indent=1) if arguments.json else "\n".join(_lines(findings)), flush=True)
    return int(any(each.state == "wrong" for each in findings))


def _as_json(environment: Environment, findings: Sequence[Finding]) -> str:
    info = environment.info
    place = {"ranks": info.world, "launcher": info.launcher, "device": environment.device.type}
    return json.dumps({**place, "findings": [asdict(each) for each in findings]}, indent=1)


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """A line or more each, and how many there are of each state."""
    width = min(120, shutil.get_terminal_size().columns)
    names = max(len(each.check) for each in findings)
    indent = " " * (8 + names + 2)
    hosts = {place for each in findings for place in each.where}
    for each in findings:
        where = f" ({', '.join(each.where)})" if len(hosts) > 1 and each.where and {*each.where} != hosts else ""
        first = f"{each.state:<7} {each.check:<{names}}  "
        yield textwrap.fill(each.found + where, width, initial_indent=first, subsequent_indent=indent)
        if each.change:
            yield textwrap.fill(each.change, width, initial_indent=f"{indent}to do: ", subsequent_indent=indent)
    counts = [(state, sum(each.state == state for each in findings)) for state in ("ok", "warning", "wrong")]
    yield ", ".join(f"{count} {state}" for state, count in counts)
