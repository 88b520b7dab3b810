"""Ways to damage a file, each drawn from a seeded generator, by its bytes or its structure; and checksums that fit
again."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

LENGTHS = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**9)
"""Where a length, an offset or a count may go wrong."""

DEEP = 100_000
"""Levels of nesting."""

DIGITS = 5_000
"""Digits of a number: Python refuses to read more than 4,300."""

ODD: tuple[Any, ...] = (
    None,
    True,
    "",
    "x",
    "../../x",
    "/nowhere/x",
    "\ud800",
    "\x00",
    "é" * 50_000,
    0.5,
    1e30,
    -1e30,
    float("nan"),
    float("inf"),
    [],
    {},
    [1],
    ["x", None],
    {"x": 1},
    [[[]]],
    *LENGTHS,
)
"""Values of other types and sizes than a field has."""


def mutated(content: bytes, kind: str, chance: random.Random) -> bytes:
    """One damaged copy of a file.

    Args:
        kind: "bytes", "json", "jsonl", "yaml", "xml" or "text"; those but the first are damaged by their structure
            three times of four.
    """
    if kind == "bytes" or chance.random() < 0.25:
        return of_bytes(content, chance)
    return {"json": of_json, "jsonl": of_lines, "yaml": of_yaml, "xml": of_xml, "text": of_text}[kind](content, chance)


def of_bytes(content: bytes, chance: random.Random) -> bytes:
    """Bits flipped, the end cut off, a range put in, doubled, removed or zeroed, or a length in its place."""
    found = bytearray(content)
    size = len(found)
    start = chance.randrange(size) if size else 0
    end = min(size, start + chance.choice((1, 2, 8, 64, 512, 4096)))
    way = chance.randrange(8)
    if way == 0 and size:
        for _ in range(chance.choice((1, 1, 1, 2, 8, 64))):
            place = chance.randrange(size)
            found[place] ^= 1 << chance.randrange(8)
    elif way == 1:
        del found[start:]
    elif way == 2:
        found[start:start] = chance.randbytes(chance.choice((1, 8, 64, 1024)))
    elif way == 3:
        found[start:start] = found[start:end]
    elif way == 4:
        del found[start:end]
    elif way == 5:
        found[start:end] = bytes(end - start)
    elif way == 6:
        found[start : start + 8] = _packed(chance)[: max(0, size - start)]
    else:
        found[start:end] = chance.randbytes(end - start)
    return bytes(found)


def _packed(chance: random.Random) -> bytes:
    """A length in 4 or 8 bytes, of either order."""
    number = chance.choice(LENGTHS)
    width, order = chance.choice((4, 8)), chance.choice(("little", "big"))
    return (number % (1 << (8 * width))).to_bytes(width, order)  # type: ignore[arg-type]  # one of two words


def _places(document: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in nested lists and mappings."""
    found: list[tuple[Any, Any]] = []
    left = [document]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            keys: Iterator[Any] = iter(each)
        elif isinstance(each, list):
            keys = iter(range(len(each)))
        else:
            continue
        for key in keys:
            found.append((each, key))
            left.append(each[key])
    return found


def changed(document: Any, chance: random.Random) -> Any:
    """A copy with one or a few values replaced, deleted, doubled, moved or nested."""
    found = [copy.deepcopy(document)]
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        places = _places(found)
        # Few fields stand at the top, and many in lists of what is alike: each depth has its turn.
        container, key = places[0] if chance.random() < 0.02 else places[_low(len(places), chance)]
        _change(container, key, chance)
        if not found:
            break
    return found[0] if found else None


def _low(count: int, chance: random.Random) -> int:
    return min(int(count ** chance.random()), count) - 1


