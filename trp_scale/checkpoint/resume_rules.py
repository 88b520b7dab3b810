"""Which settings may differ between a checkpoint and the run that goes on from it.

Engine, launcher and number of ranks are not settings: they may always differ. A setting may differ if the sequence of
global batches, the model and the method stay as they were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trp_scale.config import RefusedError
from trp_scale.recipes.loader import flat, from_dict, to_dict

MAY_CHANGE = (
    "modules",
    "batch.micro_size",
    "training.steps",
    "training.max_hours",
    "training.max_skipped_steps",
    "training.compile",
    "training.deterministic",
    "data.workers",
    "data.prefetch",
    "data.verify",
    "data.max_corrupt_blocks",
    "adversary.check_every",
    "validation.*",
    "checkpoint.*",
    "logging.*",
)
"""Settings that may change; `section.*` is every field of the section. data.path may where the data are the same."""


def may_change(field: str) -> bool:
    """Whether `section.field` may differ on resume, whatever the data."""
    return field in MAY_CHANGE or f"{field.partition('.')[0]}.*" in MAY_CHANGE


def check_settings(
    stored: Mapping[str, Any],
    present: Mapping[str, Any],
    *,
    stored_digest: str | None = None,
    present_digest: str | None = None,
) -> list[str]:
    """Compare the settings of a checkpoint with those of the run that wants to go on from it.

    A setting that the checkpoint does not know is newer than it, and had its default then.

    Args:
        stored: nested settings in the checkpoint.
        present: nested settings of this run, as recipes.loader.to_dict gives them.
        stored_digest, present_digest: digest of the data set's content then and now; None = not known.
    Returns:
        a sentence for each difference that is allowed.
    Raises:
        RefusedError: listing every difference that is not.
    """
    now = _flat(present)
    default = from_dict({"upstream": present["upstream"]} if "upstream" in present else {"downstream": {}})
    before = {**{name: value for name, value in _flat(to_dict(default)).items() if name in now}, **_flat(stored)}
    same_data = stored_digest is not None and stored_digest == present_digest
    allowed: list[str] = []
    refused: list[str] = []
    for field in sorted(before.keys() | now.keys()):
        then, today = before.get(field, "absent"), now.get(field, "absent")
        if then == today:
            continue
        difference = f"{field}: checkpoint {_shown(then)}, now {_shown(today)}"
        if may_change(field) or (field == "data.path" and same_data):
            allowed.append(difference + _consequence(field, now))
        else:
            refused.append(difference)
    if stored_digest != present_digest:
        refused.append(f"content of the data set: checkpoint {_shown(stored_digest)}, now {_shown(present_digest)}")
    if refused:
        listed = "\n  ".join(refused)
        raise RefusedError(
            f"the checkpoint was made with other settings:\n  {listed}\n"
            f"On resume these may change: engine, number of ranks, {', '.join(MAY_CHANGE)}, and data.path to the same "
            "data elsewhere. Set the listed ones back, or start a new run with another --run_dir."
        )
    return allowed


def _consequence(field: str, now: Mapping[str, Any]) -> str:
    schedule = now.get("optimizer.schedule")
    if field == "training.steps" and schedule != "constant":
        return f" (the {schedule} schedule of the learning rate now ends there)"
    return ""


def _flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    """{"section.field": value}, values as they come back from JSON."""
    return flat(json.loads(json.dumps(nested)))


def _shown(value: Any) -> str:
    return "unknown" if value is None else str(value)
