"""Readers of what runs leave behind: checkpoints, settings, metrics, results, records; and of recipes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, ViTMAEConfig, ViTMAEForPreTraining

from tests.faults.readers import Case, Reader, Target, tensor_file
from tests.unit.checkpoint.fake_engine import FakeEngine, random_split, renew_digest, save_step, whole_state
from trp_scale.checkpoint.document import CHUNK, DOCUMENT_NAME, HOOKS_NAME, read_document
from trp_scale.checkpoint.manager import load
from trp_scale.checkpoint.run_directory import (
    ENVIRONMENT_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    check_settings,
    cut_metrics,
    incompleteness,
    select,
)
from trp_scale.config.finetuning import ImageTaskConfig
from trp_scale.config.loader import dump, load_recipe, summary, to_dict
from trp_scale.config.registry import find
from trp_scale.config.run_flags import require_modules
from trp_scale.distributed.groups import ALONE
from trp_scale.engines import ds_config
from trp_scale.errors import RefusedError
from trp_scale.evaluation.probe.classifiers import _read as read_features
from trp_scale.finetuning.encoders import open_encoder
from trp_scale.pretraining.mae.weights import stored_positions
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.reporting.comparison import compare_results
from trp_scale.reporting.document import page_text
from trp_scale.reporting.record import read_run
from trp_scale.reporting.results import (
    RESULT_FILE,
    RESULTS_FILE,
    Results,
    SeedResult,
    join,
    read_results,
    read_seed,
    write_results,
)
from trp_scale.reporting.run import run_page
from trp_scale.training.report import report
from trp_scale.training.rundir import _earlier

SHAPES: Mapping[str, tuple[int, ...]] = {"matrix": (7, 5), "bias": (13,), "scalar": ()}


CONFIG = to_dict(PosBertConfig()) | {"batch": {"global_size": 8, "micro_size": 8}}
"""Settings of the checkpoints here, which have taken 8 rows a step."""


def checkpoint(run_dir: Path) -> Path:
    """One checkpoint of a few numbers, with settings of a run."""
    engine = FakeEngine(0, random_split(0, 1, SHAPES), whole_state(0, SHAPES))
    return save_step(run_dir, 40, engine=engine, config=CONFIG, extra={"vocab_size": 30, "data_digest": "x"})


def _load(path: Path) -> None:
    engine = FakeEngine(0, random_split(1, 1, SHAPES), {"weight": whole_state(99, SHAPES)["weight"]})
    load(path, engine=engine, group=ALONE)


def ck_document(directory: Path) -> Case:
    path = checkpoint(directory / "run")

    def read() -> None:
        renew_digest(path / DOCUMENT_NAME)  # so that what reads it sees the damage
        incompleteness(path)
        _load(path)

    return Case(targets=[Target(path=path / DOCUMENT_NAME, kind="json")], read=read)


def _mend_checksums(path: Path) -> None:
    """checkpoint.json says the size and the checksums of the files that are there."""
    document = json.loads((path / DOCUMENT_NAME).read_text())
    for entry in document["files"]:
        content = (path / entry["name"]).read_bytes()
        entry["size"] = len(content)
        entry["crc32"] = [zlib.crc32(content[start : start + CHUNK]) for start in range(0, len(content), CHUNK)]
    (path / DOCUMENT_NAME).write_text(json.dumps(document))
    renew_digest(path / DOCUMENT_NAME)


def ck_safetensors(directory: Path) -> Case:
    """The tensors, with the checksums that fit them, so that what reads them sees the damage."""
    path = checkpoint(directory / "run")

    def read() -> None:
        _mend_checksums(path)
        _load(path)

    return Case(targets=tensor_file(path / "rank-00000.safetensors") + tensor_file(path / HOOKS_NAME), read=read)


def resume_select(directory: Path) -> Case:
    run = directory / "run"
    path = checkpoint(run)

    def read() -> None:
        renew_digest(path / DOCUMENT_NAME)  # so that what reads it sees the damage
        found = select(run, "auto", ALONE).path
        if found is not None:
            document = read_document(found)
            check_settings(
                document.config,
                CONFIG,
                stored_digest=document.extra.get("data_digest"),
                present_digest="x",
            )
            open_encoder(str(run))

    return Case(targets=[Target(path=path / DOCUMENT_NAME, kind="json")], read=read)


def metrics(run: Path) -> Path:
    """metrics.jsonl of a run."""
    run.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(1, 6):
        tasks = {name: {"loss": 1.0 / step, "weight": 0.5, "count": 8} for name in ("a", "b")}
        line: dict[str, Any] = {
            "step": step,
            "loss": 1.0,
            "lr": 1e-3,
            "grad_norm": 1.0,
            "tasks": tasks,
            "applied": True,
            "step_seconds": 0.1,
            "data_wait_seconds": 0.01,
            "tokens_per_second": 100.0,
            "model_flops_utilisation": None,
            "peak_memory_bytes": 1000,
            "outside_tasks": ["b"],
            "cache": {"found": 1, "fetched": 1, "ahead": 1, "fetched_bytes": 10, "ahead_bytes": 10},
        }
        if step == 5:
            line["validation"] = {"loss": 1.0, "tasks": {"a": {"loss": 1.0}}}
        lines.append(json.dumps(line) + "\n")
    (run / METRICS_FILE).write_text("".join(lines))
    return run / METRICS_FILE


def cut(directory: Path) -> Case:
    path = metrics(directory / "run")
    return Case(targets=[Target(path=path, kind="jsonl")], read=lambda: cut_metrics(path, 3))


def reported(directory: Path) -> Case:
    run = directory / "run"
    path = metrics(run)
    summary_ = {
        "exit_reason": "finished",
        "description": "plain, 1 rank",
        "rows": {"train": 100},
        "loader_workers": 1,
        "loader_workers_asked": 2,
        "start_seconds": 3.0,
        "start_compile_seconds": 1.0,
        "graphs": {"made": 1, "found": 1, "seconds": 2.0, "surplus": 1},
    }
    (run / SUMMARY_FILE).write_text(json.dumps(summary_))
    (run / "config.yaml").write_text(dump(PosBertConfig()))

    def read() -> None:
        report(run)
        require_modules(str(run), [])

    targets = [Target(path=path, kind="jsonl"), Target(path=run / SUMMARY_FILE, kind="json")]
    return Case(targets=[*targets, Target(path=run / "config.yaml", kind="yaml")], read=read)


def drawn(directory: Path) -> Case:
    """The page of a run, with all that it reads beside the report's files."""
    run = directory / "run"
    path = metrics(run)
    (run / "config.yaml").write_text(dump(PosBertConfig()))
    documents = {
        "environment.json": {"command": ["x", "trp-scale", "pretrain", "--recipe", "pos_bert_tiny"], "directory": "/"},
        "stop.json": {"why": "SIGTERM", "status": 0, "step": 5, "again": True, "advice": "start it again"},
        "lease.json": {"token": "a", "process": 1, "host": "b", "boot": "c", "began": "d"},
    }
    for name, document in documents.items():
        (run / name).write_text(json.dumps(document))
    (run / "incidents.jsonl").write_text(json.dumps({"at": "now", "step": 1, "kind": "spike", "loss": 3.0}) + "\n")

    def read() -> None:
        page_text(run_page(read_run(run)), served="without plotly's script")

    lines = [Target(path=path, kind="jsonl"), Target(path=run / "incidents.jsonl", kind="jsonl")]
    targets = [*lines, *(Target(path=run / name, kind="json") for name in documents)]
    return Case(targets=[*targets, Target(path=run / "config.yaml", kind="yaml")], read=read)


