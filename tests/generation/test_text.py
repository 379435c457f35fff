"""Text that streams: whole characters, and nothing of a stop string."""

import random

import pytest
import torch

from ssm_trn.data.tokenizer import Tokenizer
from ssm_trn.generation import Generation, encode_prompts, generate, stream_text
from ssm_trn.generation.text import TextDecoder
from tests.evaluation.models import BigramModel

TEXT = "the free people of the nation must work for peace and the state of the law"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT], 290)


def bytes_of(tokenizer, text: bytes) -> list[int]:
    """The tokens that spell bytes one by one."""
    single = {tokenizer.decode_bytes([id]): id for id in range(4, 260)}
    return [single[text[i : i + 1]] for i in range(len(text))]


def test_characters_come_when_they_are_whole(tokenizer):
    decoder, pieces = TextDecoder(tokenizer), []
    for token in bytes_of(tokenizer, "aé中🙂\n".encode()):
        pieces.append(decoder.push(token))
    assert pieces == ["a", "", "é", "", "", "中", "", "", "", "🙂", "\n"] and decoder.finish() == ""


def test_pieces_make_the_decoded_text_whatever_the_bytes(tokenizer):
    bytes_alone = bytes_of(tokenizer, bytes(range(256)))
    some = [*range(260, tokenizer.vocab_size), *bytes_of(tokenizer, "é中🙂".encode()), *range(4)]
    generator = random.Random(0)
    for _ in range(50):
        tokens = [generator.choice(generator.choice([bytes_alone, some])) for _ in range(40)]
        decoder = TextDecoder(tokenizer)
        assert "".join(map(decoder.push, tokens)) + decoder.finish() == tokenizer.decode(tokens)


def cut(text: str, stop_strings) -> str | None:
    """The text before the first stop string in it; None where there is none."""
    starts = [text.find(stop) for stop in stop_strings if stop in text]
    return text[: min(starts)] if starts else None


def test_text_ends_before_the_first_stop_string_and_shows_nothing_of_it(tokenizer):
    generator, ended = random.Random(0), 0

    def word(longest):
        return "".join(generator.choices("ab", k=generator.randint(1, longest)))

    for _ in range(500):
        stop_strings, text = [word(4) for _ in range(generator.randint(1, 3))], word(30)
        decoder, shown = TextDecoder(tokenizer, stop_strings), ""
        for length, token in enumerate(bytes_of(tokenizer, text.encode()), 1):
            shown += decoder.push(token)
            seen = text[:length]
            if (expected := cut(seen, stop_strings)) is not None:
                assert decoder.stopped and shown == expected and decoder.push(token) == decoder.finish() == ""
                ended += 1
                break
            # What is held back is the longest end of the text with which a stop string may begin.
            ends = (seen[start:] for start in range(length + 1))
            held = next(end for end in ends if any(stop.startswith(end) for stop in stop_strings))
            assert not decoder.stopped and shown + held == seen
        else:
            assert shown + decoder.finish() == text
    assert 100 < ended < 450


def planted(tokenizer, **texts: str) -> BigramModel:
    """A model whose likeliest path from the special token of a name goes through its text to EOS.

    No token may come twice.
    """
    starts = [getattr(tokenizer, f"{name}_id") for name in texts]
    paths = [[start, *tokenizer.encode(text)] for start, text in zip(starts, texts.values(), strict=True)]
    assert len(set(sum(paths, []))) == len(sum(paths, []))
    table = torch.zeros(tokenizer.vocab_size, tokenizer.vocab_size)
    for path in paths:
        table[path, [*path[1:], tokenizer.eos_id]] = 5.0
    return BigramModel(table)


def streamed(model, tokenizer, prompts, stop_strings=(), max_new_tokens=30):
    generation = Generation(model, prompts, max_new_tokens, stop_tokens=[tokenizer.eos_id])
    return generation, list(stream_text(generation, tokenizer, stop_strings))


def shown_in(steps) -> list[str]:
    """The text of each row; after a row has ended there is None alone."""
    rows = [[step[row] for step in steps] for row in range(len(steps[0]))]
    texts = [[piece for piece in row if piece is not None] for row in rows]
    assert all(row[len(text) :] == [None] * (len(row) - len(text)) for row, text in zip(rows, texts, strict=True))
    return ["".join(text) for text in texts]


def test_rows_stream_side_by_side_and_end_by_themselves(tokenizer):
    model = planted(tokenizer, bos="pe🙂ol", pad="é")
    generation, steps = streamed(model, tokenizer, [[tokenizer.bos_id], [tokenizer.pad_id]])
    assert shown_in(steps) == ["pe🙂ol", "é"]
    assert len(steps) == len(generation.tokens[0]) > len(generation.tokens[1]) == 3  # two bytes and EOS
    assert [step[1] for step in steps[:3]] == ["", "é", ""]


def test_a_stop_string_ends_its_row_alone(tokenizer):
    model = planted(tokenizer, bos="pe🙂ol", pad="mu wk")
    generation, steps = streamed(model, tokenizer, [[tokenizer.bos_id], [tokenizer.pad_id]], ["e🙂o"])
    assert shown_in(steps) == ["p", "mu wk"]
    assert [tokens[-1] == tokenizer.eos_id for tokens in generation.tokens] == [False, True]


def test_what_is_held_back_comes_at_the_end(tokenizer):
    """Half a character, or the beginning of a stop string, when the row has its last token."""
    model, bos = planted(tokenizer, bos="mu🙂"), [[tokenizer.bos_id]]
    before = len(tokenizer.encode("mu"))
    _, steps = streamed(model, tokenizer, bos, max_new_tokens=before + 3)
    assert steps[before:] == [[""], [""], ["\N{REPLACEMENT CHARACTER}"]]
    _, steps = streamed(model, tokenizer, bos, ["🙂!", "u🙂?"])
    assert [piece for (piece,) in steps if piece] == ["m", "u🙂"] and steps[-1] == ["u🙂"]


def test_prompts_begin_with_bos_and_their_text(tokenizer):
    model = BigramModel(torch.zeros(tokenizer.vocab_size, tokenizer.vocab_size))
    rows = encode_prompts(model, tokenizer, ["", "free 🙂"])
    assert rows[0] == [tokenizer.bos_id] and rows[1][0] == tokenizer.bos_id
    assert tokenizer.decode(rows[1]) == "free 🙂"
    assert len(generate(model, rows, 2)) == 2


def test_wrong_input_is_told_in_one_sentence(tokenizer):
    with pytest.raises(ValueError, match="the model has 9 tokens, the tokenizer 290: they are not of one run"):
        encode_prompts(BigramModel(torch.zeros(9, 9)), tokenizer, ["a"])
    for stop_strings in ([""], ["a", ""], "stop"):
        with pytest.raises(ValueError, match="stop_strings must be a list of strings, none of them empty"):
            TextDecoder(tokenizer, stop_strings)
