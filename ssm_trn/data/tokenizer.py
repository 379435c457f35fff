"""A lossless sentencepiece BPE tokenizer: decode(encode(text)) == text for every text.

Nothing is normalised, and characters outside the vocabulary are spelled in their UTF-8 bytes. The one character that
sentencepiece cannot carry is U+2581, its own sign for a space: that too is spelled in bytes.

The model is trained on single lines, and no piece goes on from a word to the space behind it. So a text may be encoded
word by word, each with the spaces before it: the ids are the same, and a word that came before need only be looked up.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import sentencepiece

UNK_ID, BOS_ID, EOS_ID, PAD_ID = 0, 1, 2, 3

_SPACE_SIGN = "\u2581"
_WORDS = re.compile(f"\n|{_SPACE_SIGN}| *[^ \n{_SPACE_SIGN}]+| +")
_LINES = re.compile(f"\n|{_SPACE_SIGN}|[^\n{_SPACE_SIGN}]+")
_CROSSES_WORDS = re.compile(f"[^{_SPACE_SIGN}]{_SPACE_SIGN}")
_REMEMBERED = 2**17  # words whose ids are kept: nearly all that a text consists of, in some 30 MB
_SMALLEST_VOCABULARY = 4 + 256 + 1  # special ids, single bytes, one character
_LARGEST_VOCABULARY = 2**31 - 1
_LONGEST_LINE = 65536  # bytes; sentencepiece drops longer training lines without a word


class Tokenizer:
    """Text to ids and back.

    Attributes:
        vocab_size: number of ids, with the four special ones (unk 0, bos 1, eos 2, pad 3) and the 256 of single bytes.
        bos_id, eos_id, pad_id: special ids; `encode` never yields them.
        pieces: what sentencepiece calls each id.
        piece_bytes: int64 [vocab_size], how many UTF-8 bytes of text each id stands for: 0 for the special ids. The sum
            over the ids of a text is its length in bytes.
        hash: SHA-256 of the list of pieces, in hexadecimal. Unlike the model file, it does not depend on how the
            pieces were found.
    """

    bos_id, eos_id, pad_id = BOS_ID, EOS_ID, PAD_ID

    def __init__(self, model: bytes) -> None:
        """Takes the content of a model file. Raises ValueError if it is not one that `Tokenizer.train` made."""
        self._model = model
        self._processor = processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError("this is not a sentencepiece model: make one with `ssm-trn prepare`") from error
        special_ids = processor.unk_id(), processor.bos_id(), processor.eos_id(), processor.pad_id()
        if special_ids != (UNK_ID, BOS_ID, EOS_ID, PAD_ID) or processor.piece_to_id("<0x00>") == UNK_ID:
            raise ValueError(
                "the sentencepiece model lacks the special ids unk 0, bos 1, eos 2, pad 3 or the pieces of single "
                "bytes: make one with `ssm-trn prepare`"
            )
        self.vocab_size: int = processor.vocab_size()
        self._texts = [self._text_of(id) for id in range(self.vocab_size)]
        self.piece_bytes = np.array([len(text) for text in self._texts], dtype=np.int64)
        self.pieces = [processor.id_to_piece(id) for id in range(self.vocab_size)]
        self.hash = hashlib.sha256("\0".join(self.pieces).encode()).hexdigest()
        crosses = any(map(_CROSSES_WORDS.search, self.pieces))  # those of other projects may
        self._parts_of = (_LINES if crosses else _WORDS).findall
        self._spelled = {
            "\n": processor.encode("\n"),
            _SPACE_SIGN: [processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_SIGN.encode()],
        }
        self._ids_of = dict(self._spelled)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learns a vocabulary from the lines of texts.

        Raises ValueError if there is no text, or if `vocab_size` is too large or too small for it.
        """
        if vocab_size < _SMALLEST_VOCABULARY:
            raise ValueError(f"vocab_size {vocab_size} is too small: choose at least {_SMALLEST_VOCABULARY}")
        if vocab_size > _LARGEST_VOCABULARY:
            raise ValueError(f"vocab_size {vocab_size} is too large: choose at most {_LARGEST_VOCABULARY}")
        written = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_lines(texts),
                model_writer=written,
                model_type="bpe",
                vocab_size=vocab_size,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                split_digits=True,
                allow_whitespace_only_pieces=True,
                unk_id=UNK_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                pad_id=PAD_ID,
                max_sentence_length=_LONGEST_LINE,
                character_coverage=0.9995,  # the rarest characters are spelled in bytes and take no place
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise ValueError(_training_error(str(error), vocab_size)) from error
        return cls(written.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a model file. Raises FileNotFoundError, or ValueError if it is not one that `Tokenizer.train` made."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no tokenizer at {path}: make one with `ssm-trn prepare`")
        try:
            return cls(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the model file."""
        Path(path).write_bytes(self._model)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without BOS and EOS. Raises ValueError if UTF-8 cannot hold the text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], threads: int = -1) -> list[list[int]]:
        """`[encode(text) for text in texts]`, on all cores or so many threads."""
        if len(self._ids_of) > _REMEMBERED:
            self._ids_of = dict(self._spelled)
        ids_of = self._ids_of
        parts = [self._parts_of(_checked(text)) for text in texts]
        unknown = list(set().union(*parts) - ids_of.keys())
        ids_of.update(zip(unknown, self._processor.encode(unknown, num_threads=threads), strict=True))
        return [list(chain.from_iterable(map(ids_of.__getitem__, of_text))) for of_text in parts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special ids stand for no text; bytes that are not UTF-8 (half a character) become U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The text of ids in UTF-8; a character may begin in one id and end in another."""
        ids = [*map(int, ids)]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(
                f"ids from {min(ids)} to {max(ids)} are not all in the vocabulary, 0 to {self.vocab_size - 1}"
            )
        return b"".join(map(self._texts.__getitem__, ids))

    def _text_of(self, id: int) -> bytes:
        if self._processor.is_control(id) or self._processor.is_unknown(id):
            return b""
        piece = self._processor.id_to_piece(id)
        if self._processor.is_byte(id):  # "<0x41>"
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE_SIGN, " ").encode()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """The lines of the texts, the longest ones cut: a character has at most 4 bytes."""
    longest = _LONGEST_LINE // 4
    for text in texts:
        for line in re.split(r"[\r\n]+", _checked(text)):
            for start in range(0, len(line), longest):
                yield line[start : start + longest]


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a text has half of a surrogate pair at character {error.start}, which UTF-8 cannot hold: remove it"
        ) from error
    return text


def _training_error(message: str, vocab_size: int) -> str:
    """The three ways in which training fails, from sentencepiece's words to a sentence with the mend."""
    if match := re.search(r"Vocabulary size too high .* value <= (\d+)", message):
        return f"vocab_size {vocab_size} is too large for this text: choose at most {match[1]}"
    if match := re.search(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)", message):
        return f"vocab_size {vocab_size} is too small for this text: choose at least {match[1]}"
    if "!sentences_.empty()" in message:
        return "there is no text to learn a vocabulary from"
    return f"training the tokenizer failed: {message}"