def results(directory: Path) -> Case:
    seeds = [
        SeedResult(
            task="cola",
            metric="mcc",
            split="dev",
            lower_is_better=False,
            seed=seed,
            metrics={"mcc": 0.5, "accuracy": 0.7},
            detail={"x": [1, 2]},
            settings={"model": {"layers": 1}},
            data="x",
        )
        for seed in range(2)
    ]
    for name in ("a", "b"):
        (directory / name).mkdir()
        write_results(directory / name / RESULTS_FILE, Results(recipe="r", encoder="e", tasks=[join(seeds)]))
    write_results(directory / RESULT_FILE, seeds[0])

    def read() -> None:
        compare_results({name: read_results(directory / name) for name in ("a", "b")})
        seed = read_seed(directory / RESULT_FILE)
        assert seed is not None
        join([seed, seeds[1]])

    targets = [Target(path=directory / "a" / RESULTS_FILE, kind="json")]
    return Case(targets=[*targets, Target(path=directory / RESULT_FILE, kind="json")], read=read)


def deepspeed_file(directory: Path) -> Case:
    path = directory / "zero3.json"
    document = {
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "sub_group_size": 1e9,
        },
        "bf16": {"enabled": "auto"},
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "eps": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "gradient_clipping": "auto",
        "steps_per_print": 100,
    }
    path.write_text(json.dumps(document))
    config = PosBertConfig()
    config.batch.global_size = config.batch.micro_size = 32

    def read() -> None:
        found = ds_config.read(path)
        ds_config.notices(found, config, path=str(path))
        ds_config.resolve(found, config, world=2, accumulation=1, path=str(path))

    return Case(targets=[Target(path=path, kind="json")], read=read)


