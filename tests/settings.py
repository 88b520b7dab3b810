"""Settings with some of their values changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trp_scale.config import Config
from trp_scale.config.loader import from_dict, to_dict
from trp_scale.config.registry import Settings, find, names
from trp_scale.config.schema import setting_name


def changed(config: Config, **changes: Mapping[str, Any]) -> Any:
    """`config` with `changes`, section dicts such as balancer={"kind": "uniform"}; another kind starts from its own
    defaults, and a modality that the run no longer has takes its section with it. Refuses what is no setting."""
    document = to_dict(config)
    for section, values in changes.items():
        own = document.get(section, {})
        other = isinstance(getattr(config, section, None), Settings) and values.get("kind", own["kind"]) != own["kind"]
        kept = {} if other else own
        document[section] = {**kept, **{setting_name(name): value for name, value in values.items()}}
    stay = [each.name for each in type(config).parts(document, [])]
    for name in set(names("modality")) - {*stay, *changes}:
        document.pop(name, None)
    return from_dict(document)


def of_upstream(config: Config, upstream: str) -> Any:
    """The settings of another upstream's run, with the values of `config` for all that it has too."""
    given, document = to_dict(config), to_dict(find("upstream", upstream).settings())
    for section, values in document.items():
        if isinstance(values, dict) and section in given and section != "objective":
            document[section] = {name: given[section].get(name, value) for name, value in values.items()}
    return from_dict(document)
