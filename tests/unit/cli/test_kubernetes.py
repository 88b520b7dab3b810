"""launch/kubernetes/pretrain.yaml: what Kubernetes would refuse, and what it would accept and never start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from trp_scale.config.run_flags import parse

MANIFEST = Path(__file__).parents[3] / "launch" / "kubernetes" / "pretrain.yaml"
VERSION = "1.31"


@pytest.fixture
def documents() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}


def test_it_follows_the_schema(documents: dict[str, Any]) -> None:
    assert set(documents) == {"Service", "Job"}
    for document in documents.values():
        kubernetes_validate.validate(document, VERSION, strict=True)
    documents["Job"]["spec"]["completion"] = 2
    with pytest.raises(kubernetes_validate.ValidationError, match="completion"):
        kubernetes_validate.validate(documents["Job"], VERSION, strict=True)


def test_every_pod_finds_the_first(documents: dict[str, Any]) -> None:
    service, job = documents["Service"], documents["Job"]
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(variables["NNODES"])
    assert "NODE_RANK" in variables
    assert variables["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}, "Kubernetes gives each pod of a Job this label"


def test_the_container_mounts_what_it_names(documents: dict[str, Any]) -> None:
    pod = documents["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert set(mounted.values()) == {each["name"] for each in pod["volumes"]}
    run = parse([word for flag in container["args"] for word in flag.split("=", 1)])
    for path in (run.config.data.path, run.run_dir):
        assert any(str(path).startswith(f"{mount}/") for mount in mounted), path
    assert (MANIFEST.parents[2] / container["command"][0]).is_file()
