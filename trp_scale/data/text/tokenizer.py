"""Tokenizer of a data set, stored next to the shards: trained here, or copied from a Hugging Face directory."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from trp_scale.config.files import read_object
from trp_scale.data.index import write_json
from trp_scale.errors import DataError, error_text
from trp_scale.storage.files import temporary_beside

LARGEST = 256 << 20
"""Limit of bytes of tokenizer.json; large vocabularies have about 20 MB."""

SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
"""Roles that pre-training needs, and their tokens in a tokenizer that is trained here."""


MAX_ALPHABET = 1000
"""Limit of characters of a trained vocabulary; the most frequent are kept. Text of all scripts has far more."""


def train_word_piece(texts: Callable[[], Iterable[str]], vocab_size: int, lowercase: bool) -> Tokenizer:
    """Train WordPiece with BERT's normalization. The same texts give the same vocabulary and ids.

    The trainer numbers continuing letters ("##a") in the order of a hash table, which changes between runs, and breaks
    ties between merges by these numbers. A first pass finds them; the second gets them in a fixed order, as if special.

    Args:
        texts: returns the texts from the start on each call.
    """
    special = list(SPECIAL_TOKENS.values())
    characters: Counter[str] = Counter()
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    for text in texts():
        characters.update(normalizer.normalize_str(text))
    alphabet = sorted(
        sorted(character for character in characters if not character.isspace()),
        key=lambda character: -characters[character],
    )[:MAX_ALPHABET]
    letters = _train(texts(), 0, special, alphabet, lowercase)
    continuing = sorted(piece for piece in letters if len(piece) == 3 and piece.startswith("##"))
    vocabulary = _train(texts(), vocab_size, special + continuing, alphabet, lowercase)
    model = models.WordPiece(vocabulary, unk_token=SPECIAL_TOKENS["unk"], max_input_chars_per_word=100)
    tokenizer = _bert_pipeline(Tokenizer(model), lowercase)
    tokenizer.add_special_tokens(special)
    return tokenizer


def _train(
    texts: Iterable[str], vocab_size: int, first: list[str], alphabet: list[str], lowercase: bool
) -> dict[str, int]:
    """Run the trainer once; return the vocabulary, which starts with `first`."""
    tokenizer = _bert_pipeline(Tokenizer(models.WordPiece(unk_token=SPECIAL_TOKENS["unk"])), lowercase)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return dict(tokenizer.get_vocab())


def _bert_pipeline(tokenizer: Tokenizer, lowercase: bool) -> Tokenizer:
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def save_trained(tokenizer: Tokenizer, directory: Path, lowercase: bool, length: int) -> None:
    """Write a Hugging Face directory (tokenizer.json, tokenizer_config.json, vocab.txt) atomically."""
    temporary = _empty_temporary(directory)
    names = SPECIAL_TOKENS
    cls_id, sep_id = tokenizer.token_to_id(names["cls"]), tokenizer.token_to_id(names["sep"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{names['cls']} $A {names['sep']}",
        pair=f"{names['cls']} $A {names['sep']} $B:1 {names['sep']}:1",
        special_tokens=[(names["cls"], cls_id), (names["sep"], sep_id)],
    )
    tokenizer.save(str(temporary / "tokenizer.json"))
    numbers = tokenizer.get_vocab()
    vocabulary = sorted(numbers, key=lambda piece: numbers[piece])
    (temporary / "vocab.txt").write_text("".join(f"{piece}\n" for piece in vocabulary), encoding="utf-8")
    write_json(
        temporary / "tokenizer_config.json",
        {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": lowercase,
            "model_max_length": length,
            **{f"{role}_token": token for role, token in names.items()},
        },
    )
    _put(temporary, directory)


def open_tokenizer(directory: Path, *, flag: str) -> Any:
    """Open a Hugging Face tokenizer directory with transformers, without running Python code from it.

    Raises:
        DataError: the directory is missing, or transformers cannot load it.
    """
    from transformers import AutoTokenizer

    if not directory.is_dir():  # transformers would look for a downloaded model of that name
        raise DataError(
            f"{directory}: no such directory; give {flag} DIR with a tokenizer. Names on a hub are not downloaded"
        )
    for path in sorted(directory.glob("*.json")):  # check our limits before a library reads them
        read_object(path, DataError, largest=LARGEST)
    try:
        # By default transformers asks on the terminal whether to run such code, and accepts a "y" from a pipe.
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # panics of the tokenizers library are not Exceptions
        _reraise_exit(error)
        raise DataError(
            f"{directory}: transformers cannot load a tokenizer from it ({error_text(error)}); give {flag} DIR with a "
            "tokenizer that needs no code of its own: such code is never run"
        ) from error


def _reraise_exit(error: BaseException) -> None:
    """Raise errors that end the process and have nothing to do with a file."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error


