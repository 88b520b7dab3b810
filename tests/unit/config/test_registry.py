"""The registry as someone meets it who registers a component of their own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.extending import forgetting
from trp_scale.config import RefusedError
from trp_scale.config import registry as components
from trp_scale.config.loader import from_dict, load_recipe, to_dict
from trp_scale.config.registry import Settings, component, find, load_module, setting
from trp_scale.config.run_flags import parse

TINY = ["--recipe", "pos_bert_tiny"]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test registers and imports is forgotten after it."""
    with forgetting():
        yield


def written(directory: Path, name: str, text: str) -> str:
    path = directory / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


HOOK = '''
from dataclasses import dataclass
from trp_scale.config.registry import component
from trp_scale.config.registry import (Settings, setting)

@component("hook", "{name}", "nowhere:Class")
@dataclass(kw_only=True)
class Mine(Settings):
    """A hook of a test."""

    rate: float = setting(0.5, above=0)
    """How much."""
'''


def hook(directory: Path, module: str, name: str) -> str:
    return written(directory, module, HOOK.format(name=name))


def test_a_registered_class_has_its_settings_with_its_kind() -> None:
    @component("balancer", "mine")
    class Mine:
        """What it is."""

        @dataclass(kw_only=True)
        class Settings(Settings):
            rate: float = setting(0.5, above=0)

    found = find("balancer", "mine")
    assert found.load() is Mine and found.settings is Mine.Settings
    assert found.summary == "What it is.", "of the class, since its settings say nothing"
    assert (found.settings().kind, found.settings(rate=2.0).rate) == ("mine", 2.0)
    assert from_dict({"balancer": {"kind": "mine", "rate": 2}}).balancer == found.settings(rate=2.0)


@pytest.mark.parametrize(
    ("role", "name", "settings", "expected"),
    [
        ("balancr", "mine", None, "allowed roles: balancer, hook"),
        ("balancer", "my-own", None, "a name has letters, digits and underscores only"),
        ("balancer", "minimax", None, "'minimax' is registered already, by trp_scale.methods.balancing.settings"),
        ("balancer", "mine", type("Bare", (), {}), r"(?s)allowed: a class with @dataclass.* derived from trp_scale"),
        ("balancer", "mine", type("Unread", (Settings,), {"rate": 0.5}), "allowed: a class with @dataclass"),
    ],
)
def test_what_cannot_be_registered_is_refused(role: Any, name: str, settings: type | None, expected: str) -> None:
    body = {} if settings is None else {"Settings": settings}
    with pytest.raises(RefusedError, match=expected):
        component(role, name)(type("Mine", (), body))


def test_a_task_of_another_modality_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"the modality 'raw_rgb' has the task raw_rgb, which 'rgb' of trp_scale\."):
        component("modality", "raw_rgb")(type("Mine", (), {}))
    with pytest.raises(RefusedError, match="'mine' has the task depth, which 'depth' of"):
        component("modality", "mine", tasks=("mine", "depth"))(type("Mine", (), {}))


def test_a_setting_without_a_default_is_refused() -> None:
    with pytest.raises(RefusedError, match="rate has no default"):

        @component("balancer", "mine")
        class Mine:
            @dataclass(kw_only=True)
            class Settings(Settings):
                rate: float


def test_a_name_of_the_packages_own_is_refused_to_whoever_comes_first(tmp_path: Path) -> None:
    """Registered before anything else is imported, the other module is to blame, not the package."""
    module = written(tmp_path, "early", HOOK.format(name="x").replace('"hook", "x"', '"balancer", "minimax"'))
    done = subprocess.run([sys.executable, module], capture_output=True, text=True)
    assert "RefusedError: early: the balancer 'minimax' is registered already, by trp_scale" in done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise ValueError('not today')", "ValueError: not today"),
        ("def f(:", "SyntaxError"),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
    ],
)
def test_a_module_that_fails_is_named_with_its_error(tmp_path: Path, text: str, expected: str) -> None:
    path = written(tmp_path, "failing", text)
    with pytest.raises(RefusedError, match=f"--module {path}: .*{expected}"):
        load_module(path)


def test_a_module_with_the_name_of_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"--module .*dataclasses\.py"):
        load_module(written(tmp_path, "dataclasses", ""))


def test_a_run_has_the_modules_of_its_own_command_line(tmp_path: Path) -> None:
    path = hook(tmp_path, "one", "first")
    assert parse([*TINY, "--module", path, "--hooks", "first"]).config.modules == ["one"]
    assert parse(TINY).config.modules == [], "an earlier run of this process does not count"


