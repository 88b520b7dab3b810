"""What of the machines would stop or slow a run, before one is started: `trp-scale doctor`.

Each check gives findings of one of three states: ok; warning, a run starts and is slower or may stop later; wrong, a
run does not start or hangs. What is not ok says what to change. Times are measured for seconds only: they find what is
wrong by a factor, not by a tenth.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.distributed.launchers import RankInfo

State = Literal["ok", "warning", "wrong"]

CLOCK_SECONDS = 1.0
"""Clocks may differ so much: logs of several hosts and the times of files on shared storage stay in order."""

OPEN_FILES = 4096
"""A loader worker keeps 128 shards open, and each rank of a large world a connection to many others."""

SHARED_MEMORY = 1 << 30
"""Bytes a rank of /dev/shm: the prefetched micro-batches of its loader's workers, and NCCL's buffers."""

STORAGE_SPEED = 200e6
"""Bytes a second of all ranks: below it a checkpoint of 10^9 parameters, 12 GB, takes more than a minute."""

BETWEEN_HOSTS = 5e9
"""Bytes a second of an all-reduce over GPUs of several hosts, below which NCCL uses plain sockets."""

SLOW_RANK = 0.8
"""Of the median rank's speed: all ranks wait for the slowest."""

FREE_GPU = 0.05
"""Part of a GPU's memory that may be in use before a run starts."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check has found.

    Attributes:
        check: its name.
        state: ok, warning or wrong.
        found: what is there.
        change: what to change; empty where it is ok.
        where: hosts and ranks that have found the same.
    """

    check: str
    state: State
    found: str
    change: str = ""
    where: tuple[str, ...] = ()


def examine(environment: Environment, storage: Path | None = None, *, mebibytes: int = 64) -> list[Finding]:
    """All checks; every rank gets the findings of all. Collective.

    Args:
        environment: entered.
        storage: a directory that the hosts share, where each rank writes and reads a file; None: not measured.
        mebibytes: size of each of these files, and of what is all-reduced.
    """
    info, world = environment.info, environment.world
    first_here = info.local_rank == 0
    own = [*_of_this_host(info)] if first_here else []
    own += [*_of_this_rank(environment)]
    host = socket.gethostname()
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for finder, findings in world.gather_objects((host, own)):
        for each in findings:
            places = merged.setdefault((each.check, each.state, each.found, each.change), [])
            places += [] if finder in places else [finder]
    found = [
        Finding(check=check, state=state, found=said, change=change, where=tuple(places))  # type: ignore[arg-type]
        for (check, state, said, change), places in merged.items()
    ]
    found += _versions(world)
    found += _clocks(world, first_here)
    found += _compute(environment)
    found += _all_reduce(environment, mebibytes)
    if storage is not None:
        found += _storage(world, storage, mebibytes)
    return found


def _of_this_host(info: RankInfo) -> Iterator[Finding]:
    """Found once a host, by its first rank."""
    yield from _driver(info)
    yield from _limits()
    yield _shared_memory(info)
    yield from _ports()


def _of_this_rank(environment: Environment) -> Iterator[Finding]:
    yield from _interfaces(environment.world)
    cpus = environment.cpus
    yield Finding(check="cpus", state="ok", found=f"{cpus} for a rank: at most so many loader workers")


# ---------------------------------------------------------------------------------------------------- of one host