def _change(container: Any, key: Any, chance: random.Random) -> None:
    way = chance.randrange(8)
    value = container[key]
    if way == 0:
        del container[key]
    elif way == 1 and isinstance(container, list):
        container.insert(key, copy.deepcopy(value))
    elif way == 1:
        container[f"{key}_"] = container.pop(key)
    elif way == 2:
        container[key] = [value]
    elif way == 3:
        container[key] = {"x": value}
    elif way == 4 and isinstance(value, int) and not isinstance(value, bool):
        container[key] = chance.choice((value + 1, value - 1, -value, value * 2, *LENGTHS))
    elif way == 4 and isinstance(value, (list, dict)):
        container[key] = type(value)()
    else:
        container[key] = copy.deepcopy(chance.choice(ODD))


_MARK = "\x01mark\x01"


def of_json(content: bytes, chance: random.Random) -> bytes:
    """A JSON document with other values; now and then one that is too deep, or has a number of too many digits."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return of_bytes(content, chance)
    way = chance.random()
    if way < 0.85:
        return json.dumps(changed(document, chance)).encode()
    if way < 0.88:  # the whole is another value
        return json.dumps(copy.deepcopy(chance.choice(ODD))).encode()
    found = [copy.deepcopy(document)]
    container, key = chance.choice(_places(found))
    container[key] = _MARK
    special = chance.choice(
        (
            "[" * DEEP + "]" * DEEP,
            '{"x":' * DEEP + "1" + "}" * DEEP,
            "[" * DEEP,
            "9" * DIGITS,
            "-" + "9" * DIGITS,
            "1e" + "9" * DIGITS,
            "0." + "9" * DIGITS,
            '"' + "x" * 1_000_000 + '"',
            "NaN",
            "-Infinity",
            r'"\ud800"',
            '{"a": 1, "a": 2}',
        )
    )
    return json.dumps(found[0]).replace(json.dumps(_MARK), special).encode()


def of_lines(content: bytes, chance: random.Random) -> bytes:
    """JSON lines of which one is changed."""
    lines = content.split(b"\n")
    place = chance.randrange(len(lines))
    lines[place] = of_json(lines[place], chance)
    return b"\n".join(lines)


YAML_SPECIAL = (
    "!!python/object/apply:os.system ['true']",
    "!!int ''",
    "!!float x",
    "!!map [1]",
    "!!timestamp x",
    "!!binary x",
    "!!set {a, b}",
    "!!bool x",
    "!!omap [x]",
    "!!pairs x",
    "!x y",
    "&a [*a]",
    "&a {x: *a}",
    "*nothing",
    "9" * DIGITS,
    "1e" + "9" * DIGITS,
    "0x" + "f" * DIGITS,
    "1:" * 500 + "1",
    "[" * 2_000,
    "[" * DEEP,
    "{x: " * 5_000 + "1" + "}" * 5_000,
    "'" + "x" * 1_000_000 + "'",
    ".nan",
    ".inf",
    "2001-01-01",
    "{a: 1, a: 2}",
    "{[1]: 2}",
    "? [1, 2]\n: x",
    "\t",
    "\x07",
    "%YAML 9.9",
    "---\n---",
    "<<: *a",
)


def alias_bomb(levels: int, width: int = 10) -> str:
    """Lines whose last name stands for width ** levels values."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]" for level in range(1, levels + 1)]
    return "\n".join(lines)


