"""Section `captured` of benchmarks/gpu.py: micro-batches as CUDA graphs (`training.capture`): equal steps, then times.

Weights are in bf16 if nothing else is said. A timing calls CALLS steps in a row and waits for the GPU once, so that the
host may run ahead as it does in a run. "off" and "on" alternate on one engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_setting import (
    MEGABYTE,
    Figures,
    Item,
    Setting,
    image_config,
    modality_config,
    release_memory,
    training,
    use_of_peak,
)
from benchmarks.gpu_waits import EXPECTED_WAITS, checked_images, checked_modalities, checked_text, waits_of
from benchmarks.method_cost import BALANCING
from benchmarks.rounds import alternate, pair_ratio
from benchmarks.step_time import bert_peer, peer_step
from benchmarks.steps import Notes, Workload, model_flops
from benchmarks.workloads import CLASSES, ENCODERS, VOCABULARY, build_workload, set_encoder, text_config
from trp_scale.config.registry import make_settings
from trp_scale.core.run import task_losses
from trp_scale.engines.captured import RECORDERS, Captured
from trp_scale.engines.plain import PlainEngine
from trp_scale.pretraining.base import DataFacts
from trp_scale.pretraining.pos_bert.settings import PosBertModelConfig
from trp_scale.training.loop import Trainer

Model = Callable[[Setting, int], Workload]
Way = dict[str, str]
"""Settings of `training` that differ from autocast without compilation."""
AUTOCAST: Way = {}
FP32: Way = {"precision": "fp32"}
BF16: Way = {"weights": "bf16"}
WHOLE: Way = {"weights": "bf16", "compile": "whole"}
CALLS, CHECKED_STEPS = 4, 3
ROWS, IMAGES = (64, 32, 128, 256), 64
LARGE_ROWS = {128: 256, 512: 64}
"""Rows of BERT-large by tokens of a row."""
BERT = "BERT-base, 128 tokens"


def bert(setting: Setting, rows: int, *, balancer: str = "minimax", length: int = 0, size: str = "base") -> Workload:
    """PoS-BERT over sequences of `length` tokens, the shortest of the setting's if it is 0."""
    length = length or min(setting.lengths)
    model = setting.base if size == "base" or setting.small else set_encoder(PosBertModelConfig(), *ENCODERS["large"])
    config = text_config(model, rows=rows, balancer=BALANCING[balancer][0])
    config.masking.limit = setting.lengths[length]
    return build_workload(config, length, setting.lengths[length])


def mae(setting: Setting, rows: int) -> Workload:
    return build_workload(image_config(setting, "mae_vit_b", size="base", rows=rows))


def mm_mae(setting: Setting, rows: int, *, balancer: str = "minimax") -> Workload:
    return build_workload(modality_config(setting, size="base", rows=rows, balancer=balancer))


def adpe(setting: Setting, rows: int, *, adversary: str = "", kind: str = "relative_coordinate") -> Workload:
    """MAE+ with the positions of an adversary of this kind, and this adversary; "none" has the same arithmetic."""
    config = image_config(setting, "mae_plus_vit_b", size="base", rows=rows, kind=kind)
    config.adversary = make_settings("adversary", adversary or kind)
    return build_workload(config)


MODELS: dict[str, tuple[Model, tuple[int, ...]]] = {
    BERT: (bert, ROWS),
    "MAE ViT-B": (mae, (IMAGES,)),
    "MM-MAE ViT-B": (mm_mae, (IMAGES,)),
    "AdPE ViT-B, relative": (adpe, (IMAGES,)),
}
"""What is trained, and rows of a micro-batch."""


@contextmanager
def captured_training(setting: Setting, work: Workload, way: Way = BF16) -> Iterator[tuple[Trainer, Captured]]:
    """A trainer on plain with bf16 weights that has not captured its micro-batch yet, and its graphs."""
    torch._dynamo.reset()
    release_memory()
    set_way(work, way)
    work.config.training.capture = "on"
    with training(setting, "plain", work) as trainer:
        trainer.control.shapes = lambda: trainer.source.next_window()[:1]
        assert isinstance(trainer.engine, PlainEngine) and trainer.engine.captured_graphs is not None
        yield trainer, trainer.engine.captured_graphs


def set_way(work: Workload, way: Way = BF16) -> Workload:
    """Return the work with these settings of `training`."""
    for name, value in {"compile": "none", **way}.items():
        setattr(work.config.training, name, value)
    return work