def _driver(info: RankInfo) -> Iterator[Finding]:
    """GPUs as their driver sees them, and as torch does."""
    asked = ("index", "name", "driver_version", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total")
    try:
        told = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        said = "nvidia-smi is not installed" if isinstance(error, FileNotFoundError) else f"nvidia-smi: {error}"
        seen = f"{torch.cuda.device_count()} for torch" if torch.cuda.is_available() else "none: ranks compute on CPUs"
        yield Finding(check="gpus", state="ok", found=f"{seen} ({said})")
        return
    if told.returncode:
        line = (told.stdout + told.stderr).strip().partition("\n")[0]
        change = "the driver does not answer: restart it or the host, or take the host out of the job"
        yield Finding(
            check="gpus", state="wrong", found=f"nvidia-smi ended with {told.returncode}: {line}", change=change
        )
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in told.stdout.splitlines() if line.strip()]
    kinds = sorted({f"{row[1]}, driver {row[2]}" for row in rows})
    visible = torch.cuda.device_count()
    found = f"{len(rows)} ({'; '.join(kinds)}), {visible} of them for torch {torch.__version__}"
    if not visible:
        change = (
            "set CUDA_VISIBLE_DEVICES to the GPUs' numbers"
            if os.environ.get("CUDA_VISIBLE_DEVICES") is not None
            else f"torch is built for CUDA {torch.version.cuda}: install a driver that knows it"
        )
        yield Finding(check="gpus", state="wrong", found=found, change=change)
    elif info.launcher != "single" and visible != info.local_world and visible != 1:
        change = f"start {visible} ranks a host; the other GPUs idle"
        yield Finding(check="gpus", state="warning", found=f"{found}, for {info.local_world} ranks", change=change)
    else:
        yield Finding(check="gpus", state="ok", found=found)
    yield from _each_gpu(rows)


def _each_gpu(rows: Sequence[Sequence[str]]) -> Iterator[Finding]:
    for index, _, _, total, used, errors in rows:
        if used.isdecimal() and total.isdecimal() and int(used) > FREE_GPU * int(total):
            found = f"GPU {index} has {used} of {total} MiB in use"
            change = "another process holds it: nvidia-smi shows which; end it, or take other GPUs"
            yield Finding(check="gpu memory", state="warning", found=found, change=change)
        if errors.isdecimal() and int(errors):
            found = f"GPU {index} has had {errors} memory errors that could not be corrected"
            change = "reset the GPU or restart the host, and have it looked at if they come again"
            yield Finding(check="gpu errors", state="wrong", found=found, change=change)


def _limits() -> Iterator[Finding]:
    """Of what a process may take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = f"{_limit(soft)} open files a process"
    if resource.RLIM_INFINITY != soft < OPEN_FILES:
        change = f"ulimit -n {OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)}"
        if resource.RLIM_INFINITY != hard < OPEN_FILES:
            change += f"; the hard limit is {hard}: raise nofile in /etc/security/limits.conf, LimitNOFILE of slurmd"
        yield Finding(check="limits", state="warning", found=files, change=change)
    else:
        yield Finding(check="limits", state="ok", found=files)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if Path("/sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        found = f"{_limit(locked)} bytes of locked memory, and an InfiniBand or EFA adapter is there"
        change = "memlock unlimited in limits.conf, LimitMEMLOCK=infinity of slurmd, docker --ulimit memlock=-1"
        yield Finding(check="limits", state="wrong", found=found, change=change)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if resource.RLIM_INFINITY != processes < OPEN_FILES:
        change = f"ulimit -u {OPEN_FILES}: each rank has threads and loader workers"
        yield Finding(check="limits", state="warning", found=f"{processes} processes and threads", change=change)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _shared_memory(info: RankInfo, folder: Path = Path("/dev/shm")) -> Finding:
    """Loader workers hand micro-batches over there."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        change = f"mount a tmpfs at {folder}"
        return Finding(check="shared memory", state="wrong", found=f"{folder}: {error.strerror}", change=change)
    found = f"{free / 2**30:.1f} GiB free in {folder} for {info.local_world} rank(s)"
    if free < SHARED_MEMORY * info.local_world:
        change = (
            "at least 1 GiB a rank; docker: --shm-size or --ipc=host; Kubernetes: an emptyDir with medium: Memory there"
        )
        return Finding(check="shared memory", state="warning", found=found, change=change)
    return Finding(check="shared memory", state="ok", found=found)


