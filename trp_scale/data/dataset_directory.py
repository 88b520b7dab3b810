"""Directories written by datasets.save_to_disk. `datasets` is an extra, imported when one is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trp_scale.config.json_files import read_object
from trp_scale.config.schema import is_plain_name
from trp_scale.data.index import read_fields
from trp_scale.errors import DataError, error_text, quote


def is_dataset_directory(path: Path) -> bool:
    """Whether datasets.save_to_disk wrote this directory."""
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def load_dataset(path: str, split: str):  # type: ignore[no-untyped-def]  # `datasets` is an extra without types here
    """Open a directory written by datasets.save_to_disk.

    Raises:
        DataError: the extra is not installed, or the directory has no such split.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"input {path}: reading a dataset directory needs `pip install trp-scale[datasets]`") from error
    loaded = open_dataset(Path(path), f"input {path}")
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"input {path}: split {split!r} not found; --split may be {', '.join(loaded)}")
        return loaded[split]
    return loaded


def open_dataset(path: Path, source: str) -> Any:
    """Open a directory written by datasets.save_to_disk, a Dataset or a DatasetDict.

    Args:
        source: name of the directory in messages.

    Raises:
        DataError: it cannot be opened.
    """
    import datasets

    try:
        for file in path.glob("**/*.json"):  # the library follows them wherever they lead
            read_object(file, DataError)
        for state in path.glob("**/state.json"):
            for entry in read_fields(state).take("_data_files", list[dict[str, Any]], []):
                if not is_plain_name(entry.get("filename")):
                    raise DataError(f"{state}: file {quote(entry.get('filename'))} found, a plain file name expected")
        return datasets.load_from_disk(str(path))
    except Exception as error:  # pyarrow's, ours, and whatever other fields than the library's lead to
        raise DataError(
            f"{source}: cannot be read as a dataset directory ({error_text(error)}); save it again"
        ) from error


def check_rows(rows: Any, first: int, last: int, source: str) -> None:
    """Refuse rows that the library would read past the ends of their file, which ends the process.

    Args:
        rows: a Dataset without a selection.
        first, last: rows first ... last - 1.
        source: name of the directory in messages.

    Raises:
        DataError: offsets or lengths of one of them lead elsewhere.
    """
    try:
        rows.data.table.slice(first, last - first).validate(full=True)
    except Exception as error:  # pyarrow's
        raise DataError(
            f"{source}: rows {first} to {last - 1} are damaged ({error_text(error)}); save it again"
        ) from error
