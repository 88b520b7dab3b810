#!/usr/bin/env python3
"""Set the repository's URLs in README.md, pyproject.toml, CITATION.cff and mkdocs.yml.

    python .ci/set_urls.py https://github.com/OWNER/trp_scale [SITE]

SITE is the address of the documents; for GitHub and GitLab it follows from the first argument. A second call with the
same arguments changes nothing, one with other arguments replaces the URLs of the first. README.md: the clone line, and
whatever held the former URL. Until the first call README.md has PLACEHOLDER, and the other files have no URL.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PLACEHOLDER = "https://github.com/OWNER/trp_scale"
REPOSITORY = re.compile(r"https://([\w.-]+)/([\w.-]+(?:/[\w.-]+)*)/([\w.-]+)(?<!\.git)")
PAGES = {"github.com": "github.io", "gitlab.com": "gitlab.io"}
FILES = ("README.md", "pyproject.toml", "CITATION.cff", "mkdocs.yml")
NAMES = ("Repository", "Documentation", "Changelog", "Issues")
"""Of [project.urls]; those of the papers stay."""


def site_of(repository: str) -> str:
    """Return the address of the pages of a repository on GitHub or GitLab; empty for other hosts."""
    match = REPOSITORY.fullmatch(repository)
    if not match:
        raise SystemExit(f"{repository!r} is no repository; expected: https://HOST/OWNER/NAME, without .git at its end")
    host, owner, name = match.groups()
    return f"https://{owner}.{PAGES[host]}/{name}/" if host in PAGES and "/" not in owner else ""


def set_project(text: str, repository: str, site: str) -> str:
    """Return pyproject.toml with the URLs first in [project.urls]."""
    text = re.sub(rf'^(?:{"|".join(NAMES)}) = "[^"]*"\n', "", text, flags=re.MULTILINE)
    changes = f"{repository}/blob/main/CHANGELOG.md"
    urls = dict(zip(NAMES, (repository, site, changes, f"{repository}/issues"), strict=True))
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items() if url)
    return text.replace("[project.urls]\n", f"[project.urls]\n{lines}", 1)


def set_keys(text: str, after: str, values: dict[str, str]) -> str:
    """Return YAML with the keys behind the line of the key `after`; keys without a value are left out."""
    text = re.sub(rf"^(?:{'|'.join(values)}): .*\n", "", text, flags=re.MULTILINE)
    lines = "".join(f"{key}: {value}\n" for key, value in values.items() if value)
    return re.sub(rf"^({after}: .*\n)", lambda match: match[1] + lines, text, count=1, flags=re.MULTILINE)


def set_readme(text: str, former: str, repository: str) -> str:
    """Return README.md with the repository in its clone line, and in place of the former URL."""
    text = text.replace(former, repository)
    return re.sub(r"(git clone [^\n]*?)https?://[^\s`]+", lambda match: match[1] + repository, text)


def main(root: Path, repository: str, site: str = "") -> None:
    site = site or site_of(repository)
    texts = {name: (root / name).read_text(encoding="utf-8") for name in FILES}
    former = re.search(r'^Repository = "([^"]*)"$', texts["pyproject.toml"], flags=re.MULTILINE)
    changes = {
        "README.md": set_readme(texts["README.md"], former[1] if former else PLACEHOLDER, repository),
        "pyproject.toml": set_project(texts["pyproject.toml"], repository, site),
        "CITATION.cff": set_keys(texts["CITATION.cff"], "license", {"repository-code": repository, "url": site}),
        "mkdocs.yml": set_keys(texts["mkdocs.yml"], "site_description", {"site_url": site, "repo_url": repository}),
    }
    for name, text in changes.items():
        (root / name).write_text(text, encoding="utf-8")
        print(f"{name}: {'unchanged' if text == texts[name] else 'changed'}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    site_of(sys.argv[1])
    main(Path(__file__).resolve().parents[1], *sys.argv[1:])
