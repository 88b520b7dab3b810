"""Checks of the machines before a run: `trp-scale doctor`.

Each check returns findings with a state: ok; warning (a run starts but is slower or may stop later); wrong (a run does
not start or hangs). A finding that is not ok names the change to make. Measurements take seconds and only detect large
errors.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trp_scale.config.files import read_lines
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.distributed.launchers import RankInfo, list_ranks
from trp_scale.errors import RefusedError

State = Literal["ok", "warning", "wrong"]

MIN_OPEN_FILES = 4096
"""A loader worker keeps 128 shards open, and each rank of a large world has many connections."""

MIN_SHARED_BYTES = 1 << 30
"""Bytes of /dev/shm per rank: prefetched micro-batches of loader workers, and NCCL's buffers."""

MIN_STORAGE_SPEED = 200e6
"""Bytes/s of all ranks; below this a checkpoint of 10^9 parameters, 12 GB, takes more than a minute."""

MIN_SPEED_BETWEEN_HOSTS = 5e9
"""Bytes/s of an all-reduce over GPUs of several hosts; below this NCCL uses plain sockets."""

SLOW_RANK = 0.8
"""Share of the median rank's speed: all ranks wait for the slowest."""

PARALLEL_LOGINS = 32

_HOST = re.compile(r"([^\s#-]\S{0,254})\s+slots=([1-9][0-9]{0,8})\s*(#.*)?")
"""Line of a hostfile. A name that starts with "-" would be an option of ssh."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check.

    Attributes:
        state: ok, warning or wrong.
        change: what to change; empty if ok.
        where: hosts with this finding.
    """

    check: str
    state: State
    result: str
    change: str = ""
    where: tuple[str, ...] = ()


def judge(check: str, is_ok: bool, result: str, change: str, state: State = "warning") -> Finding:
    """Return a finding that is ok, or that has `state` and `change`."""
    return Finding(check=check, state="ok" if is_ok else state, result=result, change="" if is_ok else change)


def examine_hostfile(path: Path) -> Iterator[Finding]:
    """Check each line of a DeepSpeed hostfile, and that ssh reaches each host without a password; a password prompt
    would make all hosts wait."""
    try:
        lines = [line.strip() for line in read_lines(path)]
    except RefusedError as error:
        change = "give an existing file: without it deepspeed starts on this host only, with a warning"
        yield judge("hostfile", False, str(error), change, "wrong")
        return
    problems: list[Finding] = []
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        match = _HOST.fullmatch(line)
        if match is not None and match[1] not in slots:
            slots[match[1]] = int(match[2])
        elif line and not line.startswith("#"):
            change = "write HOST slots=N, N the GPUs of the host, one line for each host"
            problems.append(judge("hostfile", False, f"{path}:{number}: {line[:80]!r}", change, "wrong"))
    if not slots and not problems:
        problems.append(judge("hostfile", False, f"{path}: names no host", "write HOST slots=N", "wrong"))
    with ThreadPoolExecutor(PARALLEL_LOGINS) as pool:
        for host, problem in zip(slots, pool.map(_try_login, slots), strict=True):
            change = f"let `ssh {host} true` work without a password, under a name that has an address"
            problems += [judge("hostfile", False, f"{host}: {problem}", change, "wrong")] if problem else []
    result = f"{path}: {len(slots)} hosts, {sum(slots.values())} slots; ssh reaches each without a password"
    yield from problems or [judge("hostfile", True, result, "")]


def _try_login(host: str) -> str:
    """Return why ssh does not reach a host, or ""."""
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", host, "true"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return "ssh is not installed (apt install openssh-client pdsh)"
    except subprocess.TimeoutExpired:
        return "no answer from ssh after 30 s"
    return "" if output.returncode == 0 else (output.stderr.strip().splitlines() or ["ssh failed"])[-1]


def examine(environment: Environment, storage: Path | None = None, *, mebibytes: int = 64) -> list[Finding]:
    """Return the findings of all ranks, on every rank. Collective.

    Args:
        storage: shared directory in which each rank writes and reads a file; `None` = not measured.
        mebibytes: size of each file, and of the all-reduce.
    """
    info, world = environment.info, environment.world
    local = [_check_network(world)]
    if info.local_rank == 0:
        local += [*_check_gpus(info), _check_open_files(), _check_shared_memory(info), *_check_ports()]
    hosts_of: dict[Finding, list[str]] = {}
    for host, findings in world.gather_objects((socket.gethostname(), local)):
        for finding in findings:
            hosts = hosts_of.setdefault(finding, [])
            hosts += [] if host in hosts else [host]
    return [
        *(replace(finding, where=tuple(hosts)) for finding, hosts in hosts_of.items()),
        *_check_versions(world),
        _check_compute(environment),
        _check_all_reduce(environment, mebibytes),
        *([] if world.size == 1 else [_check_collectives(environment)]),
        *([] if storage is None else [_check_storage(world, storage, mebibytes)]),
    ]