def recipe(directory: Path) -> Case:
    path, base = directory / "recipe.yaml", directory / "base.yaml"
    base.write_text(dump(PosBertConfig()))
    path.write_text(
        "# A recipe. It is small.\nextends: base.yaml\nmodel:\n  layers: 2\n  hidden_size: 64\n"
        "optimizer:\n  lr: 2e-4\nbalancer:\n  kind: minimax\ntraining:\n  steps: 10\nhooks: []\n"
    )

    def read() -> None:
        load_recipe(path)
        summary(str(path))

    return Case(targets=2 * [Target(path=path, kind="yaml")] + [Target(path=base, kind="yaml")], read=read)


def environment(directory: Path) -> Case:
    path = directory / ENVIRONMENT_FILE
    path.write_text(json.dumps({"started": "x", "command": ["a"], "earlier": [{"started": "y"}]}))
    return Case(targets=[Target(path=path, kind="json")], read=lambda: _earlier(path))


def features(directory: Path) -> Case:
    path = directory / "features.safetensors"
    save_file({"features": torch.zeros(3, 4), "labels": torch.zeros(3, dtype=torch.int64)}, path)

    def read() -> None:
        found = read_features(path)
        if found is not None:
            found.take(np.zeros(len(found.features), dtype=np.bool_))

    return Case(targets=tensor_file(path), read=read)


def of_encoder(write: Callable[[Path], None], task: str) -> Callable[[Path], Case]:
    """A directory of transformers or timm, its settings and its weights."""

    def make(directory: Path) -> Case:
        place = directory / "encoder"
        write(place)

        def read() -> None:
            source = open_encoder(str(place))
            settings: Any = find("task", task).settings()
            source.adopt(settings)
            source.read()
            if isinstance(settings, ImageTaskConfig):
                settings.crops.size = 2 * settings.vision.patch_size
                source.image_weights(settings)

        targets = 2 * [Target(path=place / "config.json", kind="json")]
        return Case(targets=targets + tensor_file(place / "model.safetensors"), read=read)

    return make


def _bert(place: Path) -> None:
    config = BertConfig(
        num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=10,
        max_position_embeddings=8,
    )  # fmt: skip
    BertModel(config).save_pretrained(place)


def _vitmae(place: Path) -> None:
    config = ViTMAEConfig(
        num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4,
        decoder_num_hidden_layers=1, decoder_hidden_size=8, decoder_num_attention_heads=2,
    )  # fmt: skip
    model = ViTMAEForPreTraining(config)
    model.vit.embeddings.position_embeddings.data.copy_(stored_positions(2, 8, "column_row"))
    model.save_pretrained(place)


def _timm(place: Path) -> None:
    import timm

    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=0, **sizes)
    place.mkdir(parents=True)
    save_file(model.state_dict(), place / "model.safetensors")
    described = {"architecture": "vit_tiny_patch16_224", "model_args": sizes, "global_pool": "token", "num_features": 8}
    described["pretrained_cfg"] = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    (place / "config.json").write_text(json.dumps(described))


RUN = (RefusedError,)

READERS = [
    Reader(name="ck_document", make=ck_document, documented=RUN),
    Reader(name="ck_safetensors", make=ck_safetensors, documented=RUN, share=0.7),
    Reader(name="resume_select", make=resume_select, documented=RUN, share=0.7),
    Reader(name="cut_metrics", make=cut, documented=RUN),
    Reader(name="report", make=reported, documented=RUN, share=0.7),
    Reader(name="page", make=drawn, documented=RUN, share=0.7),
    Reader(name="results", make=results, documented=RUN),
    Reader(name="ds_config", make=deepspeed_file, documented=RUN),
    Reader(name="recipe_yaml", make=recipe, documented=RUN),
    Reader(name="environment_json", make=environment, documented=RUN, share=0.5),
    Reader(name="features", make=features, documented=RUN, share=0.5),
    Reader(name="bert_directory", make=of_encoder(_bert, "glue"), documented=RUN, share=0.5),
    Reader(name="vitmae_directory", make=of_encoder(_vitmae, "classification"), documented=RUN, share=0.5),
    Reader(name="timm_directory", make=of_encoder(_timm, "classification"), documented=RUN, share=0.3),
]
