"""DeepSpeed ZeRO 0-3 behind the engine protocol. Comments explain each workaround for DeepSpeed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar
from weakref import WeakSet

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import groups, set_z3_leaf_modules
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn

from trp_scale.config import Config
from trp_scale.core.engine import EngineError
from trp_scale.core.pieces import Piece, Shards, whole_tensors
from trp_scale.distributed.groups import Group
from trp_scale.engines.compiled import checkpoint_blocks, compile_model
from trp_scale.engines.optimizer import MatrixOptimizer, adamw_response, build_optimizer, set_learning_rate
from trp_scale.engines.shards import ShardOperations, sum_of_squares
from trp_scale.engines.zero_layout import (
    FlatLayout,
    FlatOffloadLayout,
    PartitionedLayout,
    PartitionedOffloadLayout,
    WholeHalfLayout,
    WholeLayout,
    ZeroLayout,
)
from trp_scale.models.initialise import fill_module, initialisers

# Without a GPU the first start would compile it for a minute; only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed_logger.setLevel(logging.WARNING)  # it prints about 60 lines on each rank at the start
LINEAR = nn.functional.linear
"""Original function. Stage 3 replaces it for the whole process, and later code would round differently."""

SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""State of a dynamic loss scaler."""

LAYOUTS: dict[tuple[str, bool], type[ZeroLayout]] = {
    ("AdamW", False): WholeLayout,
    ("Lamb", False): WholeLayout,
    ("Muon", False): WholeLayout,
    ("SGD", False): WholeLayout,
    ("FP16_UnfusedOptimizer", False): WholeHalfLayout,
    ("DeepSpeedZeroOptimizer", False): FlatLayout,
    ("DeepSpeedZeroOptimizer", True): FlatOffloadLayout,
    ("DeepSpeedZeroOptimizer_Stage3", False): PartitionedLayout,
    ("DeepSpeedZeroOptimizer_Stage3", True): PartitionedOffloadLayout,
}
"""Layout by the class of `engine.optimizer` (DeepSpeed's wrapper, or torch's class without one), and whether the
optimizer's state is in host memory."""


