"""What is said where raw files, or nothing, lie in place of a data set; before torch is imported."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trp_scale.config.loader import data_command, known_recipes, load_recipe
from trp_scale.data.mixture import describe_shares, parse_paths, require_run_data
from trp_scale.data.raw_files import require_dataset
from trp_scale.errors import DataError
from trp_scale.sharding.images.settings import ShardImagesConfig
from trp_scale.sharding.images.shard import shard_images
from trp_scale.sharding.text.shard import ShardTextConfig

ROOT = Path(__file__).parents[3]


def laid_out(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


@pytest.mark.parametrize(
    ("files", "given", "message"),
    [
        (["x"], "nowhere", "DIR/nowhere"),
        (["sub/x"], "sub/none", "DIR/sub/none"),
        (["a.txt", "b.txt"], "", r"\(a.txt, ...\); .*trp-scale shard-text --inputs DIR "),
        (["a.jsonl.gz"], "a.jsonl.gz", r"\(a.jsonl.gz\); .*--inputs DIR/a.jsonl.gz --output"),
        (["cat/a.jpg", "dog/b.PNG", "README.md"], "", r"\(cat/a.jpg, .*trp-scale shard-images --inputs"),
        (["rgb/a.jpg", "depth/a.png", "semseg/a.png"], "", "rgb, depth, semseg; .*DIR/rgb --modality depth=DIR/depth"),
        (["a/dataset.json", "b/dataset.json"], "", ": a, b"),
        (["dataset.json", "shards/x.tar"], "shards", "DIR, .* DIR"),
        (["progress/x", "shards/x.tar"], "", "sharding"),
        (["state.json", "data.arrow"], "", "save_to_disk.*trp-scale shard-text .*shard-images"),
        (["config.json", "stop.json"], "", "trp-scale report --run DIR"),
        (["metrics.jsonl", "tokenizer/vocab.txt"], "", "trp-scale report --run DIR"),
        (["a.csv"], "", r"\(a.csv\)"),
    ],
)
def test_what_is_there_and_what_to_do(files: list[str], given: str, message: str, tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "data", *files)
    with pytest.raises(DataError, match=message.replace("DIR", str(folder))):
        require_dataset(folder / given)


def test_an_empty_folder_and_tars(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        require_dataset(tmp_path / "empty")
    for member, message in (("000.jpg", "trp-scale index"), ("000.txt", "unpack")):
        (tmp_path / member).write_text("x")
        folder = tmp_path / f"of_{member}"
        folder.mkdir()
        with tarfile.open(folder / "a-000.tar", "w") as tar:
            tar.add(tmp_path / member, member)
        with pytest.raises(DataError, match=rf"\(a-000.tar\); .*{message}"):
            require_dataset(folder)


def require_data(settings: dict[str, str], made_by: str = "") -> None:
    """Call `require_run_data` for a run with these data sets; a command that makes the first stands for its recipe."""
    data = SimpleNamespace(path=settings["data.path"])
    arguments: Any = SimpleNamespace(recipe=made_by, config=SimpleNamespace(data=data, datasets=lambda: settings))
    require_run_data(arguments)


def test_every_setting_that_names_data_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trp_scale.data.mixture.data_command", lambda recipe, path: recipe)
    there = laid_out(tmp_path / "there", "dataset.json")
    require_data({"data.path": f"a:0.5={there},b:0.5=s3://bucket/b", "downstream.test_path": str(there)})
    with pytest.raises(DataError, match=r"--downstream\.test_path \S*/none"):
        require_data({"data.path": str(there), "downstream.test_path": str(tmp_path / "none")})
    with pytest.raises(DataError, match=r"--data\.path \S*/none: .*trp-scale shard-text -x"):
        require_data({"data.path": str(tmp_path / "none")}, "trp-scale shard-text -x")
    require_data({"data.path": str(there)}, "trp-scale shard-text -x")


def test_several_directories_need_weights_and_shares_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'b:1=/b,c:1=/c'"):
        require_data({"data.path": "/b,/c"})
    for wrong in ("a=/b,c=/d", "a:inf=/b,c:1=/d"):
        with pytest.raises(DataError, match="'a:1=/b,c:1=/d'"):
            require_data({"data.path": wrong})
    with_comma = laid_out(tmp_path / "a,b", "dataset.json")
    assert [path.path for path in parse_paths(str(with_comma))] == [with_comma]
    (shares,) = describe_shares(parse_paths("a:0.5=/b,c:0.9=/c"))
    assert "1.4" in shares and "a 35.7%, c 64.3%" in shares
    for clear in ("/b", "a:0.5=/b,c:0.5=/c", "a:1=/b,c:2=/c"):
        assert not describe_shares(parse_paths(clear))


def test_folders_of_modalities_are_no_classes(tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "rooms", "rgb/a.jpg", "depth/a.png")
    with pytest.raises(DataError, match=rf"modalities of .*--inputs {folder}/rgb --modality depth={folder}/depth"):
        shard_images(ShardImagesConfig(inputs=[str(folder)], output=tmp_path / "out", progress=False))


def test_a_recipe_says_how_its_own_data_is_made() -> None:
    makers = {"shard-text": ShardTextConfig, "shard-images": ShardImagesConfig}
    own = {name: load_recipe(name).data.path for name in known_recipes() if name.endswith("_tiny")}
    own.pop("glue_tiny")  # published data
    for name, path in own.items():
        program, command, *flags = shlex.split(data_command(name, path))
        fields = {each.removeprefix("--") for each in flags if each.startswith("--")}
        assert program == "trp-scale" and fields <= set(makers[command].__dataclass_fields__)
        assert flags[-2:] == ["--output", path]
        assert data_command(name, "elsewhere") == ""
    sizes = data_command("pos_bert_tiny", "data/embedded").partition("--length")[2].partition(" --output")[0]
    assert f"--output data/embedded --length{sizes} " in (ROOT / "Makefile").read_text(), "make pretrain makes the same"
    assert data_command("pos_bert_base", load_recipe("pos_bert_base").data.path) == ""


@pytest.mark.parametrize(
    "argv", [["pretrain", "--recipe", "mm_mae_tiny"], ["finetune", "--recipe", "depth_tiny", "--from", "x"]]
)
def test_it_is_said_before_anything_heavy_is_imported(argv: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom trp_scale.cli import main as cli\n"
        f"status = cli.main([*{argv!r}, '--data.path', {str(tmp_path)!r}])\n"
        "print(status, sorted({'torch', 'timm', 'transformers'} & {*sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == "2 []\n"
    assert done.stderr.startswith(f"error: --data.path {tmp_path}: ") and done.stderr.count("\n") == 1
