"""`ssm-trn generate RUN_DIR`: what a trained model writes, as it writes it."""

import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssm_trn.data.token_file import TOKENIZER_FILE
from ssm_trn.data.tokenizer import Tokenizer
from ssm_trn.files import as_text, read_text, write_whole
from ssm_trn.generation.loop import Generation
from ssm_trn.generation.sampling import Sampling
from ssm_trn.generation.text import encode_prompts, stream_text
from ssm_trn.model import LanguageModel
from ssm_trn.runtime import available_device


def generate(
    run_dir: str,
    prompt: str = "",
    prompts: str | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    stop: str = "",
    seed: int = 0,
    batch_size: int = 16,
    device: str | None = None,
    output: str | None = None,
) -> None:
    """Goes on from a prompt, or from each of several, and prints the text as it comes.

    The same seed gives the same texts, whatever batch_size is.

    Args:
        run_dir: Folder of the run, after its training.
        prompt: How the text begins; by default the model begins by itself.
        prompts: A file with a prompt in each line instead; "-" reads them from standard input.
        max_new_tokens: Most tokens of a text; it ends earlier where the model ends it.
        temperature: The higher, the more surprising; 0 takes the likeliest token each time.
        top_k: Choose among this many of the likeliest tokens only.
        top_p: Choose among the likeliest tokens that have this probability together.
        repetition_penalty: Above 1 makes tokens less likely that the text already has.
        stop: End before this text, where it comes up.
        seed: Of the random numbers; the next prompt has the next seed.
        batch_size: Prompts at once.
        device: Such as cpu or cuda:0; by default a GPU where there is one.
        output: Write prompts and texts to this file as well, in JSON lines.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if output is not None and Path(output).is_dir():
        raise ValueError(f"{output} is a folder: name a file with --output")
    texts = _prompts(prompt, prompts)
    model = LanguageModel.from_pretrained(run_dir, available_device(device)).eval()
    tokenizer = Tokenizer.load(Path(run_dir) / TOKENIZER_FILE)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "sampling": Sampling(temperature, top_k, top_p, repetition_penalty),
        "stop_strings": [stop] if stop else [],
    }
    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)  # now, so that no text is lost for want of a place
    answers: list[str] = []
    try:
        for text, pieces in zip(texts, _answers(model, tokenizer, texts, batch_size, seed, **options), strict=True):
            print("\n\n" if answers else "", text, sep="", end="", flush=True)
            answers.append("")
            for piece in pieces:
                print(piece, end="", flush=True)
                answers[-1] += piece
    finally:
        if answers:
            print(flush=True)  # after Ctrl-C too: what comes next belongs on a line of its own
    if output is not None:
        entries = ({"prompt": text, "text": answer} for text, answer in zip(texts, answers, strict=True))
        write_whole(output, "".join(f"{json.dumps(entry, ensure_ascii=False)}\n" for entry in entries))


def _answers(
    model, tokenizer: Tokenizer, texts: list[str], batch_size: int, seed: int, stop_strings: list[str], **options
) -> Iterator[Iterator[str]]:
    """What follows each text, piece by piece; they are made in batches."""
    prompts = encode_prompts(model, tokenizer, texts)
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        generation = Generation(model, batch, stop_tokens=[tokenizer.eos_id], seed=seed + start, **options)
        yield from _row_by_row(stream_text(generation, tokenizer, stop_strings), len(batch))


def _row_by_row(steps: Iterator[list[str | None]], count: int) -> Iterator[Iterator[str]]:
    """The pieces of one row after the other. Those of the first come as they are made, those of the others wait."""
    waiting: list[deque[str | None]] = [deque() for _ in range(count)]

    def pieces_of(row: deque[str | None]) -> Iterator[str]:
        while True:
            if not row:
                step = next(steps, [None] * count)
                for other, piece in zip(waiting, step, strict=True):
                    other.append(piece)
            piece = row.popleft()
            if piece is None:
                return
            yield piece

    return (pieces_of(row) for row in waiting)


def _prompts(prompt: str, file: str | None) -> list[str]:
    if file is None:
        return [prompt]
    if prompt:
        raise ValueError("prompts are either in --prompt or in the file of --prompts: leave one out")
    source = "standard input" if file == "-" else file
    lines = as_text(sys.stdin.buffer.read(), source) if file == "-" else read_text(Path(file))
    lines = lines.removeprefix("\ufeff")  # the mark of UTF-8 that some editors write
    prompts = [line.rstrip("\r") for line in lines.split("\n") if line.strip()]
    if not prompts:
        raise ValueError(f"{source} holds no prompt: write one in each line")
    return prompts
