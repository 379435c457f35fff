"""Generated tokens as text that comes piece by piece: whole characters only, and nothing of a stop string."""

import codecs
from collections.abc import Iterator, Sequence

from ssm_trn.data.tokenizer import Tokenizer
from ssm_trn.generation.loop import Generation


def encode_prompts(model, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """The tokens of each prompt, with the BOS in front that texts began with in training.

    Raises:
        ValueError: if model and tokenizer have different numbers of tokens, or UTF-8 cannot hold a prompt.
    """
    require_same_vocabulary(model, tokenizer)
    return [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in prompts]


def stream_text(
    generation: Generation, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()
) -> Iterator[list[str | None]]:
    """The new text of each row step by step, which may be empty; None for a row that has ended.

    A character comes when all its bytes are there, and text that may be the beginning of a stop string when it is clear
    that it is none. A row ends before the first stop string in its text: that string is not in it.

    Raises:
        ValueError: for an empty stop string.
    """
    decoders = [TextDecoder(tokenizer, stop_strings) for _ in generation.running]
    for tokens in generation:
        pieces: list[str | None] = []
        for row, (token, decoder) in enumerate(zip(tokens, decoders, strict=True)):
            piece = None if token is None else decoder.push(token)
            if decoder.stopped:
                generation.stop(row)
            elif piece is not None and not generation.running[row]:
                piece += decoder.finish()
            pieces.append(piece)
        yield pieces


class TextDecoder:
    """Turns the tokens of one row into text as they come.

    Attributes:
        stopped: whether a stop string was met; no text comes any more.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()):
        if isinstance(stop_strings, str) or not all(stop_strings):
            raise ValueError("stop_strings must be a list of strings, none of them empty")
        self.stopped = False
        self._tokenizer, self._stop_strings = tokenizer, tuple(stop_strings)
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token: int) -> str:
        """The text that one more token makes certain."""
        return self._release(self._bytes.decode(self._tokenizer.decode_bytes([token])))

    def finish(self) -> str:
        """What was held back, at the end of the row: half a character is U+FFFD."""
        return self._release(self._bytes.decode(b"", final=True), final=True)

    def _release(self, text: str, final: bool = False) -> str:
        if self.stopped:
            return ""
        self._held += text
        if starts := [self._held.find(stop) for stop in self._stop_strings if stop in self._held]:
            self.stopped = True
            return self._held[: min(starts)]
        certain = len(self._held) - (0 if final else self._possible_start())
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that a stop string may begin with."""
        return max(
            (n for stop in self._stop_strings for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0
        )


def require_same_vocabulary(model, tokenizer: Tokenizer) -> None:
    """A ValueError if the model has another number of tokens than the tokenizer."""
    if model.config.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"the model has {model.config.vocab_size} tokens, the tokenizer {tokenizer.vocab_size}: they are not of "
            "one run"
        )
