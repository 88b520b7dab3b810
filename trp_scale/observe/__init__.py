"""What a run says about itself: metrics.jsonl, throughput, live display, W&B and TensorBoard, the final report.

Nothing here calls a collective: rank 0 is handed numbers that are already those of the whole run.
"""

from __future__ import annotations

from trp_scale.observe.observer import Observer
from trp_scale.observe.records import RunInfo, StepRecord, TaskRecord
from trp_scale.observe.report import report

__all__ = ["Observer", "RunInfo", "StepRecord", "TaskRecord", "report"]