def capture(trainer: Trainer, captured: Captured) -> None:
    """Capture the trainer's micro-batch.

    Raises:
        RuntimeError: nothing was captured.
    """
    use_graphs(trainer, captured)
    trainer.rehearse(captured)
    if captured.notices:
        raise RuntimeError(captured.notices[0])


def use_graphs(trainer: Trainer, captured: Captured | None) -> None:
    """Make the next steps with these graphs, or without."""
    assert isinstance(trainer.engine, PlainEngine)
    trainer.engine.captured_graphs = captured


def several_steps(trainer: Trainer, captured: Captured | None) -> Callable[[], None]:
    """Return a function that makes CALLS steps, with these graphs or without; it raises RuntimeError if a step with
    graphs replays none."""

    def call() -> None:
        use_graphs(trainer, captured)
        before = captured.replays if captured else 0
        for _ in range(CALLS):
            trainer.train_step()
        if captured is not None and (captured.uncaptured or captured.replays < before + CALLS):
            raise RuntimeError(f"{captured.uncaptured} micro-batches ran without a graph, {captured.replays} with one")

    return call


def compare(setting: Setting, sides: dict[str, Callable[[], None]], *, warmup: int = 2) -> Figures:
    """Return the times of a step of two sides, and the first over the second."""
    measured = alternate(sides, rounds=setting.rounds, warmup=warmup)
    first, second = sides
    ratio = pair_ratio(measured[first].walls, measured[second].walls)
    figures: Figures = {f"{name}_step_ms": times.wall / CALLS * 1e3 for name, times in measured.items()}
    return {**figures, f"{first}_over_{second}": ratio.median, "interval": [ratio.lower, ratio.upper]}


def step_ms(figures: Figures, name: str) -> float:
    return float(str(figures[f"{name}_step_ms"]))


def off_and_on(setting: Setting, model: Model, rows: int, way: Way) -> Figures:
    """Steps without and with capture, time in kernels over both, and memory reserved before and after capturing."""
    rows = 2 if setting.small else rows
    work = model(setting, rows)
    with captured_training(setting, work, way) as (trainer, captured):
        steps = {"on": several_steps(trainer, captured), "off": several_steps(trainer, None)}
        steps["off"]()
        memory = [reserved_megabytes(setting)]
        capture(trainer, captured)
        memory.append(reserved_megabytes(setting))
        figures: Figures = {"rows": rows, **compare(setting, steps)}
        for name, step in steps.items():
            kernel_ms = kernel_milliseconds(setting, step)
            figures[f"{name}_busy"] = None if kernel_ms is None else kernel_ms / step_ms(figures, name)
    used = use_of_peak(setting, step_ms(figures, "on") / 1e3, on_share_of_peak=flops(work))
    return {**figures, **used, "reserved_mb_off": memory[0], "reserved_mb_on": memory[1]}


def flops(work: Workload) -> float:
    """Return the computed FLOPs of a step."""
    length = work.rows["tokens"].shape[1] if "tokens" in work.rows.fields else 0
    return model_flops(work.config, DataFacts(length=length, vocabulary=VOCABULARY, classes=CLASSES))


def reserved_megabytes(setting: Setting) -> float | None:
    return torch.cuda.memory_reserved(setting.device) / MEGABYTE if setting.on_gpu else None


def kernel_milliseconds(setting: Setting, several: Callable[[], None]) -> float | None:
    """Return the time in kernels of a step; `None` without a GPU."""
    if not setting.on_gpu:
        return None
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        several()
        torch.cuda.synchronize(setting.device)
    kernels = [event for event in profiler.key_averages() if event.device_type.name == "CUDA"]
    times = [event.self_device_time_total for event in kernels if not getattr(event, "is_user_annotation", False)]
    return float(sum(times)) / CALLS / 1e3


def over_whole_graph(setting: Setting, rows: int, way: Way) -> Figures:
    """A step with capture over the replay of one graph of a whole step, with the optimizer and constant task weights:
    what is left between the two is the host's work and the copies between fixed memory."""
    rows = 2 if setting.small else rows
    with captured_training(setting, bert(setting, rows), way) as (trainer, captured):
        capture(trainer, captured)
        replay = whole_graph(setting, trainer)

        def replays() -> None:
            for _ in range(CALLS):
                replay()

        sides = {"on": several_steps(trainer, captured), "whole_graph": replays}
        return {"rows": rows, **compare(setting, sides)}


