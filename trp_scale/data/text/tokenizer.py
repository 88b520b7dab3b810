"""The tokenizer of a data set: trained here, or a given Hugging Face directory; stored beside the shards."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from trp_scale.config.json_files import read_object
from trp_scale.data.index import write_json
from trp_scale.errors import DataError, error_text
from trp_scale.storage.files import temporary_beside

LARGEST = 256 << 20
"""Bytes of tokenizer.json; those of large vocabularies have some 20 MB."""

SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
"""Roles that pre-training needs, and what a tokenizer trained here calls them."""


MAX_ALPHABET = 1000
"""Different characters a trained vocabulary holds, the most frequent; text of all scripts has far more."""


def train_word_piece(texts: Callable[[], Iterable[str]], vocab_size: int, lowercase: bool) -> Tokenizer:
    """Train WordPiece with BERT's normalization. The same texts give the same vocabulary, numbers included.

    The trainer numbers continuing letters ("##a") in the order of a hash table, which changes from run to run, and
    breaks ties between merges by these numbers. So they are found first, and given in a fixed order as if special.

    Args:
        texts: gives the texts from the start each time it is called.
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
    """The vocabulary of one run of the trainer, with `first` at its beginning."""
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
    """Write a Hugging Face directory (tokenizer.json, tokenizer_config.json, vocab.txt), whole under its final name."""
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


def open_given(directory: Path, *, flag: str) -> Any:
    """A Hugging Face tokenizer directory, as transformers opens it; Python code that lies in it is not run.

    Raises:
        DataError: there is no such directory, or transformers cannot load it.
    """
    from transformers import AutoTokenizer

    if not directory.is_dir():  # transformers would look for a model of that name among those it has downloaded
        raise DataError(
            f"{directory}: no such directory; give {flag} DIR, where a tokenizer lies. Names on a hub are not loaded"
        )
    for path in sorted(directory.glob("*.json")):  # under our limits, before a library reads them
        read_object(path, DataError, largest=LARGEST)
    try:
        # Left to itself, transformers asks on the terminal whether such code is to run, and takes a pipe's "y".
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # the tokenizers library raises plain ones, and its panics, which are no Exception
        _pass_on(error)
        raise DataError(
            f"{directory}: transformers cannot load a tokenizer from it ({error_text(error)}); give {flag} DIR, one "
            "that needs no code of its own: such code is never run"
        ) from error


def _pass_on(error: BaseException) -> None:
    """Raise what is no fault of a file: it ends the process."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error


def save_given(source: Path, directory: Path) -> None:
    """Copy a Hugging Face tokenizer directory in the form this transformers writes, under its final name at once.

    Raises:
        DataError: transformers cannot load it, or it has no fast (Rust) form.
    """
    tokenizer = open_given(source, flag="--tokenizer")
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
    """Give a whole tokenizer its name. Where another process was faster, its one stays: it is of the same texts."""
    try:
        temporary.replace(directory)
    except OSError:
        if not (directory / "tokenizer.json").is_file():
            raise
        shutil.rmtree(temporary)


def load_for_sharding(directory: Path) -> Tokenizer:
    """The tokenizer of a data set as sharding needs it: no truncation, no padding, and text that spells a special
    token ("[MASK]") stays text, so that no stored piece is special but the unknown one.

    Raises:
        DataError: it is not there, or damaged.
    """
    path = directory / "tokenizer.json"
    read_object(path, DataError, largest=LARGEST)
    with _of_tokenizers(path):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
    try_out(tokenizer, path)
    return tokenizer


def try_out(tokenizer: Tokenizer, path: Path) -> Encoding:
    """A pair of words and what no vocabulary has as pieces: a model that lacks its own unknown piece raises when it
    meets a word that it does not know, which may be in the last of a million documents.

    Raises:
        DataError: it cannot make them.
    """
    with _of_tokenizers(path):
        tokenizer.encode("\U0010fffd")
        return tokenizer.encode("a", "b")


@contextmanager
def _of_tokenizers(path: Path) -> Iterator[None]:
    """Convert errors of the tokenizers library about a file.

    Raises:
        DataError: it fails.
    """
    try:
        yield
    except BaseException as error:  # as in open_given
        _pass_on(error)
        raise DataError(f"{path}: not a tokenizer that can be used ({error_text(error)}); copy it again") from error


def special_tokens(directory: Path) -> tuple[dict[str, int], list[int]]:
    """Numbers of the special tokens of a saved tokenizer.

    Returns:
        The number of each role in SPECIAL_TOKENS, and all numbers that are special (sorted).

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
    """One more than the largest piece number."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def is_bert_word_piece(tokenizer: Tokenizer) -> bool:
    """Whether pieces depend on nothing beyond white space: BERT's normalizer and pre-tokenizer over WordPiece."""
    if any(not added.special for added in tokenizer.get_added_tokens_decoder().values()):
        return False
    return (
        isinstance(tokenizer.model, models.WordPiece)
        and isinstance(tokenizer.normalizer, normalizers.BertNormalizer)
        and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
    )