def _check_gpus(info: RankInfo) -> Iterator[Finding]:
    """Compare the GPUs that the driver reports with those that torch sees."""
    columns = "index,name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    visible = torch.cuda.device_count()
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = "nvidia-smi is not installed" if isinstance(error, FileNotFoundError) else f"nvidia-smi: {error}"
        gpus = f"{visible} for torch" if visible else "none: ranks compute on CPUs"
        yield judge("gpus", True, f"{gpus} ({reason})", "")
        return
    if output.returncode:
        line = (output.stdout + output.stderr).strip().partition("\n")[0]
        change = "the driver does not respond: restart it or the host, or remove the host from the job"
        yield judge("gpus", False, f"nvidia-smi ended with {output.returncode}: {line}", change, "wrong")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in output.stdout.splitlines() if line.strip()]
    kinds = "; ".join(sorted({f"{row[1]}, driver {row[2]}" for row in rows}))
    result = f"{len(rows)} ({kinds}), {visible} of them for torch {torch.__version__}"
    if not visible:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None
        driver = f"torch is built for CUDA {torch.version.cuda}: install a driver that supports it"
        change = "set CUDA_VISIBLE_DEVICES to the GPUs' numbers" if hidden else driver
        yield judge("gpus", False, result, change, "wrong")
    else:
        fits = info.launcher == "single" or visible in (1, info.local_world)
        ranks = "" if fits else f", for {info.local_world} ranks"
        yield judge("gpus", fits, result + ranks, f"start {visible} ranks per host, so that no GPU is idle")
    for index, _, _, total, used, errors in rows:
        if used.isdecimal() and total.isdecimal() and int(used) > 0.05 * int(total):
            change = "another process uses it: nvidia-smi shows which; end it, or use other GPUs"
            yield judge("gpu memory", False, f"GPU {index} has {used} of {total} MiB in use", change)
        if errors.isdecimal() and int(errors):
            change = "reset the GPU or restart the host; if the errors return, have the GPU examined"
            yield judge("gpu errors", False, f"GPU {index} has {errors} uncorrectable memory errors", change, "wrong")


def _check_open_files() -> Finding:
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_ok = limit == resource.RLIM_INFINITY or limit >= MIN_OPEN_FILES
    result = f"{'unlimited' if limit == resource.RLIM_INFINITY else limit} open files a process"
    change = f"ulimit -n {MIN_OPEN_FILES}; above the hard limit of {hard}: nofile in /etc/security/limits.conf"
    return judge("limits", is_ok, result, change)


