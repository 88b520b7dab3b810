"""Invalid settings of MM-MAE are refused with the flag to change; unused ones give a caution."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extending import forgetting
from tests.settings import changed
from trp_scale.config import RefusedError
from trp_scale.config.loader import cautions, check, from_dict, load_recipe, to_dict
from trp_scale.config.run_flags import parse


def settings(recipe: str = "mm_mae_vit_b_in1k_400", **changes: dict[str, Any]) -> dict[str, Any]:
    document = to_dict(load_recipe(recipe))
    document["data"]["path"] = "data"
    return to_dict(changed(from_dict(document), **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modalities": {"inputs": []}}, "--modalities.inputs is empty"),
        ({"modalities": {"outputs": []}}, "--modalities.outputs is empty"),
        ({"modalities": {"inputs": ["rgb", "depth", "rgb"]}}, "--modalities.inputs has rgb more than once"),
        ({"modalities": {"outputs": ["semseg", "semseg"]}}, "--modalities.outputs has semseg more than once"),
        ({"modalities": {"visible_tokens": 0}}, "--modalities.visible_tokens is 0, allowed: 1 to 587"),
        ({"modalities": {"visible_tokens": 588}}, "--modalities.visible_tokens is 588, allowed: 1 to 587"),
        ({"modalities": {"inputs": ["depth"], "outputs": ["depth"], "visible_tokens": 196}}, "allowed: 1 to 195"),
        ({"semseg": {"stride": 3}}, "--semseg.stride is 3"),
        ({"semseg": {"stride": 0}}, "allowed: 1, 2, 4, 8, 16"),
        ({"semseg": {"stride": 32}}, "--semseg.stride is 32"),
        ({"modalities": {"concentration": 0.0}}, "--modalities.concentration is 0.0"),
        ({"semseg": {"class_embedding": 0}}, "--semseg.class_embedding is 0"),
        ({"crops": {"size": 100}}, "for example 96"),
        ({"vision": {"decoder_heads": 7}}, "--vision.decoder_heads"),
        ({"vision": {"patch_size": 0}}, "--vision.patch_size is 0"),
        ({"adversary": {"kind": "absolute_embedding"}}, "the encoder of --upstream mm_mae"),
        ({"adversary": {"kind": "relative_coordinate"}}, "--adversary.kind pixels or none"),
        (
            {
                "adversary": {"kind": "pixels"},
                "modalities": {"inputs": ["depth"]},
            },
            "--modalities.inputs has no rgb",
        ),
    ],
)
def test_refused_with_the_flag(changes: dict[str, Any], words: str) -> None:
    check(from_dict(settings()))
    with pytest.raises(RefusedError) as caught:
        check(from_dict(settings(**changes)))
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2, "one problem, one message"


@pytest.mark.parametrize(
    ("recipe", "changes", "flag"),
    [
        ("mm_mae_vit_b_in1k_400", {"modalities": {"inputs": ["rgb"], "concentration": 2.0}}, "concentration 2.0"),
        (
            "mm_mae_vit_b_in1k_400",
            {"modalities": {"inputs": ["rgb", "depth"]}, "semseg": {"class_embedding": 32}},
            "--semseg.class_embedding 32",
        ),
    ],
)
def test_unused_setting_gives_a_caution(recipe: str, changes: dict[str, Any], flag: str) -> None:
    assert cautions(from_dict(settings(recipe))) == []
    (caution,) = cautions(from_dict(settings(recipe, **changes)))
    assert flag in caution and "has no effect" in caution


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modalities": {"inputs": ["rgb", "dept"]}}, "--modalities.inputs has 'dept': no such modality; did you mean"),
        ({"modalities": {"inputs": ["raw_rgb"]}}, "--modalities.inputs has 'raw_rgb': no such modality"),
        ({"modalities": {"outputs": ["semsegs"]}}, "has 'semsegs': no modality has this task; did you mean semseg?"),
        ({"modalities": {"outputs": ["edges"]}}, "--module FILE.py"),
        ({"semseg": {"strid": 2}}, "semseg.strid: unknown key; did you mean semseg.stride?"),
        ({"depth": {"stride": 2}}, "depth: unknown key"),
        ({"crops": {"count": 2}}, "crops.count: a setting of upstream mae; this run's is mm_mae"),
    ],
)
def test_unknown_names_are_refused_with_known_ones(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError) as caught:
        settings(**changes)
    assert words in str(caught.value) and "has 1 wrong setting(s)" in str(caught.value)


def test_used_modalities_have_a_section() -> None:
    """A section of a modality is refused unless it is an input or predicted."""
    both = settings(modalities={"inputs": ["rgb"], "outputs": ["raw_rgb"]})
    assert "semseg" in settings() and "semseg" not in both and "semseg" not in to_dict(load_recipe("mae_vit_b"))
    assert settings(modalities={"inputs": ["rgb"], "outputs": ["semseg"]})["semseg"]["stride"] == 4
    with pytest.raises(RefusedError, match=r".*modalities\.inputs.*modalities\.outputs"):
        from_dict({**both, "semseg": {"stride": 2}})
    with pytest.raises(RefusedError, match="modality semseg"):
        from_dict({**to_dict(load_recipe("mae_vit_b")), "semseg": {"stride": 2}})


def words_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit):
        parse(["--recipe", "mm_mae_tiny", "--data.path", "data", *argv])
    return capsys.readouterr().out


def test_flags_select_modalities_and_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--recipe", "mm_mae_tiny", "--data.path", "data"]
    assert parse([*tiny, "--semseg.stride", "2"]).config.semseg.stride == 2  # type: ignore[attr-defined]
    two = ["--modalities.inputs", "rgb", "depth", "--modalities.outputs", "raw_rgb", "depth"]
    assert "semseg" not in to_dict(parse([*tiny, *two]).config)
    words = words_of(capsys, "--help-all")
    assert "--semseg.stride INT" in words and "--crops.size INT" in words
    assert "--crops.count" not in words and "--crops.from" not in words and "--crops.view_size" not in words
    assert "--semseg." not in words_of(capsys, "--help-all", *two)
    with pytest.raises(RefusedError, match=r"--semseg\.stride.*--modalities\.inputs"):
        parse([*tiny, *two, "--semseg.stride", "2"])
    with pytest.raises(RefusedError, match=r"--modalities\.inputs has 'dept': .*depth"):
        parse([*tiny, "--modalities.inputs", "dept"])


def test_a_registered_class_must_be_a_modality() -> None:
    from trp_scale.config.registry import component
    from trp_scale.pretraining.mm_mae.batch import RunModalities

    with forgetting():
        component("modality", "sound")(type("Sound", (), {"__init__": lambda self, settings, patch: None}))
        config = from_dict(settings(modalities={"inputs": ["rgb", "sound"], "outputs": ["rgb"]}))
        with pytest.raises(RefusedError, match=r"Sound .*trp_scale\.Modality"):
            RunModalities(config)