def whole_graph(setting: Setting, trainer: Trainer) -> Callable[[], None]:
    """Return the replay of a graph of forward pass, losses, backward pass, norm, clipping, AdamW, and rounding of the
    masters."""
    engine, objective = trainer.engine, trainer.objective
    assert isinstance(engine, PlainEngine)
    use_graphs(trainer, None)
    (micro,) = trainer.source.next_window()
    counts, batch = objective.count(micro).to(setting.device), micro.to(setting.device)
    weights = 1.0 / len(counts) / counts.clamp(min=1)  # [T]

    def step() -> Tensor:
        engine.backward((weights * task_losses(objective, engine, batch).sums).sum(), last=True)
        norm = engine.check_gradients()
        engine.step(1e-4, norm.isfinite())
        return norm

    for _ in range(2):
        step()
    for group in engine.optimizer.param_groups:
        group["capturable"] = setting.on_gpu
    replay: Callable[[], None] = RECORDERS[setting.device.type](setting.device).record(step)[1]
    for group in engine.optimizer.param_groups:
        group["capturable"] = False
    return replay


def over_transformers(setting: Setting, rows: int, mode: str | None) -> Figures:
    """A captured, compiled step over one of transformers' model, compiled with autocast, SDPA and fused AdamW.

    Args:
        mode: of torch.compile; "reduce-overhead" has CUDA graphs.
    """
    rows = 2 if setting.small else rows
    way = WHOLE if setting.on_gpu else BF16
    with captured_training(setting, bert(setting, rows), way) as (trainer, captured):
        capture(trainer, captured)
        work = set_way(bert(setting, rows), {"compile": "whole"} if setting.on_gpu else AUTOCAST)
        peer, inputs = bert_peer(work, trainer.engine.full_weights())
        step = peer_step(peer, inputs, work.config, setting.device, mode=mode)
        peer.train(True)

        def peers() -> None:
            for _ in range(CALLS):
                step()

        sides = {"transformers": peers, "on": several_steps(trainer, captured)}
        return {"rows": rows, **compare(setting, sides, warmup=3)}


HOOKS: dict[str, tuple[Model, Model, tuple[int, ...]]] = {
    "minimax": (bert, partial(bert, balancer="uniform"), (64,)),
    "GradNorm": (partial(bert, balancer="gradnorm"), partial(bert, balancer="uniform"), (64,)),
    "GradNorm, MM-MAE": (partial(mm_mae, balancer="gradnorm"), partial(mm_mae, balancer="uniform"), (64,)),
    "AdPE relative": (adpe, partial(adpe, adversary="none"), (64, 256)),
    "AdPE absolute": (
        partial(adpe, kind="absolute_coordinate"),
        partial(adpe, adversary="none", kind="absolute_coordinate"),
        (256,),
    ),
}
"""Workloads with the hook and without, and rows."""


def over_plain(setting: Setting, hook: str, rows: int) -> Figures:
    """A captured step with a hook over a captured step without."""
    works = [model(setting, 2 if setting.small else rows) for model in HOOKS[hook][:2]]
    with captured_training(setting, works[0]) as first, captured_training(setting, works[1]) as second:
        for trainer, captured in (first, second):
            capture(trainer, captured)
        return compare(setting, {"hook": several_steps(*first), "plain": several_steps(*second)})


def checked(setting: Setting, way: Way = BF16, *, balancer: str = "minimax", accumulation: int = 1) -> Workload:
    """A small PoS-BERT with dropout."""
    settings = BALANCING[balancer][0]
    return set_way(checked_text(setting, balancer=settings, accumulation=accumulation, dropout=0.1), way)


def checked_mm_mae(setting: Setting, balancer: str) -> Workload:
    return set_way(checked_modalities(setting, balancer=balancer, accumulation=1))


CASES: dict[str, Callable[[Setting], Workload]] = {
    "minimax": checked,
    "minimax, two micro-batches": partial(checked, accumulation=2),
    "minimax, autocast": partial(checked, way=AUTOCAST),
    "minimax, fp32, two micro-batches": partial(checked, way=FP32, accumulation=2),
    "GradNorm, fp32": partial(checked, way=FP32, balancer="gradnorm"),
    "GradNorm, two micro-batches": partial(checked, balancer="gradnorm", accumulation=2),
    "uncertainty": partial(checked, balancer="uncertainty"),
    "AdPE relative, two micro-batches": lambda setting: set_way(checked_images(setting)),
    "MM-MAE, GradNorm": partial(checked_mm_mae, balancer="gradnorm"),
    "MM-MAE, GradNorm by the representation": partial(checked_mm_mae, balancer="gradnorm, representation"),
    "minimax, compiled whole": partial(checked, way=WHOLE),
}
"""Small models, with bf16 weights if nothing else is said; with dropout in PoS-BERT."""