def copy_tokenizer_directory(source: Path, directory: Path) -> None:
    """Copy a Hugging Face tokenizer directory atomically, in the form that this version of transformers writes.

    Raises:
        DataError: transformers cannot load it, or it has no fast (Rust) form.
    """
    tokenizer = open_tokenizer(source, flag="--tokenizer")
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"--tokenizer {source}: only tokenizers with a tokenizer.json (fast ones) give character offsets"
        )
    temporary = _empty_temporary(directory)
    tokenizer.save_pretrained(str(temporary))
    _put(temporary, directory)


def _empty_temporary(directory: Path) -> Path:
    temporary = temporary_beside(directory)
    temporary.mkdir(parents=True)
    return temporary


def _put(temporary: Path, directory: Path) -> None:
    """Rename a complete tokenizer; if another process was faster, keep its tokenizer, which has the same texts."""
    try:
        temporary.replace(directory)
    except OSError:
        if not (directory / "tokenizer.json").is_file():
            raise
        shutil.rmtree(temporary)


def load_for_sharding(directory: Path) -> Tokenizer:
    """Load the tokenizer of a data set for sharding, without truncation and padding. Text that spells a special token
    ("[MASK]") stays text: no stored piece is special except the unknown one.

    Raises:
        DataError: the tokenizer is missing or damaged.
    """
    path = directory / "tokenizer.json"
    read_object(path, DataError, largest=LARGEST)
    with _convert_errors(path):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
    check_encoding(tokenizer, path)
    return tokenizer


def check_encoding(tokenizer: Tokenizer, path: Path) -> Encoding:
    """Encode a pair of words and an unknown character: a model without its own unknown piece raises at an unknown word,
    which may be in the last of a million documents.

    Raises:
        DataError: encoding fails.
    """
    with _convert_errors(path):
        tokenizer.encode("\U0010fffd")
        return tokenizer.encode("a", "b")


@contextmanager
def _convert_errors(path: Path) -> Iterator[None]:
    """Context that converts errors of the tokenizers library to DataError."""
    try:
        yield
    except BaseException as error:  # as in open_tokenizer
        _reraise_exit(error)
        raise DataError(f"{path}: not a usable tokenizer ({error_text(error)}); copy it again") from error


def special_tokens(directory: Path) -> tuple[dict[str, int], list[int]]:
    """Return the id of each role in SPECIAL_TOKENS, and all special ids, sorted.

    Raises:
        DataError: a role has no token.
    """
    tokenizer = load_for_sharding(directory)
    config = read_object(directory / "tokenizer_config.json", DataError)
    roles: dict[str, int] = {}
    for role in SPECIAL_TOKENS:
        token = config.get(f"{role}_token")
        content = token.get("content") if isinstance(token, dict) else token
        number = tokenizer.token_to_id(content) if isinstance(content, str) else None
        if number is None:
            raise DataError(
                f"{directory}: the tokenizer has no {role} token; pre-training needs {list(SPECIAL_TOKENS)}"
            )
        roles[role] = number
    marked = {number for number, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    return roles, sorted(marked | set(roles.values()))


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest id + 1."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def is_bert_word_piece(tokenizer: Tokenizer) -> bool:
    """Whether pieces depend only on words between white space: BERT's normalizer and pre-tokenizer, WordPiece."""
    if any(not added.special for added in tokenizer.get_added_tokens_decoder().values()):
        return False
    return (
        isinstance(tokenizer.model, models.WordPiece)
        and isinstance(tokenizer.normalizer, normalizers.BertNormalizer)
        and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
    )
