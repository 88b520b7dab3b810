"""Unsuitable models and settings are refused before any work, with advice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DPTModel

from tests.unit.sharding.pseudo_labels.conftest import Models, config_of, files, label, nine_images
from tests.unit.sharding.pseudo_labels.tiny_models import depth_anything, dpt_depth, dpt_segmentation, segformer
from trp_scale.data.index import read_json
from trp_scale.errors import DataError
from trp_scale.sharding.pseudo_labels.label import PseudoLabelConfig, pseudo_label
from trp_scale.sharding.pseudo_labels.models import Labeller, find_model, load_model

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nine_images(tmp_path_factory.mktemp("refused") / "data")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": {"model": ""}, "semseg": {"model": ""}}, "--depth.model, --semseg.model"),
        ({"batch": 0}, "--batch is 0"),
        ({"shard_index": 2, "num_shards": 2}, "--shard_index 2"),
        ({"depth": {"directory": "shards"}}, "--depth.directory 'shards'"),
        ({"semseg": {"directory": "../labels"}}, "--semseg.directory '../labels'"),
        ({"depth": {"directory": "maps"}, "semseg": {"directory": "maps"}}, "--depth.directory"),
        ({"depth": {"directory": "semseg"}}, "--semseg.directory semseg"),
        ({"depth": {"scale": 0.0}}, "--depth.scale is 0.0"),
        ({"depth": {"scale": 0.001, "model": ""}}, "--depth.scale 0.001"),
        ({"depth": {"scale": 0.001, "larger_is": "nearer"}}, "--depth.larger_is nearer"),
        ({"depth": {"scale": 0.001}}, "--depth.scale"),
        ({"device": "cuda"}, "--device cuda"),
        ({"depth": {"model": "/no/such/model"}}, "--depth.model /no/such/model"),
        ({"semseg": {"model": "nobody/has-this"}}, "--semseg.model nobody/has-this"),
    ],
)
def test_settings_that_cannot_work(data: Path, models: Models, changes: dict[str, object], message: str) -> None:
    config = config_of(data, models, **changes)
    with pytest.raises(DataError, match=message):
        pseudo_label(config)
    assert sorted(path.name for path in data.iterdir()) == ["dataset.json", "shards"]


def without(name: str) -> Callable[[Path], None]:
    """Remove a file from the directory of a model."""
    return lambda model: (model / name).unlink()


def changed(file: str, **fields: object) -> Callable[[Path], None]:
    """Change fields of a JSON file in the directory of a model."""

    def change(model: Path) -> None:
        path = model / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def only_pickled(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("config.json"), "model"),
        (changed("config.json", model_type="made_up"), "made_up"),
        (only_pickled, "model.safetensors"),
        (without("preprocessor_config.json"), "preprocessor_config.json"),
        (changed("preprocessor_config.json", do_center_crop=True), "do_center_crop"),
        (changed("config.json", architectures=["Mask2FormerModel"]), "Mask2FormerModel"),
        (changed("config.json", id2label={"0": "a", "2": "b"}), "0 to 1"),
    ],
)
def test_directories_that_hold_no_model(
    tmp_path: Path, models: Models, damage: Callable[[Path], None], message: str
) -> None:
    model = shutil.copytree(models.semseg, tmp_path / "model")
    damage(model)
    with pytest.raises(DataError, match=message):
        find_model("semseg", str(model))


def test_a_hub_name_is_found_in_the_cache(tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--depth"
    shutil.copytree(models.depth, repository / "snapshots" / "0123abcd")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    found = find_model("depth", "somebody/depth")
    assert found.fingerprint == find_model("depth", str(models.depth)).fingerprint
    assert found.name == "somebody/depth" and found.directory.name == "0123abcd"


def test_models_of_the_other_task(tmp_path: Path, models: Models) -> None:
    with pytest.raises(DataError, match="Mask2Former"):
        find_model("depth", str(models.semseg))
    with pytest.raises(DataError, match="DepthAnything"):
        find_model("semseg", str(models.depth))
    both = dpt_segmentation(tmp_path / "dpt")  # a kind that is in both lists
    assert find_model("semseg", str(both)).details == ("floor", "wall")
    with pytest.raises(DataError, match="DPTForSemanticSegmentation"):
        find_model("depth", str(both))


def test_more_classes_than_8_bits_hold(tmp_path: Path) -> None:
    assert len(find_model("semseg", str(segformer(tmp_path / "most", classes=255))).details) == 255
    with pytest.raises(DataError, match="256 classes"):
        find_model("semseg", str(segformer(tmp_path / "many", classes=256)))


def test_a_model_without_all_its_weights(tmp_path: Path, models: Models) -> None:
    """A backbone with the configuration of the full model: transformers would initialise the head randomly."""
    model = dpt_segmentation(tmp_path / "dpt")
    config = json.loads((model / "config.json").read_text())
    DPTModel.from_pretrained(model).save_pretrained(model)
    (model / "config.json").write_text(json.dumps(config))
    data = nine_images(tmp_path / "data")
    with pytest.raises(DataError, match=r"--semseg\.model"):
        label(data, models, semseg={"model": str(model)}, depth={"model": ""})
    assert "modalities" not in read_json(data / "dataset.json")
    assert not list((data / "semseg").glob("image-*.tar"))


def forget_weights(model: Path, beginning: str) -> int:
    """Remove weights by prefix from the safetensors of a model; return their number."""
    path = model / "model.safetensors"
    weights = load_file(path)
    kept = {name: weight for name, weight in weights.items() if not name.startswith(beginning)}
    save_file(kept, path, metadata={"format": "pt"})
    return len(weights) - len(kept)


def test_a_dpt_without_the_weights_that_it_never_uses(tmp_path: Path, models: Models) -> None:
    """As Intel/dpt-large: the first fusion layer has no second input and no weights for it."""
    model = dpt_depth(tmp_path / "dpt")
    whole, without = (nine_images(tmp_path / name) for name in ("whole", "without"))
    assert label(whole, models._replace(depth=model), semseg={"model": ""})
    assert forget_weights(model, "neck.fusion_stage.layers.0.residual_layer1.") == 4
    assert label(without, models._replace(depth=model), semseg={"model": ""})
    labels = [files(each / "depth") for each in (whole, without)]
    assert labels[0] == labels[1] and len(labels[0]) == 7
    found = find_model("depth", str(model))
    for needed in ("neck.fusion_stage.layers.0.residual_layer2.", "neck.fusion_stage.layers.1.residual_layer1."):
        assert forget_weights(model, needed) == 4
        with pytest.raises(DataError, match=r"neck\.fusion_stage\.layers\.[01]"):
            load_model(found, torch.device("cpu"))


def test_metres_of_a_model_that_does_not_speak_of_metres(
    tmp_path: Path, models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    """DPT may predict inverse depth (MiDaS) or metres; the configuration does not tell."""
    unknown, metric = dpt_depth(tmp_path / "dpt"), depth_anything(tmp_path / "m", depth_estimation_type="metric")
    silent: dict[str, object] = {"depth": {"scale": 0.001, "larger_is": "farther"}}
    for number, (model, settings, warned) in enumerate(
        (
            (unknown, {"depth": {"scale": 0.001}}, True),
            (unknown, silent, False),
            (metric, {"depth": {"scale": 0.001}}, False),
        )
    ):
        caplog.clear()
        data = nine_images(tmp_path / f"data{number}")
        assert label(data, models._replace(depth=model), semseg={"model": ""}, **settings)
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert (
            any(f"--depth.model {model} does not state" in each and "--depth.larger_is" in each for each in said)
            == warned
        )


def test_weights_that_are_no_safetensors_are_not_opened(tmp_path: Path, models: Models) -> None:
    model = shutil.copytree(models.depth, tmp_path / "model")
    found = find_model("depth", str(model))
    torch.save(load_model(found, torch.device("cpu")).state_dict(), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(DataError, match="safetensors"):
        load_model(found, torch.device("cpu"))


def test_a_processor_that_pads(tmp_path: Path, models: Models) -> None:
    model = shutil.copytree(models.semseg, tmp_path / "model")
    changed("preprocessor_config.json", pad_size={"height": 128, "width": 128})(model)
    with pytest.raises(DataError, match=r"--semseg\.model"):
        labeller(model, "semseg")


def test_a_model_that_needs_more_than_an_image(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import DepthAnythingForDepthEstimation

    def needs_text(self: object, pixel_values: object, input_ids: object) -> None: ...

    monkeypatch.setattr(DepthAnythingForDepthEstimation, "forward", needs_text)
    with pytest.raises(DataError, match="input_ids"):
        labeller(models.depth, "depth")


def labeller(model: Path, modality: str) -> Labeller:
    found = find_model(modality, str(model))
    settings = PseudoLabelConfig.with_modality_sections()(data=model).section(modality)
    return Labeller(found, settings, device=torch.device("cpu"), precision="fp32")
