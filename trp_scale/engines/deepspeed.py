"""DeepSpeed ZeRO 0-3 behind the engine protocol. Each surprise of DeepSpeed is described where it is undone."""

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
from trp_scale.engines.optimizer import Lamb, adamw_response, build_optimizer, set_learning_rate
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

# Built by a C compiler at the first start, for a minute, on machines without a GPU; only inference calls it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed_logger.setLevel(logging.WARNING)  # it prints some 60 lines a rank at start
LINEAR = nn.functional.linear
"""Stage 3 replaces it for the whole process and for good; with it what runs later would round differently."""

SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What a dynamic loss scaler remembers."""

LAYOUTS: dict[tuple[str, bool], type[ZeroLayout]] = {
    ("AdamW", False): WholeLayout,
    ("Lamb", False): WholeLayout,
    ("SGD", False): WholeLayout,
    ("FP16_UnfusedOptimizer", False): WholeHalfLayout,
    ("DeepSpeedZeroOptimizer", False): FlatLayout,
    ("DeepSpeedZeroOptimizer", True): FlatOffloadLayout,
    ("DeepSpeedZeroOptimizer_Stage3", False): PartitionedLayout,
    ("DeepSpeedZeroOptimizer_Stage3", True): PartitionedOffloadLayout,
}
"""By the class that DeepSpeed chose for `engine.optimizer` (torch's own where it wraps nothing), and whether the
optimizer's state is in host memory."""


class DeepSpeedEngine(ShardOperations):
    """DeepSpeed with our optimizer, our finite check and our checkpoints. `data_group` has all ranks of DeepSpeed's
    process group; `document` is DeepSpeed's configuration, resolved."""

    name = "deepspeed"
    decides_on_host = True
    fp16_devices: tuple[str, ...] = ("cuda",)
    """Kinds of device that fp16 is meant for; on others it runs without any gain."""
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
                "weights again while operations are left out; allowed: full, none, or another stage"
            )
        self.config = config
        self.device = device
        self.data_group = data_group
        self.graphs = compile_model(module, config.training.compile)
        checkpoint_blocks(module, config.training.activation_checkpointing)
        if stage_3:
            # A block is gathered whole: not matrix by matrix, each with a collective of its own.
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
        """Fill a model without content for stage 3, block by block. Each block is cut into the ranks' pieces before the
        next is made, in the type that forwards read: DeepSpeed rounds no parameter that is cut."""
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}
        read = next((half[name] for name in half if document.get(name, {}).get("enabled")), torch.float32)
        for unit in (*module.layers, module):  # type: ignore[misc]
            for parameter in fill_module(unit, self.device).parameters():
                if not hasattr(parameter, "ds_id"):  # it is not cut yet
                    parameter.data = parameter.data.to(read)
            intra = groups._get_zero_param_intra_parallel_group()
            deepspeed.zero.Init(module=unit, config_dict_or_path=document, zero_param_parallel_group=intra)

    def _build_optimizer(self, module: nn.Module, document: dict[str, Any]) -> torch.optim.Optimizer:
        """Torch's, or DeepSpeed's C++ Adam where the file asks for it.

        Raises:
            EngineError: it cannot be compiled here.
        """
        settings = self.config.optimizer
        ours = build_optimizer(module, settings)
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
        """hpZ: the ranks among which weights are gathered again. DeepSpeed keeps one such group for a process, gives it
        to engines that ask for none, and would not make a second one."""
        size = int(document["zero_optimization"].get("zero_hpz_partition_size", 1))
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        if size > 1:
            groups._create_zero_param_parallel_group(size)

    def _layout(self) -> ZeroLayout:
        """Return the layout of the states, by the optimizer class that DeepSpeed chose for stage and precision."""
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
        if isinstance(layout.torch_optimizer, Lamb):
            if offloads:
                raise EngineError("--optimizer.kind lamb does not work with offload_optimizer; use adamw, or none")
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
        # DeepSpeed averages over ranks ("sum" is refused on stage 3) and would divide by the accumulation steps.
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
            # Not engine.step(): DeepSpeed would look for itself, and apply the step where it finds nothing.
            # At the lowest scale it would raise, on all ranks, in the place of the loop, which counts what it skips.
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
        settings = self.engine._config  # DeepSpeed asks it in every forward; torch.autocast around that has no say
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
            if name in state:  # a checkpoint of another stage's scaler may lack one
                setattr(self.layout.loss_scaler, name, state[name] if name == "cur_scale" else int(state[name]))

    def full_weights(self) -> dict[str, Tensor]:
        """Assembled from all ranks' master pieces."""
        weights = (piece.tensors["weight"].float() for piece in self.pieces())
        tensors = whole_tensors(self.pieces(), weights, self.data_group)
        return tensors if self.data_group.rank == 0 else {}

    def close(self) -> None:
        self.engine.destroy()
        self._stage_3.discard(self)
        if self.zero_stage == 3 and not self._stage_3:
            nn.functional.linear = LINEAR
