"""Memory and collectives of DeepSpeed's ZeRO stages: buckets, partitions and gathers of DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from trp_scale.config import Config
from trp_scale.config.files import read_object
from trp_scale.engines import ds_config
from trp_scale.engines.optimizer import decay_groups
from trp_scale.planning.clusters import Cluster
from trp_scale.planning.counting import Collective, Counted
from trp_scale.planning.layouts import MASTER, Layout, LayoutChoice, norms

SHIPPED = Path(__file__).parents[1] / "launch_files" / "ds_configs"
SHIPPED_FILES = ("zero1.json", "zero2.json", "zero3.json", "zero3_offload.json")
"""DeepSpeed files to try if none is given."""

OF_THE_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys that the run itself compares with its micro-batch."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedLayout(Layout):
    """ZeRO stages.

    Attributes:
        stage: of ZeRO.
        ds_config: path of DeepSpeed's file on the command line.
        zero: its resolved block zero_optimization.
    """

    stage: int
    ds_config: str = ""
    zero: Mapping[str, Any]

    @classmethod
    def candidates(cls, engine: str, counted: Counted, cluster: Cluster, choices: LayoutChoice) -> Iterator[Layout]:
        """Yield the layouts of the given file, or of the shipped files."""
        config = counted.config
        for path, document in _documents(config, choices):
            resolved = _resolve(config, document, path, cluster.gpus)
            half = any(resolved.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
            of_name = {"bf16": 2, "bfp16": 2, "fp16": 2, "fp32": 4}
            layout = cls(
                engine=engine,
                stage=ds_config.zero_stage(resolved),
                read=2 if half else 4,
                sent=of_name.get(str(resolved.get("communication_data_type")), 2 if half else 4),
                ds_config=path,
                zero=resolved["zero_optimization"],
            )
            yield from layout.ways(config)

    @property
    def label(self) -> str:
        return f"ZeRO-{self.stage}" + (" offload" if self.offloads("optimizer") else "")

    @property
    def compiles(self) -> bool:
        return self.stage != 3 and super().compiles

    def offloads(self, states: str) -> bool:
        """Return whether moments and masters ("optimizer") or weights ("param") are in host memory."""
        block = self.zero.get(f"offload_{states}") or {}
        return bool(block.get("device", "none") != "none")

    def command(self, flags: str, gpus: int, per_node: int) -> str:
        """Return the command; DeepSpeed's launcher starts all nodes."""
        hosts = "" if gpus <= per_node else "--hostfile HOSTFILE "
        return f"deepspeed {hosts}launch/pretrain.py --ds_config {self.ds_config} {flags}"

    def sharers(self, ranks: int) -> int:
        return ranks if self.stage == 3 else 1

    def updated(self, counted: Counted, ranks: int) -> float:
        return counted.parameters / (ranks if self.stage else 1)

    def host_bytes(self, accumulation: int) -> int:
        return 2 * MASTER if self.offloads("optimizer") else 0

    def number(self, key: str) -> int:
        """Return a number of the zero_optimization block."""
        return int(self.zero[key])

    def states(self, counted: Counted, ranks: int, *, several: bool) -> dict[str, float]:
        every, block = counted.parameters, max(counted.blocks, default=0)
        if self.stage == 0:
            return {"weights": MASTER * every, "gradients": MASTER * every, "moments": MASTER * counted.moments}
        bucket = MASTER * self.number("reduce_bucket_size")
        optimizer = {"host" if self.offloads("optimizer") else "moments": MASTER * (every + counted.moments) / ranks}
        if self.stage in (1, 2):
            kept = self.read * every if self.stage == 1 else MASTER * every / ranks
            return {"weights": self.read * every, "gradients": kept, "buckets": 2 * bucket, **optimizer}
        largest = max((parameter.numel() for parameter in counted.model.parameters()), default=0)
        return {
            "weights": 0.0 if self.offloads("param") else self.read * every / ranks,
            "gradients": MASTER * every / ranks,
            "gathered": self.read * (counted.rest + 2 * block),
            "buckets": bucket + MASTER * largest,
            **optimizer,
        }

    def collectives(self, counted: Counted, ranks: int, micro: int, accumulation: int) -> Iterator[Collective]:
        yield from super().collectives(counted, ranks, micro, accumulation)
        yield from norms(counted, of_each=self.stage != 0)
        stages = {0: self._whole, 1: self._by_owners, 2: self._by_owners, 3: self._gathered}
        yield from stages[self.stage](counted, ranks, accumulation)

    def _whole(self, counted: Counted, ranks: int, accumulation: int) -> Iterator[Collective]:
        """Yield the collectives of stage 0: after the backward pass, in pieces of DeepSpeed's default of 5 10^8
        numbers."""
        numbers, most = counted.parameters, 500_000_000
        while numbers > 0:
            yield Collective(kind="all-reduce", size=self.sent * min(numbers, most), phase="update")
            numbers -= most

    def _by_owners(self, counted: Counted, ranks: int, accumulation: int) -> Iterator[Collective]:
        """Yield the collectives of stages 1 and 2: gradients are reduced per bucket, each part to its owner, on stage 1
        in the last backward pass, on stage 2 in every one. New weights are gathered after the update, one collective
        per parameter group."""
        named = ((name, tensor) for name, tensor in counted.model.named_parameters() if tensor.requires_grad)
        groups = [group["params"] for group in decay_groups(named, 1.0)]
        owned = _owned_parts(groups, ranks)
        for bucket in in_buckets(counted.model, self.number("reduce_bucket_size")):
            parts: dict[int, int] = {}
            for parameter in bucket:
                for rank, size in owned[id(parameter)]:
                    parts[rank] = parts.get(rank, 0) + size
            for size in parts.values():
                if self.stage == 1:
                    yield Collective(kind="reduce", size=self.sent * size, phase="last")
                else:
                    yield Collective(kind="reduce", size=self.sent * size, phase="backward", times=accumulation)
        for group in groups:
            size = self.read * sum(tensor.numel() for tensor in group)
            yield Collective(kind="gather", size=size, phase="update")

    def _gathered(self, counted: Counted, ranks: int, accumulation: int) -> Iterator[Collective]:
        """Yield the collectives of stage 3: blocks are gathered whole, other parameters individually, forward and
        backward. The last block stays for its backward pass, as does the largest other parameter, which the model's end
        uses again. Small parameters stay on every rank and are gathered individually after the update."""
        small = self.number("stage3_param_persistence_threshold")
        layers: Any = counted.model.layers
        of_blocks = {id(tensor) for layer in layers for tensor in layer.parameters()}
        blocks = [sum(tensor.numel() for tensor in layer.parameters() if tensor.numel() > small) for layer in layers]
        others = sorted(
            tensor.numel()
            for tensor in counted.model.parameters()
            if id(tensor) not in of_blocks and tensor.numel() > small
        )
        gathers = {"forward": [*others, *blocks], "backward": [*others[:-1], *blocks[:-1]]}
        for phase, numbers in gathers.items():
            for size in numbers:
                yield Collective(kind="gather", size=self.read * size, phase=phase, times=accumulation)
        for bucket in in_buckets(counted.model, self.number("reduce_bucket_size")):
            size = self.sent * sum(tensor.numel() for tensor in bucket)
            yield Collective(kind="scatter", size=size, phase="backward", times=accumulation)
        for parameter in counted.model.parameters():
            if parameter.numel() <= small:
                yield Collective(kind="gather", size=self.read * parameter.numel(), phase="update")
        yield Collective(kind="all-reduce", size=8, phase="update", times=2)  # DeepSpeed's own