def _ports(listed: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> Iterator[Finding]:
    """Those of the rendezvous: under srun between 12000 and 32000, by the job's number."""
    try:
        low, high = map(int, listed.read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return
    found = f"the system gives connections ports {low} to {high}"
    if low < 32000:
        change = (
            "a connection can take the port of a rendezvous (under srun 12000 to 32000) before the run does: "
            "sysctl net.ipv4.ip_local_port_range='32768 60999', or set MASTER_PORT below it"
        )
        yield Finding(check="ports", state="warning", found=found, change=change)
    else:
        yield Finding(check="ports", state="ok", found=found)


# ----------------------------------------------------------------------------------------------------- of the network


def _interfaces(world: Group) -> Iterator[Finding]:
    """Which network gloo and NCCL take. Collective."""
    names = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        if value and not _names_interface(variable, value, names):
            found = f"{variable} is {value}, and the interfaces are {', '.join(names)}"
            yield Finding(
                check="network", state="wrong", found=found, change=f"set {variable} to one of them, or unset it"
            )
    host = socket.gethostname()
    several = len(set(world.gather_objects(host))) > 1
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        address, said = "", f"the host's name {host} has no address ({error})"
    else:
        said = f"the host's name {host} is {address}"
    if address and not (several and address.startswith("127.")):
        yield Finding(check="network", state="ok", found=said)
    elif os.environ.get("GLOO_SOCKET_IFNAME"):
        yield Finding(check="network", state="ok", found=f"{said}; gloo takes GLOO_SOCKET_IFNAME")
    else:
        change = (
            f"gloo listens there, where other hosts cannot come: set GLOO_SOCKET_IFNAME to one of {', '.join(names)}"
        )
        yield Finding(check="network", state="wrong" if several else "warning", found=said, change=change)


def _names_interface(variable: str, value: str, names: Iterable[str]) -> bool:
    """gloo takes names; NCCL the beginnings of names, `=name` for whole ones and `^` for all others."""
    wanted = value.lstrip("^").split(",")
    if variable.startswith("GLOO"):
        return all(name in names for name in wanted)
    if value.startswith("^"):
        return True
    if value.startswith("="):
        return any(name in names for name in (each.lstrip("=") for each in wanted))
    return any(name.startswith(each) for name in names for each in wanted)


# ---------------------------------------------------------------------------------------------------- over the ranks


def _versions(world: Group) -> Iterator[Finding]:
    """The same on all ranks: others write other checkpoints, or wait for collectives that the rest never calls."""
    own = {"Python": platform.python_version(), "torch": torch.__version__}
    for package in ("trp-scale", "deepspeed", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            own[package] = importlib.metadata.version(package)
    if torch.cuda.is_available():
        own["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        own["CUDA"] = str(torch.version.cuda)
    every = world.gather_objects(own)
    differ = [name for name in own if len({str(one.get(name)) for one in every}) > 1]
    found = ", ".join(f"{name} {version}" for name, version in every[0].items())
    if not differ:
        yield Finding(check="versions", state="ok", found=found)
    for name in differ:
        by_version: dict[str, list[int]] = {}
        for rank, one in enumerate(every):
            by_version.setdefault(str(one.get(name)), []).append(rank)
        said = "; ".join(f"{version} on {_ranks(ranks)}" for version, ranks in by_version.items())
        change = f"install the same {name} on all hosts (constraints.txt), or take the environment from shared storage"
        yield Finding(check="versions", state="wrong", found=f"{name} is {said}", change=change)


def _clocks(world: Group, first_here: bool) -> Iterator[Finding]:
    """How far the hosts' clocks are from rank 0's: of some round trips the shortest says most."""
    asked = [rank for rank, first in enumerate(world.gather_objects(first_here)) if first and rank]
    if not asked:
        yield Finding(check="clock", state="ok", found="one host")
        return
    differences = [_clock_of(world, rank) for rank in asked if world.rank in (0, rank)]
    differences = world.broadcast_object(differences)
    worst = max(range(len(asked)), key=lambda place: abs(differences[place]))
    found = f"at most {abs(differences[worst]) * 1e3:.1f} ms from rank 0's (rank {asked[worst]})"
    if abs(differences[worst]) > CLOCK_SECONDS:
        yield Finding(check="clock", state="warning", found=found, change="start chrony or ntpd on that host")
    else:
        yield Finding(check="clock", state="ok", found=found)


def _clock_of(world: Group, rank: int, trips: int = 8) -> float:
    """Seconds that this rank's clock is ahead of rank 0's, on rank 0; called there and on the rank."""
    best, difference = float("inf"), 0.0
    for _ in range(trips):
        told = torch.zeros(1, dtype=torch.float64)  # [1]
        if world.rank == rank:
            dist.recv(told, src=0, group=world.handle)
            dist.send(torch.tensor([time.time()], dtype=torch.float64), dst=0, group=world.handle)
            continue
        sent, began = time.time(), time.monotonic()
        dist.send(told, dst=rank, group=world.handle)
        dist.recv(told, src=rank, group=world.handle)
        trip = time.monotonic() - began
        if trip < best:
            best, difference = trip, told.item() - (sent + trip / 2)
    return difference


def _compute(environment: Environment) -> Iterator[Finding]:
    """One product of matrices on every rank at once: a rank that is slow here holds up all."""
    device = environment.device
    on_gpu = device.type == "cuda"
    side = 8192 if on_gpu else 512
    left = torch.ones(side, side, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)  # [side, side]
    seconds = [_seconds(lambda: left @ left, environment) for _ in range(6)][1:]
    speeds = environment.world.gather_objects(2 * side**3 / min(seconds))
    usual, slowest = statistics.median(speeds), min(speeds)
    found = f"{usual / 1e12:.2f} TFLOP/s a rank at a {'bf16' if on_gpu else 'fp32'} product of {side} x {side}"
    if slowest >= SLOW_RANK * usual:
        yield Finding(check="compute", state="ok", found=found)
        return
    slow = [rank for rank, speed in enumerate(speeds) if speed < SLOW_RANK * usual]
    change = "look at its clocks, temperature and other processes (nvidia-smi -q -d PERFORMANCE, top); all wait for it"
    said = f"{found}, {slowest / 1e12:.2f} on the slowest of {_ranks(slow)}"
    yield Finding(check="compute", state="warning", found=said, change=change)


def _all_reduce(environment: Environment, mebibytes: int) -> Iterator[Finding]:
    """Speed of a large one, counted as what each rank sends: 2 (n - 1) / n of its bytes; and time of a small one."""
    world, device = environment.world, environment.device
    name = "NCCL" if device.type == "cuda" else "gloo"
    if world.size == 1:
        yield Finding(check="all-reduce", state="ok", found="one rank; start it under torchrun or srun to measure")
        return
    large = torch.empty(mebibytes << 18, device=device)  # [2^18 per MiB], fp32
    small = torch.empty(1, device=device)  # [1]
    seconds = [_seconds_of_sum(numbers, environment) for numbers in (large, small)]
    bytes_moved = 2 * (world.size - 1) / world.size * large.numel() * large.element_size()
    speed = min(world.gather_objects(bytes_moved / seconds[0]))
    latency = max(world.gather_objects(seconds[1]))
    hosts = len(set(world.gather_objects(socket.gethostname())))
    found = (
        f"{speed / 1e9:.2f} GB/s over {name} on {world.size} ranks of {hosts} host(s), {mebibytes} MiB; "
        f"{latency * 1e6:.0f} us for one number"
    )
    right = all(bool((numbers == world.size).all()) for numbers in (large, small))
    if not all(world.gather_objects(right)):
        change = "a link or a GPU damages what it carries: NCCL_DEBUG=INFO, and leave hosts out until it is right"
        yield Finding(check="all-reduce", state="wrong", found=f"{found}; the sums are not right", change=change)
    elif device.type == "cuda" and hosts > 1 and speed < BETWEEN_HOSTS:
        change = (
            "NCCL may use plain sockets: NCCL_DEBUG=INFO says which network; set NCCL_SOCKET_IFNAME and NCCL_IB_HCA, "
            "on EFA install aws-ofi-nccl"
        )
        yield Finding(check="all-reduce", state="warning", found=found, change=change)
    else:
        yield Finding(check="all-reduce", state="ok", found=found)


def _seconds_of_sum(numbers: Tensor, environment: Environment) -> float:
    """Of an all-reduce of ones; the shortest but the first, which makes the connections."""
    group, seconds = environment.world.handle, []
    for _ in range(4):
        numbers.fill_(1.0)
        seconds.append(_seconds(lambda: dist.all_reduce(numbers, group=group), environment))
    return min(seconds[1:])


def _seconds(work: Callable[[], object], environment: Environment) -> float:
    """That `work` takes, begun by all ranks together."""
    environment.world.barrier()
    _finish(environment)
    began = time.perf_counter()
    work()
    _finish(environment)
    return time.perf_counter() - began


def _finish(environment: Environment) -> None:
    if environment.device.type == "cuda":
        torch.cuda.synchronize(environment.device)


def _storage(world: Group, directory: Path, mebibytes: int) -> Iterator[Finding]:
    """Each rank writes a file and reads one of another host, where there is one: its own would come from memory."""
    label = world.broadcast_object(f".doctor-{socket.gethostname()}-{os.getpid()}")
    files = [directory / f"{label}-{rank}" for rank in range(world.size)]
    hosts = world.gather_objects(socket.gethostname())
    other = next((r for r in _after(world) if hosts[r] != hosts[world.rank]), (world.rank + 1) % world.size)
    block = os.urandom(1 << 20)  # what is random cannot be compressed on the way
    try:
        written = _tried(lambda: _write(files[world.rank], block, mebibytes))
        sums = world.gather_objects(zlib.crc32(block * mebibytes))  # every file is there from here on
        read = _tried(lambda: _read(files[other], sums[other]))
        outcomes = world.gather_objects((written, read))
    finally:
        world.barrier()
        with contextlib.suppress(OSError):
            files[world.rank].unlink()
    bad = {rank: each for rank, both in enumerate(outcomes) for each in both if isinstance(each, str)}
    if bad:
        found = f"{next(iter(bad.values()))} ({_ranks([*bad])})"
        change = "give a directory that all hosts share and may write, mounted at the same path on each"
        yield Finding(check="storage", state="wrong", found=found, change=change)
        return
    total = world.size * mebibytes << 20
    writing, reading = (total / max(float(both[way]) for both in outcomes) for way in (0, 1))
    free = shutil.disk_usage(directory).free
    speeds = f"{writing / 1e6:.0f} MB/s written and {reading / 1e6:.0f} read by all ranks"
    found = f"{directory}: {speeds}, {free / 1e9:.0f} GB free"
    if min(writing, reading) < STORAGE_SPEED:
        change = "a checkpoint of 10^9 parameters is 12 GB: use faster storage for --run_dir, or save more rarely"
        yield Finding(check="storage", state="warning", found=found, change=change)
    else:
        yield Finding(check="storage", state="ok", found=found)


def _after(world: Group) -> Iterator[int]:
    """The other ranks, the next one first."""
    return ((world.rank + step) % world.size for step in range(1, world.size))


def _tried(work: Callable[[], float]) -> float | str:
    """Seconds, or what went wrong: the other ranks wait for this one in either case."""
    try:
        return work()
    except OSError as error:
        return f"{error.filename or ''}: {error.strerror or error}"


def _write(file: Path, block: bytes, count: int) -> float:
    began = time.perf_counter()
    with file.open("wb", buffering=0) as stream:
        for _ in range(count):
            stream.write(block)
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # on one host it would be read from memory
    return time.perf_counter() - began


def _read(file: Path, expected: int) -> float:
    began = time.perf_counter()
    content = file.read_bytes()
    seconds = time.perf_counter() - began
    if zlib.crc32(content) != expected:
        raise OSError(0, "what was read is not what was written", str(file))
    return seconds


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
