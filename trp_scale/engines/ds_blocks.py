"""Compares the `optimizer` and `scheduler` blocks of a DeepSpeed configuration with the recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trp_scale.config import Config

AUTO = "auto"


def same(found: object, stated: object) -> bool:
    """Equality of a JSON value and a recipe's value; numbers up to their decimal notation."""
    if isinstance(found, bool) or isinstance(stated, bool):
        return found is stated
    if isinstance(found, (int, float)) and isinstance(stated, (int, float)):
        return math.isclose(found, stated, rel_tol=1e-9)
    return found == stated


def optimizer_differences(block: object, config: Config, path: str = "optimizer") -> Iterator[str]:
    """A sentence for each value of the block that is not the recipe's; "auto" and what is left out agree with it."""
    if not isinstance(block, Mapping):
        yield f"{path} is {block!r}; allowed: a block with type and params"
        return
    yield from _unknown(block, ("type", "params", "legacy_fusion"), path)
    settings = config.optimizer
    names = {"adamw": ("adamw", "adam"), "sgd": ("sgd",)}[settings.kind]
    kind = block.get("type", AUTO)
    if kind != AUTO and str(kind).lower() not in names:
        yield f"{path}.type is {kind!r}, the recipe says {settings.kind} (--optimizer.kind)"
    params = block.get("params", {})
    if not isinstance(params, Mapping):
        yield f"{path}.params is {params!r}; allowed: a block"
        return
    stated: dict[str, tuple[object, str]] = {
        "lr": (settings.lr, "--optimizer.lr"),
        "weight_decay": (settings.weight_decay, "--optimizer.weight_decay"),
        "max_grad_norm": (settings.clipping, "--optimizer.clipping"),
    }
    if settings.kind == "adamw":
        stated["eps"] = (settings.eps, "--optimizer.eps")
        stated["bias_correction"] = (True, "fixed: AdamW corrects its bias")
        stated["amsgrad"] = (False, "fixed: plain AdamW")
        stated["adam_w_mode"] = (True, "fixed: decoupled decay")
        yield from _betas(params.get("betas", AUTO), config, f"{path}.params.betas")
    else:
        stated["momentum"] = (0.0, "fixed: plain gradient descent")
    implementation = ("torch_adam", "fused", "foreach", "betas")  # how, not what, is computed; betas are above
    yield from _unknown(params, (*stated, *implementation), f"{path}.params")
    yield from _differing(params, stated, f"{path}.params")


def scheduler_differences(block: object, config: Config, path: str = "scheduler") -> Iterator[str]:
    """The same for the learning-rate schedule."""
    if not isinstance(block, Mapping):
        yield f"{path} is {block!r}; allowed: a block with type and params"
        return
    yield from _unknown(block, ("type", "params"), path)
    settings, steps = config.optimizer, config.training.steps
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    kind = block.get("type", AUTO)
    if kind != AUTO and kinds.get(str(kind)) != settings.schedule:
        meant = f" = {kinds[str(kind)]}" if str(kind) in kinds else ""
        yield f"{path}.type is {kind!r}{meant}, the recipe says {settings.schedule} (--optimizer.schedule)"
        return
    params = block.get("params", {})
    if not isinstance(params, Mapping):
        yield f"{path}.params is {params!r}; allowed: a block"
        return
    stated: dict[str, tuple[object, str]] = {
        "warmup_num_steps": (settings.warmup_steps, "--optimizer.warmup_steps"),
        "warmup_max_lr": (settings.lr, "--optimizer.lr"),
        "warmup_min_lr": (0.0, "fixed: warm-up starts at 0"),
        "warmup_min_ratio": (0.0, "fixed: warm-up starts at 0"),
        "warmup_type": ("linear", "fixed: linear warm-up"),
        "total_num_steps": (steps, "--training.steps"),
        "cos_min_ratio": (settings.min_lr / settings.lr if settings.lr else 0.0, "--optimizer.min_lr / --optimizer.lr"),
    }
    yield from _unknown(params, (*stated, "last_batch_iteration"), f"{path}.params")
    yield from _differing(params, stated, f"{path}.params")


def _betas(betas: object, config: Config, path: str) -> Iterator[str]:
    stated = [config.optimizer.beta1, config.optimizer.beta2]
    if betas == AUTO:
        return
    if (
        not isinstance(betas, list)
        or len(betas) != 2
        or not all(b == AUTO or same(b, s) for b, s in zip(betas, stated, strict=True))
    ):
        yield f"{path} is {betas!r}, the recipe says {stated} (--optimizer.beta1, --optimizer.beta2)"


def _differing(block: Mapping[str, Any], stated: Mapping[str, tuple[object, str]], path: str) -> Iterator[str]:
    for name, (value, flag) in stated.items():
        found = block.get(name, AUTO)
        if found != AUTO and not same(found, value):
            yield f"{path}.{name} is {found!r}, the recipe says {value!r} ({flag})"


def _unknown(block: Mapping[str, Any], known: tuple[str, ...], path: str) -> Iterator[str]:
    for name in block:
        if name not in known:
            yield f"{path}.{name} is not known; allowed: {', '.join(known)}"