def _check_shared_memory(info: RankInfo, folder: Path = Path("/dev/shm")) -> Finding:
    """Compare free space with what loader workers need to pass micro-batches."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return judge("shared memory", False, f"{folder}: {error.strerror}", f"mount a tmpfs at {folder}", "wrong")
    result = f"{free / 2**30:.1f} GiB free in {folder} for {info.local_world} rank(s)"
    change = (
        "at least 1 GiB a rank; docker: --shm-size or --ipc=host; Kubernetes: an emptyDir with medium: Memory there"
    )
    return judge("shared memory", free >= MIN_SHARED_BYTES * info.local_world, result, change)


def _check_ports(limits: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> Iterator[Finding]:
    """Check that connections do not use the rendezvous port, which is below 32000 under srun."""
    try:
        low, high = map(int, limits.read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return
    change = "sysctl net.ipv4.ip_local_port_range='32768 60999', or set MASTER_PORT below it"
    yield judge("ports", low >= 32000, f"the system gives connections ports {low} to {high}", change)


def _check_network(world: Group) -> Finding:
    """Check that gloo listens on an address that other hosts reach. Collective."""
    host = socket.gethostname()
    several = len(set(world.gather_objects(host))) > 1
    interfaces = [name for _, name in socket.if_nameindex()]
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME", ""):
        result = f"GLOO_SOCKET_IFNAME is {chosen}, and the interfaces are {', '.join(interfaces)}"
        change = "set GLOO_SOCKET_IFNAME to one of them, or unset it"
        return judge("network", {*chosen.split(",")} <= {*interfaces}, result, change, "wrong")
    change = f"other hosts cannot reach it: set GLOO_SOCKET_IFNAME to one of {', '.join(interfaces)}"
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        result = f"the host's name {host} has no address ({error})"
        return judge("network", False, result, change, "wrong" if several else "warning")
    is_ok = not (several and address.startswith("127."))
    return judge("network", is_ok, f"the host's name {host} is {address}", change, "wrong")


def _check_versions(world: Group) -> Iterator[Finding]:
    """Compare versions over ranks: different versions write different checkpoints, or hang in collectives."""
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    for package in ("trp-scale", "deepspeed", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if torch.cuda.is_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        versions["CUDA"] = str(torch.version.cuda)
    ranks = world.gather_objects(versions)
    different = [name for name in versions if len({rank.get(name) for rank in ranks}) > 1]
    if not different:
        yield judge("versions", True, ", ".join(f"{name} {version}" for name, version in versions.items()), "")
    for name in different:
        numbers: dict[str, list[int]] = {}
        for number, rank in enumerate(ranks):
            numbers.setdefault(str(rank.get(name)), []).append(number)
        result = "; ".join(f"{version} on {list_ranks(ranks)}" for version, ranks in numbers.items())
        change = f"install the same {name} on all hosts (constraints.txt), or take the environment from shared storage"
        yield judge("versions", False, f"{name} is {result}", change, "wrong")


def _check_compute(environment: Environment) -> Finding:
    """Measure one matrix product on every rank at the same time: a slow rank delays all."""
    on_gpu = environment.device.type == "cuda"
    side, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    left = torch.ones(side, side, dtype=dtype, device=environment.device)  # [side, side]
    seconds = [_measure(lambda: left @ left, environment) for _ in range(6)][1:]
    speeds = environment.world.gather_objects(2 * side**3 / min(seconds))
    median, slowest = statistics.median(speeds), min(speeds)
    result = f"{median / 1e12:.2f} TFLOP/s a rank at a {'bf16' if on_gpu else 'fp32'} product of {side} x {side}"
    if slow := [rank for rank, speed in enumerate(speeds) if speed < SLOW_RANK * median]:
        result += f", {slowest / 1e12:.2f} on the slowest of {list_ranks(slow)}"
    change = "check its clocks, temperature and other processes (nvidia-smi -q -d PERFORMANCE, top); all wait for it"
    return judge("compute", not slow, result, change)


def _check_all_reduce(environment: Environment, mebibytes: int) -> Finding:
    """Measure the rate of a large all-reduce, by the bytes each rank sends (2 (n - 1) / n of the tensor), and the
    latency of a small one."""
    world, device = environment.world, environment.device
    if world.size == 1:
        return judge("all-reduce", True, "one rank; start it under torchrun or srun to measure", "")
    large, small = (torch.empty(size, device=device) for size in (mebibytes << 18, 1))  # fp32: 2^18 per MiB
    seconds = [_measure_all_reduce(numbers, environment) for numbers in (large, small)]
    sent_bytes = 2 * (world.size - 1) / world.size * large.numel() * large.element_size()
    is_exact = all(bool((numbers == world.size).all()) for numbers in (large, small))
    results = world.gather_objects((sent_bytes / seconds[0], seconds[1], is_exact, socket.gethostname()))
    speeds, latencies, exact, names = zip(*results, strict=True)
    hosts, speed = len(set(names)), min(speeds)
    result = (
        f"{speed / 1e9:.2f} GB/s over {'NCCL' if device.type == 'cuda' else 'gloo'} on {world.size} ranks of {hosts} "
        f"host(s), {mebibytes} MiB; {max(latencies) * 1e6:.0f} us for one number"
    )
    if not all(exact):
        change = "a link or a GPU corrupts data: set NCCL_DEBUG=INFO, and remove hosts until the sums are right"
        return judge("all-reduce", False, f"{result}; the sums are wrong", change, "wrong")
    change = (
        "NCCL may use plain sockets: NCCL_DEBUG=INFO shows the network; set NCCL_SOCKET_IFNAME and NCCL_IB_HCA, on "
        "EFA install aws-ofi-nccl"
    )
    is_slow = device.type == "cuda" and hosts > 1 and speed < MIN_SPEED_BETWEEN_HOSTS
    return judge("all-reduce", not is_slow, result, change)


def _measure_all_reduce(numbers: Tensor, environment: Environment) -> float:
    """Return the seconds of the fastest of four all-reduces of ones; the first one opens connections."""
    seconds = []
    for _ in range(4):
        numbers.fill_(1.0)
        seconds.append(_measure(lambda: dist.all_reduce(numbers, group=environment.world.handle), environment))
    return min(seconds)


def _measure(work: Callable[[], object], environment: Environment) -> float:
    synchronize: Callable[[], None] = torch.cuda.synchronize if environment.device.type == "cuda" else lambda: None
    environment.world.barrier()
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def _check_collectives(environment: Environment, size: int = 4096) -> Finding:
    """Compare collectives of `size` elements a rank in fp32 and bf16 with exact results. Collective."""
    world, wrong = environment.world, list[str]()
    for dtype in (torch.float32, torch.bfloat16):
        values = (torch.arange(size * world.size + 2) % 3 - 1).to(environment.device, dtype)
        inputs = [values[rank % 3 :][: size * world.size] for rank in range(world.size)]  # those of three ranks cancel
        total = sum(inputs[: world.size % 3], torch.zeros_like(inputs[0]))  # [size * ranks]
        ours = inputs[world.rank]
        reduced, copied, gathered, part = ours.clone(), ours.clone(), ours.clone(), ours[:size].clone()
        dist.all_reduce(reduced, group=world.handle)
        dist.broadcast(copied, 0, group=world.handle)
        dist.all_gather_into_tensor(gathered, ours[:size].clone(), group=world.handle)
        dist.reduce_scatter_tensor(part, ours.clone(), group=world.handle)
        results = {
            "all_reduce": (reduced, total),
            "broadcast": (copied, inputs[0]),
            "all_gather": (gathered, torch.cat([numbers[:size] for numbers in inputs])),
            "reduce_scatter": (part, total.chunk(world.size)[world.rank]),
        }
        wrong += [f"{name} of {dtype}" for name, pair in results.items() if not torch.equal(*pair)]
    names = ", ".join(sorted({name for names in world.gather_objects(wrong) for name in names}))
    result = f"wrong: {names}" if names else f"{', '.join(results)}: exact in fp32 and bf16"
    change = "a link or a GPU corrupts data, or the library has a fault: try another version of NCCL or of the driver"
    return judge("collectives", not names, result, change, "wrong")


def _check_storage(world: Group, directory: Path, mebibytes: int) -> Finding:
    """Make each rank write a file and read one of another host, if one exists; its own file could come from memory."""
    label = world.broadcast_object(f".doctor-{socket.gethostname()}-{os.getpid()}")
    files = [directory / f"{label}-{rank}" for rank in range(world.size)]
    hosts = world.gather_objects(socket.gethostname())
    others = [(world.rank + step) % world.size for step in range(1, world.size)] or [world.rank]
    source = next((rank for rank in others if hosts[rank] != hosts[world.rank]), others[0])
    content = os.urandom(1 << 20) * mebibytes
    try:
        writing = _attempt(lambda: _write(files[world.rank], content))
        checksums = world.gather_objects(zlib.crc32(content))  # every file exists from here on
        reading = _attempt(lambda: _read(files[source], checksums[source]))
        results = world.gather_objects((writing, reading))
    finally:
        world.barrier()
        with contextlib.suppress(OSError):
            files[world.rank].unlink()
    if errors := {rank: part for rank, parts in enumerate(results) for part in parts if isinstance(part, str)}:
        result = f"{next(iter(errors.values()))} ({list_ranks([*errors])})"
        change = "give a writable directory that all hosts share, mounted at the same path on each"
        return judge("storage", False, result, change, "wrong")
    total = world.size * len(content)
    written, read = (total / max(float(parts[way]) for parts in results) for way in (0, 1))
    free = shutil.disk_usage(directory).free
    speeds = f"{written / 1e6:.0f} MB/s written and {read / 1e6:.0f} read by all ranks"
    change = "a checkpoint of 10^9 parameters is 12 GB: use faster storage for --run_dir, or save less often"
    is_fast = min(written, read) >= MIN_STORAGE_SPEED
    return judge("storage", is_fast, f"{directory}: {speeds}, {free / 1e9:.0f} GB free", change)


def _attempt(work: Callable[[], float]) -> float | str:
    """Return the seconds, or the error, so that the other ranks do not wait."""
    try:
        return work()
    except OSError as error:
        return f"{error.filename or ''}: {error.strerror or error}"


def _write(file: Path, content: bytes) -> float:
    began = time.perf_counter()
    with file.open("wb", buffering=0) as stream:
        stream.write(content)
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # a single host must not read from memory
    return time.perf_counter() - began


def _read(file: Path, checksum: int) -> float:
    began = time.perf_counter()
    content = file.read_bytes()
    seconds = time.perf_counter() - began
    if zlib.crc32(content) != checksum:
        raise OSError(0, "read other bytes than were written", str(file))
    return seconds
