"""Our tokenizer as files that transformers reads: tokenizer.json, tokenizer_config.json and generation_config.json.

The ids are the same for every text, the four special pieces included, which are plain text where a text holds them.
Two things make that simple: nothing is normalised, and the pieces are written with the spaces that they stand for
instead of sentencepiece's sign U+2581, so that a U+2581 in a text is an unknown character and is spelled in bytes here
as it is there. `tokenizer(text)` begins with BOS, as texts did in training; `add_special_tokens=False` leaves it out.
"""

import json
from pathlib import Path
from typing import Any

from ssm_trn.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer
from ssm_trn.files import write_whole

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SPECIAL_TOKENS = {"unk_token": UNK_ID, "bos_token": BOS_ID, "eos_token": EOS_ID, "pad_token": PAD_ID}


def export_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Writes the files beside a model, each whole or not at all. They need no library to be written."""
    names = {name: tokenizer.pieces[id] for name, id in SPECIAL_TOKENS.items()}
    settings = {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "split_special_tokens": True,  # "</s>" in a text is text
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    ids = {f"{name}_id": id for name, id in SPECIAL_TOKENS.items() if name != "unk_token"}
    for name, content in zip(TOKENIZER_FILES, (_tokenizer_json(tokenizer), settings, ids), strict=True):
        write_whole(Path(folder) / name, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The file of the library `tokenizers`: a BPE model with bytes for unknown characters, and BOS before each text."""
    pieces = [piece.replace("\u2581", " ") for piece in tokenizer.pieces]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    begin = [{"SpecialToken": {"id": pieces[BOS_ID], "type_id": 0}}]
    first, second = ([{"Sequence": {"id": name, "type_id": 0}}] for name in "AB")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": pieces[id], "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for id in SPECIAL_TOKENS.values()
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": begin + first,
            "pair": begin + first + second,
            "special_tokens": {pieces[BOS_ID]: {"id": pieces[BOS_ID], "ids": [BOS_ID], "tokens": [pieces[BOS_ID]]}},
        },
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": pieces[UNK_ID],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": _merges(pieces, vocabulary),
        },
    }


def _merges(pieces: list[str], vocabulary: dict[str, int]) -> list[list[str]]:
    """The pairs of pieces that make a piece, those of the best-scored piece first.

    sentencepiece scores pieces in the order of their ids and merges whatever pair makes the best one.
    """
    merges = []
    for piece in pieces[len(SPECIAL_TOKENS) + 256 :]:
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        merges += [[left, right] for left, right in cuts if left in vocabulary and right in vocabulary]
    return merges