def of_yaml(content: bytes, chance: random.Random) -> bytes:
    """A YAML file with another value or tag somewhere, a bomb of aliases, or lines moved about."""
    lines = content.decode().splitlines()
    way = chance.randrange(6)
    place = chance.randrange(len(lines))
    key, colon, _ = lines[place].partition(":")
    if way == 0:
        levels = chance.choice((2, 5, 9, 30))
        lines = [*alias_bomb(levels).splitlines(), *lines]
        if colon and chance.random() < 0.7:
            lines.append(f"{key.strip()}: *a{levels}")
            lines.append(f"model: {{layers: *a{levels}}}")
    elif way == 1:
        lines += [f"unknown{number}: 1" for number in range(chance.choice((1, 300, 20_000)))]
    elif way in (2, 3) and colon:
        lines[place] = f"{key}: {chance.choice(YAML_SPECIAL)}"
    elif way == 4 and colon:
        lines[place] = f"{key}: {json.dumps(chance.choice(ODD[:-1]))}"
    elif way == 5:
        lines.insert(chance.randrange(len(lines)), lines.pop(place))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def of_text(content: bytes, chance: random.Random) -> bytes:
    """Lines with other words."""
    lines = content.decode("utf-8", "replace").splitlines() or [""]
    words = ("", "\t", "9" * DIGITS, "nan", "inf", "-1", str(2**64), "x" * 1_000_000, "\ud800", "\x00", "{0..9999999}")
    for _ in range(chance.choice((1, 1, 3))):
        place = chance.randrange(len(lines))
        parts = lines[place].replace("\t", " \t ").replace("=", " = ").split(" ")
        parts[chance.randrange(len(parts))] = chance.choice(words)
        lines[place] = " ".join(parts).replace(" \t ", "\t").replace(" = ", "=")
        if chance.random() < 0.2:
            lines.insert(place, lines[chance.randrange(len(lines))])
        if chance.random() < 0.1 and len(lines) > 1:
            del lines[place]
            break
    return "\n".join(lines).encode("utf-8", "surrogatepass")


XML_SPECIAL = (
    "9" * DIGITS,
    "inf",
    "nan",
    "1e30",
    "-1",
    str(2**64),
    "",
    "x" * 1_000_000,
    "&e;",
    "&#xD800;",
    "<a>" * 20_000,
    "<a>" * 2_000 + "</a>" * 2_000,
    "../../x",
)

ENTITIES = (
    '<!DOCTYPE annotation [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghe", strict=True))
    + "]>",
    '<!DOCTYPE annotation [<!ENTITY e SYSTEM "file:///etc/passwd">]>',
)


def of_xml(content: bytes, chance: random.Random) -> bytes:
    """XML whose texts, elements or entities are others."""
    text = content.decode()
    parts = text.replace(">", ">\0").replace("<", "\0<").split("\0")
    way, place = chance.randrange(5), chance.randrange(len(parts))
    if way in (0, 1):
        parts[place] = chance.choice(XML_SPECIAL)
    elif way == 2:
        del parts[place]
    elif way == 3:
        parts.insert(place, parts[chance.randrange(len(parts))])
    else:
        parts[place] = "&e;"
        parts.insert(0, chance.choice(ENTITIES))
    return "".join(parts).encode()


def png_repaired(content: bytes) -> bytes:
    """The same PNG with the checksum of each chunk."""
    found, place = bytearray(content), 8
    while place + 12 <= len(found):
        (length,) = struct.unpack_from(">I", found, place)
        end = place + 8 + length
        if end + 4 > len(found):
            break
        struct.pack_into(">I", found, end, zlib.crc32(found[place + 4 : end]))
        place = end + 4
    return bytes(found)


def tar_repaired(content: bytes) -> bytes:
    """The same tar with the checksum of each block that looks like a header."""
    found = bytearray(content)
    for place in range(0, len(found) - 511, 512):
        if found[place + 257 : place + 262] == b"ustar":
            block = bytes(found[place : place + 148]) + b" " * 8 + bytes(found[place + 156 : place + 512])
            found[place + 148 : place + 156] = f"{sum(block):06o}\0 ".encode()
    return bytes(found)


def index_repaired(description: bytes, content: bytes) -> bytes:
    """A binary index with another description, and its place, length and hash.

    Args:
        description: JSON.
        content: of the index.
    """
    magic, form, place, _, _ = struct.unpack("<8sQQQ32s", content[:64])
    hashed = hashlib.blake2b(description, digest_size=32).digest()
    return struct.pack("<8sQQQ32s", magic, form, place, len(description), hashed) + content[64:place] + description