class DeepSpeedEngine(ShardOperations):
    """DeepSpeed with our optimizer, finite check and checkpoints.

    Args:
        data_group: all ranks of DeepSpeed's process group.
        document: resolved DeepSpeed configuration."""

    name = "deepspeed"
    decides_on_host = True
    fp16_devices: tuple[str, ...] = ("cuda",)
    """Device types that fp16 is allowed on; others have no gain."""
    _stage_3: ClassVar[WeakSet[DeepSpeedEngine]] = WeakSet()

    def __init__(
        self, module: nn.Module, config: Config, *, device: torch.device, data_group: Group, document: dict[str, Any]
    ) -> None:
        if config.training.precision == "fp16" and device.type not in self.fp16_devices:
            raise EngineError("--training.precision fp16 needs a GPU; use bf16")
        stage_3 = document["zero_optimization"]["stage"] == 3
        if config.training.compile in ("blocks", "whole") and stage_3:
            raise EngineError("--training.compile does not work with ZeRO stage 3 (gathered weights); use stage 2")
        if config.training.activation_checkpointing == "selective" and stage_3:
            raise EngineError(
                "--training.activation_checkpointing selective gives wrong gradients with ZeRO stage 3, which gathers "
                "weights again during the recomputation; allowed: full, none, or another stage"
            )
        self.config = config
        self.device = device
        self.data_group = data_group
        self.graphs = compile_model(module, config.training.compile)
        checkpoint_blocks(module, config.training.activation_checkpointing)
        if stage_3:
            # Gather a block with one collective, not one for each matrix.
            blocks = {type(layer) for layer in module.layers if list(layer.children())}  # type: ignore[union-attr, attr-defined]
            set_z3_leaf_modules(module, list(blocks), raise_if_not_found=False)
            deepspeed.init_distributed(dist_init_required=False)
            self._group_for_backward(document)
            if initialisers(module):
                self._cut(module, document)
        else:
            fill_module(module, device)
        self.engine, _, _, _ = deepspeed.initialize(
            model=module, optimizer=self._build_optimizer(module, document), config=document, dist_init_required=False
        )
        self.zero_stage: int | None = int(ZeroStageEnum(self.engine.zero_optimization_stage()))
        if self.zero_stage == 3:
            self._stage_3.add(self)
        self.layout = self._layout()
        self._steps = 0

    def _cut(self, module: nn.Module, document: dict[str, Any]) -> None:
        """Fill a model without content for stage 3. Each block is partitioned before the next is filled, in the type
        that forwards read: DeepSpeed does not round a partitioned parameter."""
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}
        read = next((half[name] for name in half if document.get(name, {}).get("enabled")), torch.float32)
        for unit in (*module.layers, module):  # type: ignore[misc]
            for parameter in fill_module(unit, self.device).parameters():
                if not hasattr(parameter, "ds_id"):  # not partitioned yet
                    parameter.data = parameter.data.to(read)
            intra = groups._get_zero_param_intra_parallel_group()
            deepspeed.zero.Init(module=unit, config_dict_or_path=document, zero_param_parallel_group=intra)

    def _build_optimizer(self, module: nn.Module, document: dict[str, Any]) -> torch.optim.Optimizer:
        """Build torch's optimizer, or DeepSpeed's C++ Adam if the file selects it.

        Raises:
            EngineError: the C++ Adam cannot be compiled here.
        """
        settings = self.config.optimizer
        ours = build_optimizer(module, settings, precision=self.config.training.precision)
        if not document.get("zero_force_ds_cpu_optimizer"):
            return ours
        try:
            adam: torch.optim.Optimizer = DeepSpeedCPUAdam(
                ours.param_groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps
            )
        except RuntimeError as error:
            raise EngineError(
                f"zero_force_ds_cpu_optimizer is true, and DeepSpeed's C++ Adam cannot be compiled here ({error}: "
                f"{error.__cause__}); install ninja and a C++ compiler, or set it to false"
            ) from error
        return adam

    def _group_for_backward(self, document: dict[str, Any]) -> None:
        """Create the hpZ group in which the backward pass gathers weights. DeepSpeed keeps one group for the process,
        also for engines without hpZ, and never creates a second one."""
        size = int(document["zero_optimization"].get("zero_hpz_partition_size", 1))
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        if size > 1:
            groups._create_zero_param_parallel_group(size)

    def _layout(self) -> ZeroLayout:
        """Build the layout for the optimizer class that DeepSpeed chose for stage and precision."""
        chosen, optimizer = type(self.engine.optimizer).__name__, self.engine.optimizer
        offloads = any(bool(getattr(optimizer, name, False)) for name in ("cpu_offload", "offload_optimizer"))
        if (chosen, offloads) not in LAYOUTS or (self.zero_stage == 0 and self.engine.bfloat16_enabled()):
            raise EngineError(
                f"zero_optimization.stage {self.zero_stage} with --training.precision {self.config.training.precision} "
                f"and data_types.grad_accum_dtype {self.engine._config.grad_accum_dtype} makes DeepSpeed choose its "
                f"{chosen}, which is not supported; allowed for bf16: torch_autocast on any stage, or bf16 weights on "
                'stage 1 to 3 with data_types.grad_accum_dtype "auto"'
            )
        make = LAYOUTS[chosen, offloads]
        layout = make(self.engine.module, optimizer, rank=self.data_group.rank, world=self.data_group.size)
        if isinstance(layout.torch_optimizer, MatrixOptimizer):
            if offloads:
                kind = self.config.optimizer.kind
                raise EngineError(f"--optimizer.kind {kind} does not work with offload_optimizer; use adamw, or none")
            layout.spread(layout.torch_optimizer, self.data_group)
        return layout

    @property
    def module(self) -> nn.Module:
        return self.engine.module  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.publish_restored()
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.watch_backward()
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks (stage 3 has no "sum"); scale_wrt_gas would divide by the accumulation steps.
        loss = loss * (self.data_group.size * self.layout.loss_factor())
        with self.layout.last_backward() if last else nullcontext():
            self.engine.backward(loss, scale_wrt_gas=False)

    def _loss_scale(self) -> float:
        return float(self.engine.optimizer.loss_scale) if self.engine.fp16_enabled() else 1.0

    def check_gradients(self) -> Tensor:
        squares = sum_of_squares(self.layout.gradients(), self.device)
        return self.data_group.sum(squares).sqrt() / self._loss_scale()

    def step(self, lr: float, applied: Tensor | None = None) -> None:
        set_learning_rate(self.layout.torch_optimizer, lr)
        self.engine.step()
        self.forget_micro_batches()
        self._steps += 1

    def leaves(self) -> Iterator[Tensor]:
        return self.module.parameters()

    def loss_factor(self) -> float:
        return self.data_group.size * self._loss_scale()

    def discard_gradients(self) -> None:
        self.forget_micro_batches()
        self.layout.clear_gradients()
        self.engine.zero_grad()

    def skip(self) -> bool:
        before = self._loss_scale()
        if self.engine.fp16_enabled():
            # Not engine.step(): DeepSpeed would check again, and apply the step if it finds no overflow.
            # At the lowest scale it would raise, but the loop counts skipped steps.
            self.layout.loss_scaler.raise_error_at_min_scale = False
            self.engine.optimizer._update_scale(True)
        self.discard_gradients()
        return self._loss_scale() < before

    def train(self, mode: bool) -> None:
        self.engine.train(mode)

    def pieces(self) -> Iterator[Piece]:
        return self.layout.pieces()

    def piece_gradients(self) -> list[Tensor]:
        scale = self._loss_scale()
        gradients = [gradient.float() for gradient in self.layout.piece_gradients()]
        return gradients if scale == 1.0 else [gradient / scale for gradient in gradients]

    def clear_unused_gradients(self) -> None:
        self.layout.clear_unused_gradients()

    def publish_weights(self) -> None:
        self.layout.publish_weights()

    @property
    def rounds_weights(self) -> bool:
        return bool(self.engine.bfloat16_enabled() or self.engine.fp16_enabled())

    @contextmanager
    def exact_forwards(self) -> Iterator[None]:
        settings = self.engine._config  # DeepSpeed reads it in every forward and overrides an outer torch.autocast
        settings.torch_autocast_enabled, before = False, settings.torch_autocast_enabled
        try:
            yield
        finally:
            settings.torch_autocast_enabled = before

    def step_response(self, direction: Shards, *, lr: float, grad_norm: float) -> Shards:
        return adamw_response(self, direction, self.config.optimizer, lr=lr, grad_norm=grad_norm)

    def create_optimizer_state(self) -> None:
        self.layout.create_state()

    def after_load(self, optimizer_steps: int) -> None:
        self._steps = optimizer_steps
        self.layout.set_steps(optimizer_steps)
        self.layout.publish_weights()

    def optimizer_steps(self) -> int:
        return self._steps

    def extra_state(self) -> Mapping[str, float]:
        if not self.engine.fp16_enabled():
            return {}
        state = {name: getattr(self.layout.loss_scaler, name, None) for name in SCALER_STATE}
        return {name: float(value) for name, value in state.items() if value is not None}

    def load_extra_state(self, state: Mapping[str, float]) -> None:
        for name in self.extra_state():
            if name in state:  # scalers of other stages have fewer fields
                setattr(self.layout.loss_scaler, name, state[name] if name == "cur_scale" else int(state[name]))

    def full_weights(self) -> dict[str, Tensor]:
        """Return the weights from the master pieces of all ranks."""
        weights = (piece.tensors["weight"].float() for piece in self.pieces())
        tensors = whole_tensors(self.pieces(), weights, self.data_group)
        return tensors if self.data_group.rank == 0 else {}

    def close(self) -> None:
        self.engine.destroy()
        self._stage_3.discard(self)
        if self.zero_stage == 3 and not self._stage_3:
            nn.functional.linear = LINEAR
