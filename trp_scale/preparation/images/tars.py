"""Images in WebDataset tars: members of one key are one sample."""

from __future__ import annotations

import glob
import hashlib
import logging
import tarfile
from collections import Counter
from pathlib import Path

from trp_scale.data.images.maps import read_names
from trp_scale.data.images.reader import CLASS, IMAGE, known_suffixes, ordered_suffixes
from trp_scale.data.index import DataError
from trp_scale.preparation.images.files import FileSource
from trp_scale.preparation.images.samples import Listing, Part, Sample, plain_key, without_duplicates

STORED_AS = {"jpeg": IMAGE, "png": IMAGE}
"""Members that are read under another suffix than their own, in small letters; others than these and those that a
sample may have are counted and never opened."""

log = logging.getLogger(__name__)


def find_tars(inputs: list[str]) -> list[Path]:
    """The tars behind the inputs (files, folders of them, globs), each once, in sorted order within each input.

    Raises:
        DataError: an input is none of these.
    """
    found: list[Path] = []
    for item in inputs:
        path = Path(item)
        if path.is_dir():
            tars = sorted(path.glob("*.tar"))
        elif path.exists():
            tars = [path]
        else:
            tars = sorted(Path(name) for name in glob.glob(item, recursive=True))  # noqa: PTH207
        if not tars:
            raise DataError(f"--inputs {item}: no such file, no tar in it, and no file matches it as a pattern")
        found += tars
    wrong = [path for path in found if path.suffix != ".tar"]
    if wrong:
        raise DataError(f"--inputs {wrong[0]}: an uncompressed .tar expected; several inputs may only be tars")
    return list(dict.fromkeys(found))


def list_tars(tars: list[Path], class_names: str) -> Listing:
    """All images of the tars. If any sample has a class or a map, all need one.

    Args:
        class_names: text file with one name a line, or "".

    Raises:
        DataError: a tar cannot be read to its end, or holds no image.
    """
    stored_as = {**STORED_AS, **{suffix: suffix for suffix in known_suffixes()}}
    groups: dict[tuple[Path, str], dict[str, Part]] = {}
    skipped: list[tuple[str, str]] = []
    ignored: Counter[str] = Counter()
    digest = hashlib.sha256()
    for tar in tars:
        _read_headers(tar, stored_as, groups, skipped, ignored, digest)
    suffixes = ordered_suffixes({suffix for parts in groups.values() for suffix in parts})
    if IMAGE not in suffixes:
        raise DataError(f"--inputs {tars[0]}: no .jpg, .jpeg or .png member in {len(tars)} tars")
    if ignored:
        log.warning("members that are left out: %s", ", ".join(f"{n} .{suffix}" for suffix, n in ignored.most_common()))
    # Some writers count from 0 in each tar: then the tar's name is part of the key.
    repeated = len({key for _, key in groups}) < len(groups)
    samples = []
    for (tar, key), parts in groups.items():
        place = f"{tar}:{key}"
        reason = _lacking(parts, suffixes)
        if reason:
            skipped.append((reason, place))
            continue
        ordered = tuple((suffix, parts[suffix]) for suffix in suffixes)
        samples.append(Sample(plain_key(f"{tar.stem}/{key}" if repeated else key), place, None, parts=ordered))
    samples, twice = without_duplicates(samples)
    classes = None
    if class_names:
        classes, content = read_names("--class_names", class_names)
        digest.update(content)
    return Listing(
        source=FileSource(),
        samples=samples,
        suffixes=suffixes,
        classes=classes,
        fingerprint=digest.hexdigest(),
        skipped=skipped + twice,
    )


def _read_headers(
    tar: Path,
    stored_as: dict[str, str],
    groups: dict[tuple[Path, str], dict[str, Part]],
    skipped: list[tuple[str, str]],
    ignored: Counter[str],
    digest: hashlib._Hash,
) -> None:
    """Add the members of a tar to `groups`, by (tar, key) and by what they are stored as."""
    try:
        with tarfile.open(tar, "r:") as archive:
            end = 0
            for entry in archive:
                end = entry.offset_data + -(-entry.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                if not entry.isreg():
                    continue
                folder, slash, file = entry.name.removeprefix("./").rpartition("/")
                stem, _, suffix = file.partition(".")
                stored = stored_as.get(suffix.lower())
                if stored is None:
                    ignored[suffix] += 1
                    continue
                parts = groups.setdefault((tar, folder + slash + stem), {})
                if stored in parts:
                    skipped.append(("duplicate_key", f"{tar}:{entry.name}"))
                    continue
                parts[stored] = Part(str(tar), entry.offset_data, entry.size)
                digest.update(f"{entry.name}\0{entry.size}\0{entry.chksum}\0".encode("utf-8", "surrogateescape"))
        with tar.open("rb") as stream:  # tarfile takes a cut tar for a shorter one
            stream.seek(end)
            if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"no end mark at byte {end}")
    except (OSError, tarfile.TarError) as error:
        raise DataError(
            f"--inputs {tar}: not a tar that can be read to its end ({error}); make or copy it anew"
        ) from error


def _lacking(parts: dict[str, Part], suffixes: tuple[str, ...]) -> str:
    """Why a sample is skipped for what it lacks; "" if it has everything."""
    if IMAGE not in parts:
        return "no_image"
    if CLASS in suffixes and CLASS not in parts:
        return "no_class"
    return "" if set(suffixes) <= set(parts) else "no_map"