def _documents(config: Config, choices: LayoutChoice) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if choices.document is not None:
        yield choices.path, choices.document
    elif config.training.weights == "fp32":
        for name in SHIPPED_FILES:
            if config.optimizer.kind in ("lamb", "muon") and "offload" in name:
                continue  # the engine refuses it
            yield f"ds_configs/{name}", read_object(SHIPPED / name)


def _resolve(config: Config, document: Mapping[str, Any], path: str, gpus: int) -> dict[str, Any]:
    """Resolve DeepSpeed's file with a micro-batch of 1, on which layouts do not depend."""
    sized = replace(config, batch=replace(config.batch, micro_size=1))
    accumulation = max(1, config.batch.global_size // gpus)  # divisibility is checked with the real micro-batch
    document = {key: value for key, value in document.items() if key not in OF_THE_BATCH}
    return ds_config.resolve(document, sized, world=gpus, accumulation=accumulation, path=path)


def in_buckets(model: nn.Module, limit: int) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each DeepSpeed bucket of gradients, in the order in which a backward pass computes them:
    at most `limit` numbers, or one parameter."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in reversed([parameter for parameter in model.parameters() if parameter.requires_grad]):
        if bucket and size + parameter.numel() > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    if bucket:
        yield bucket


def _owned_parts(groups: Sequence[Sequence[nn.Parameter]], ranks: int) -> dict[int, list[tuple[int, int]]]:
    """Return (rank, numbers) of the parts of each parameter, by its id: each group is one flat tensor, split into equal
    parts."""
    parts: dict[int, list[tuple[int, int]]] = {}
    for group in groups:
        share = -(-sum(parameter.numel() for parameter in group) // ranks)
        start = 0
        for parameter in group:
            stop = start + parameter.numel()
            while start < stop:
                end = min(stop, (start // share + 1) * share)
                parts.setdefault(id(parameter), []).append((start // share, end - start))
                start = end
    return parts