def test_a_setting_of_a_hook_that_is_not_listed_says_how_to_list_it(tmp_path: Path) -> None:
    given = [*TINY, "--module", hook(tmp_path, "one", "first")]
    with pytest.raises(RefusedError, match=r"--first\.rate: .*--hooks first"):
        parse([*given, "--first.rate", "2"])
    with pytest.raises(RefusedError, match=r"first: .*hooks"):
        from_dict({"first": {"rate": 2}})


def test_a_hook_whose_section_is_there_already_is_refused(tmp_path: Path) -> None:
    load_module(hook(tmp_path, "one", "validation"))
    with pytest.raises(RefusedError, match="validation of one"):
        from_dict({"hooks": ["validation"]})


def test_settings_of_a_run_without_its_module_say_which(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("modules: [own, other]\nbalancer: {kind: mine}\n", encoding="utf-8")
    with pytest.raises(RefusedError, match=r"--module own --module other"):
        load_recipe(tmp_path / "config.yaml")
    load_module(written(tmp_path, "own", ""))
    load_module(written(tmp_path, "other", ""))
    with pytest.raises(RefusedError, match=r"balancer\.kind is 'mine'"):
        load_recipe(tmp_path / "config.yaml")


def test_settings_with_a_hooks_section_reach_a_process_of_their_own(tmp_path: Path) -> None:
    """A loader worker starts afresh: it has not read --module."""
    config = parse([*TINY, "--module", hook(tmp_path, "one", "first"), "--hooks", "first", "--first.rate", "2"]).config
    code = (
        "import pickle, sys; sys.path.insert(0, sys.argv[1]); config = pickle.load(sys.stdin.buffer); "
        "print(config.first.rate, config.modules)"
    )
    sent = pickle.dumps(config)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], input=sent, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "2.0 ['one']"
    assert pickle.loads(sent) == config


def test_the_order_of_hooks_is_checked(tmp_path: Path) -> None:
    late = HOOK.replace('"nowhere:Class"', '"nowhere:Class", after=("early",)')
    modules = [hook(tmp_path, "one", "early"), written(tmp_path, "two", late.format(name="late"))]
    given = [*TINY, *(word for module in modules for word in ("--module", module)), "--hooks"]
    assert parse([*given, "early", "late"]).config.hooks == ["early", "late"]
    assert parse([*given, "late"]).config.hooks == ["late"]
    for wrong, said in (
        (["late", "early"], "--hooks has late before early; allowed: late after early"),
        (["early", "early"], "--hooks has early more than once; allowed: each once"),
    ):
        with pytest.raises(RefusedError, match=said):
            parse([*given, *wrong])


def test_a_hook_that_is_registered_again_has_its_new_settings(tmp_path: Path) -> None:
    """As in a notebook, whose cell is run twice."""
    for default in (1, 2):
        load_module(hook(tmp_path, "one", "first"))
        made = type("Settings", (Settings,), {"__annotations__": {"rate": int}, "rate": default})
        component("hook", "first")(type("Mine", (), {"Settings": dataclass(kw_only=True)(made), "__module__": "one"}))
        assert to_dict(from_dict({"hooks": ["first"]}))["first"] == {"kind": "first", "rate": default}


def entry_point(directory: Path, module: str) -> None:
    """What pip leaves of an installed package that registers components."""
    information = directory / "own_methods-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: own-methods\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{components.ENTRY_POINTS}]\nown = {module}\n")


def known_hooks(path: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.path.append(sys.argv[1])\nfrom trp_scale.config.registry import names\nprint(names('hook'))"
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)


def test_an_installed_package_registers_by_its_entry_point(tmp_path: Path) -> None:
    hook(tmp_path, "own_methods", "from_a_package")
    entry_point(tmp_path, "own_methods")
    assert "'from_a_package'" in known_hooks(tmp_path).stdout


def test_an_installed_package_that_fails_is_named(tmp_path: Path) -> None:
    entry_point(tmp_path, "nowhere_at_all")
    refusal = known_hooks(tmp_path).stderr
    assert "own-methods: its entry point 'own' of trp_scale.components (nowhere_at_all) fails with" in refusal


def test_what_is_no_hook_is_refused_by_name(tmp_path: Path) -> None:
    from trp_scale.core.hooks import _build_component

    component("hook", "mine")(type("Mine", (), {"__init__": lambda self, settings, run: None, "__module__": "one"}))
    with pytest.raises(RefusedError, match=r"Mine .*trp_scale\.Hook"):
        _build_component(None, "hook", "mine", None)  # type: ignore[arg-type]
