"""`ssm-trn generate`: text that comes token by token, whole characters only."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from itertools import pairwise

import pytest
import torch

from ssm_trn.cli import main
from ssm_trn.data.tokenizer import Tokenizer
from ssm_trn.generation import Sampling, command, encode_prompts, generate
from tests.evaluation.models import BigramModel, tiny_model

TEXT = "the free people of the nation must work for peace and the state of the law"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    Tokenizer.train([TEXT], 290).save(folder / "tokenizer.model")
    tiny_model("hybrid", 290).save_pretrained(folder)
    return str(folder)


class Terminal(io.StringIO):
    """Keeps what is visible: what was written before each flush."""

    def __init__(self):
        super().__init__()
        self.visible = [""]

    def flush(self):
        self.visible.append(self.getvalue())

    def parts(self) -> list[str]:
        """What each flush brought to light."""
        return [after.removeprefix(before) for before, after in pairwise(self.visible) if after != before]


def written(*words) -> Terminal:
    with redirect_stdout(Terminal()) as terminal:
        assert main(["generate", *words]) == 0
    return terminal


def expected_texts(run, prompts, count, seed=0, sampling=None):
    model, tokenizer = tiny_model("hybrid", 290), Tokenizer.load(f"{run}/tokenizer.model")
    rows = [
        generate(model, [row], count, sampling=sampling or Sampling(0.8), seed=seed + i, stop_tokens=[tokenizer.eos_id])
        for i, row in enumerate(encode_prompts(model, tokenizer, prompts))
    ]
    return [prompt + tokenizer.decode(tokens) for prompt, [tokens] in zip(prompts, rows, strict=True)]


def test_text_follows_the_prompt_token_by_token(run):
    [text] = expected_texts(run, ["free 中"], 30, seed=3)
    first, *pieces = written(run, "--prompt", "free 中", "--max_new_tokens", "30", "--seed", "3").parts()
    assert first == "free 中" and "".join([first, *pieces]) == text + "\n"
    assert len(pieces) > 15  # most tokens are visible at once


def test_a_character_of_several_tokens_is_written_whole(run, monkeypatch):
    tokenizer = Tokenizer.load(f"{run}/tokenizer.model")
    path = [tokenizer.bos_id, *tokenizer.encode("mu🙂 é\n"), tokenizer.eos_id]
    table = torch.zeros(290, 290)
    table[path[:-1], path[1:]] = 50.0
    monkeypatch.setattr(command.LanguageModel, "from_pretrained", lambda *arguments: BigramModel(table))
    terminal = written(run)
    assert terminal.getvalue() == "mu🙂 é\n\n" and {"🙂", "é"} <= set(terminal.parts())


def test_options_reach_the_choice_of_tokens(run):
    options = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    [expected] = expected_texts(run, ["peace"], 25, sampling=Sampling(**options))
    assert written(run, "--prompt", "peace", "--max_new_tokens", "25", *words).getvalue() == expected + "\n"


def test_the_stop_text_is_not_written(run):
    [text] = expected_texts(run, [""], 30, sampling=Sampling())
    stop = text[10:13]
    terminal = written(run, "--max_new_tokens", "30", "--temperature", "0", "--stop", stop)
    assert terminal.getvalue() == text[: text.index(stop)] + "\n"


@pytest.mark.parametrize("batch_size", ["1", "2", "16"])
def test_several_prompts_come_one_after_the_other(run, tmp_path, monkeypatch, batch_size):
    prompts = ["the nation", "1945", " é 🙂", "null", "must work for peace"]
    texts = expected_texts(run, prompts, 12, seed=7)
    (tmp_path / "prompts.txt").write_text("\n".join([prompts[0], "", *prompts[1:]]) + "\n", encoding="utf-8")
    words = [run, "--max_new_tokens", "12", "--seed", "7", "--batch_size", batch_size, "--prompts"]
    output = tmp_path / "new" / "texts.jsonl"
    terminal = written(*words, str(tmp_path / "prompts.txt"), "--output", str(output))
    assert terminal.getvalue() == "\n\n".join(texts) + "\n"
    assert len(terminal.parts()) > 30
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    assert [line["prompt"] + line["text"] for line in lines] == texts
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeff".encode() + "\r\n".join(prompts).encode())))
    assert written(*words, "-").getvalue() == terminal.getvalue()


def test_prompts_that_look_like_values_of_another_kind_are_text(run):
    for prompt in ("1945", "null", "# x", "[a, b]", "a: b", "'quoted'", "", "- item"):
        text = written(run, "--prompt", prompt, "--max_new_tokens", "2").getvalue()
        assert text.startswith(prompt) and text.endswith("\n")


def test_ctrl_c_leaves_whole_lines_and_130(run, capsys, monkeypatch):
    model, steps = tiny_model("hybrid", 290), iter(range(5))
    features = model.features

    def interrupted(*arguments, **options):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return features(*arguments, **options)

    monkeypatch.setattr(model, "features", interrupted)
    monkeypatch.setattr(command.LanguageModel, "from_pretrained", lambda *arguments: model)
    assert main(["generate", run, "--prompt", "free"]) == 130
    captured = capsys.readouterr()
    assert captured.out.startswith("free") and len(captured.out) > 5 and captured.out.endswith("\n")
    assert captured.err == "ssm-trn: stopped\n"


def test_text_comes_while_it_is_made_and_ends_when_nobody_reads_it(run):
    words = [sys.executable, "-m", "ssm_trn", "generate", run, "--prompt", "free", "--max_new_tokens", "1000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*words, "--temperature", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout.read(8).startswith(b"free")
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prompt", "a", "--prompts", "b"], "prompts are either in --prompt or in the file of --prompts"),
        (["--prompts", "nowhere.txt"], "nowhere.txt: no such file or directory"),
        (["--prompts", "empty.txt"], "empty.txt holds no prompt: write one in each line"),
        (["--prompts", "bytes.txt"], "bytes.txt is not UTF-8 text, at byte 1"),
        (["--prompts", "-"], "standard input is not UTF-8 text, at byte 0"),
        (["--temperature", "-1"], "temperature is -1.0; it must be 0"),
        (["--top_p", "0"], "top_p is 0.0; it must be above 0 and at most 1"),
        (["--max_new_tokens", "0"], "max_new_tokens is 0; it must be at least 1"),
        (["--batch_size", "0"], "batch_size is 0; it must be at least 1"),
        (["--output", "."], ". is a folder: name a file with --output"),
        (["--device", "abacus"], "'abacus' names no device"),
        (["--seed", "x"], "seed: Expected a <class 'int'>"),
        (["--seed", str(2**64)], f"the seeds go from {2**64} to {2**64}: choose such as 64 bits can hold"),
    ],
)
def test_wrong_input_is_told_in_one_sentence(run, tmp_path, capsys, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bytes.txt").write_bytes(b"a\xff")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert main(["generate", run, *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ssm-trn: error: ") and sentence in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_folder_without_a_model_or_with_another_tokenizer(run, tmp_path, capsys):
    assert main(["generate", str(tmp_path)]) == 2
    assert "holds no model" in capsys.readouterr().err
    tiny_model("hybrid", 291).save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path)]) == 2
    assert "there is no tokenizer at" in capsys.readouterr().err
    Tokenizer.load(f"{run}/tokenizer.model").save(tmp_path / "tokenizer.model")
    assert main(["generate", str(tmp_path)]) == 2
    assert "the model has 291 tokens, the tokenizer 290: they are not of one run" in capsys.readouterr().err
