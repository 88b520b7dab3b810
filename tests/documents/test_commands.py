"""Every command of docs/ exists: command, flags, values, scripts, files. (test_walkthroughs.py runs many of them.)"""

from __future__ import annotations

import re

import pytest

from tests.commands import Command, check, check_flags, help_of, parse_line
from tests.documents.pages import blocks, pages, read
from trp_scale.cli.main import COMMANDS

WITH_MODULES = ("extending.md", "own_modalities.md")
"""Pages whose commands give --module a file that the page shows: tests/distributed/test_extending.py runs them."""
WITHOUT = ("source",)
"""Of the shell."""


def commands() -> dict[str, Command]:
    """Each command once, by its text."""
    found = {}
    for page in pages():
        for block in blocks(page):
            if block.language == "bash":
                for command in block.commands:
                    own_files = page in WITH_MODULES and "--module" in command.words
                    its_file = "my_study.yaml" in command.words
                    if not own_files and not its_file and command.words[0] not in WITHOUT:
                        found.setdefault(str(command), command)
    return found


@pytest.mark.parametrize("command", commands().values(), ids=str)
def test_a_command_of_a_page_exists(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    check(command.words, monkeypatch)


def named_in_sentences() -> list[str]:
    """Commands in backquotes, with their flags; what stands for a name or a number is in capitals."""
    found = [" ".join(text.split()) for page in pages() for text in re.findall(r"`(trp-scale [a-z][^`]*)`", read(page))]
    return list(dict.fromkeys(text for text in found if "|" not in text))


@pytest.mark.parametrize("text", named_in_sentences())
def test_a_command_that_a_sentence_names_exists(text: str) -> None:
    name, *words = parse_line(text).words[1:]
    assert name in {command for group in COMMANDS.values() for command in group}
    program = ["trp-scale", name, *(words[:1] if name == "study" else ())]
    flags = [word for word in words if word.startswith("--") and word != "--recipe"]
    recipe = words[words.index("--recipe") :][:2] if "--recipe" in words else []
    if "--module" not in flags:
        check_flags([*(recipe if "".join(recipe[1:]).islower() else []), *flags], *program)


def test_the_page_of_commands_has_each_command_once() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", read("commands.md"), flags=re.MULTILINE)
    assert sorted(rows) == sorted(command for group in COMMANDS.values() for command in group)


def settings_of_the_tables() -> list[str]:
    """Flags and settings in the second column of the tables of coming_from.md."""
    cells = re.findall(r"^\|[^|]+\|([^|]+)\|$", read("coming_from.md"), flags=re.MULTILINE)
    named = [text.split()[0] for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    return list(dict.fromkeys(name for name in named if re.fullmatch(r"--\w[\w.]*|[a-z]+_?[a-z]+\.[a-z_0-9]+", name)))


COMMANDS_OF_THE_TABLES = (
    ("pretrain", "--recipe", "mae_vit_b", "--hooks", "weight_average"),
    ("pretrain", "--recipe", "pos_bert_base"),
    ("pretrain", "--recipe", "mm_mae_vit_b_in1k_400"),
    ("finetune", "--recipe", "classification_mae_vit_b"),
    ("probe",),
    ("export",),
)
"""Commands whose flags the tables name."""


@pytest.mark.parametrize("name", settings_of_the_tables())
def test_a_setting_that_another_trainer_has_too_exists(name: str) -> None:
    flag = re.compile(rf"(?<![\w-])--{re.escape(name.removeprefix('--'))}(?![\w.-])")
    assert any(flag.search(help_of("trp-scale", *command)) for command in COMMANDS_OF_THE_TABLES)