@contextmanager
def deterministic() -> Iterator[None]:
    """Context of `training.deterministic`; gpu.py sets cuBLAS' workspace."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def steps_are_equal(setting: Setting, case: str) -> Figures:
    """CHECKED_STEPS captured steps against uncaptured ones, bit for bit: losses, weights and moments."""
    states: list[dict[str, Tensor]] = []
    losses: list[list[float]] = []
    with deterministic():
        for enabled in (False, True):
            torch._dynamo.reset()
            work = CASES[case](setting)
            work.config.training.capture = "on" if enabled else "off"
            with training(setting, "plain", work) as trainer:
                assert isinstance(trainer.engine, PlainEngine) and isinstance(trainer.observer, Notes)
                captured = trainer.engine.captured_graphs
                if captured is not None:
                    window = trainer.source.next_window()
                    trainer.control.shapes = partial(list, window[:1])
                    capture(trainer, captured)
                for _ in range(CHECKED_STEPS):
                    trainer.train_step()
                trainer.read_stats()
                losses.append(trainer.observer.losses)
                pieces = [(piece.name, piece.tensors) for piece in trainer.engine.pieces()]
                states.append({f"{name}.{key}": value.cpu() for name, all in pieces for key, value in all.items()})
    assert captured is not None
    unequal = [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
    largest = max((float((states[0][name] - states[1][name]).abs().max()) for name in unequal), default=0.0)
    equal = not unequal and losses[0] == losses[1]
    return {
        "equal": equal,
        "unequal_tensors": len(unequal),
        "largest_difference": largest,
        "first_unequal": unequal[:3],
        "losses": losses[1],
        "replays": captured.replays,
        "uncaptured": captured.uncaptured,
        "as_expected": equal and captured.uncaptured == 0 and captured.replays >= CHECKED_STEPS,
    }


def waits(setting: Setting) -> Figures:
    """Waits of a captured step for the GPU."""
    with captured_training(setting, checked(setting)) as (trainer, captured):
        capture(trainer, captured)
        for _ in range(3):
            trainer.train_step()
        calls = waits_of(trainer.train_step)
    return {"waits": len(calls), "places": calls, "as_expected": len(calls) == EXPECTED_WAITS}


def timings(setting: Setting, way: Way) -> Iterator[Item]:
    """Times of each model at each of its sizes."""
    suffix, extra = (", compiled whole", 45) if way is WHOLE else ("", 0)
    models = [(name, model, rows) for name, (model, sizes) in MODELS.items() for rows in sizes]
    for length, rows in zip(setting.lengths, LARGE_ROWS.values(), strict=True):
        models.append((f"BERT-large, {length} tokens", partial(bert, length=length, size="large"), rows))
    measures = {f"{name}, {rows} rows": partial(off_and_on, setting, model, rows, way) for name, model, rows in models}
    measures[f"{BERT}, 64 rows, over a graph of the whole step"] = partial(over_whole_graph, setting, 64, way)
    for name, measure in measures.items():
        yield Item(
            name=f"{name}{suffix}",
            measure=measure,
            seconds=(25 + 1.5 * extra) if "large" in name else 12 + extra,
            lacking=setting.cannot_capture or (setting.no_gpu if way is WHOLE else ""),
            timed=True,
        )


def captured_steps(setting: Setting) -> Iterator[Item]:
    """Equal steps, then times; what takes long to compile comes last."""
    lacking = setting.cannot_capture
    for case in CASES:
        seconds = 40 if "compiled" in case else 5
        missing = lacking or (setting.no_gpu if "compiled" in case else "")
        measure = partial(steps_are_equal, setting, case)
        yield Item(name=f"equal, {case}", measure=measure, seconds=seconds, lacking=missing)
    yield Item(name="waits", measure=partial(waits, setting), seconds=5, lacking=setting.no_gpu)
    yield from timings(setting, BF16)
    for hook, rows in [(hook, rows) for hook, (_, _, sizes) in HOOKS.items() for rows in sizes]:
        measure = partial(over_plain, setting, hook, rows)
        yield Item(name=f"{hook} over plain, {rows} rows", measure=measure, seconds=15, lacking=lacking, timed=True)
    for mode in (None, "reduce-overhead"):
        name = f"{BERT}, 64 rows, beside transformers compiled{' with ' + mode if mode else ''}"
        measure = partial(over_transformers, setting, 64, mode)
        yield Item(name=name, measure=measure, seconds=90, lacking=lacking, timed=True)
    yield from timings(setting, WHOLE)
