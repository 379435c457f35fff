"""`ssm-trn convert`, with the tokenizers of either side."""

import json
import re
from pathlib import Path

import pytest
import torch

from ssm_trn import LanguageModel, ModelConfig, interop
from ssm_trn.cli import main
from ssm_trn.data.tokenizer import Tokenizer
from ssm_trn.interop.command import convert
from ssm_trn.interop.formats import FORMATS
from ssm_trn.interop.tokenizer import export_tokenizer
from tests.data.conftest import make_documents
from tests.evaluation.models import tiny_model

from .models import VOCABULARY, theirs_of

DOCS = (Path(__file__).parents[2] / "docs" / "interop.md").read_text()

TEXT = "the people of the union\n shall"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a trained model, as it was before transformers could read it."""
    folder, tokenizer = tmp_path_factory.mktemp("run"), Tokenizer.train(make_documents(30, seed=1), 400)
    tiny_model("recurrent", 400).save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.model")
    (folder / "meta.json").write_text("{}")
    return folder


@torch.no_grad()
def test_a_run_becomes_a_model_of_transformers_and_comes_back(transformers, run, tmp_path, capsys):
    model = LanguageModel.from_pretrained(run)
    there, back = tmp_path / "there", tmp_path / "back"
    assert main(["convert", str(run), str(there)]) == 0
    assert "parameters in the format ssm_trn; config.json, generation_config.json, meta.json" in capsys.readouterr().out
    loaded = transformers.AutoModelForCausalLM.from_pretrained(there)
    tokenizer = transformers.AutoTokenizer.from_pretrained(there)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    assert ids[0, 1:].tolist() == Tokenizer.load(run / "tokenizer.model").encode(TEXT)
    assert torch.equal(loaded(ids).logits, model(ids)[0])
    assert (loaded.generation_config.bos_token_id, loaded.generation_config.eos_token_id) == (1, 2)
    assert main(["convert", str(there), str(back)]) == 0
    assert torch.equal(interop.load(back)(ids)[0], model(ids)[0])


@torch.no_grad()
def test_a_model_of_ours_in_anothers_format_with_its_tokenizer(transformers, run, tmp_path):
    theirs = tmp_path / "theirs"
    config = {"mixer": "mamba2", "d_state": 8, "head_dim": 16, "feed_forward": "none"}
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(400, 32, [config] * 2, vocab_multiple=128))
    own = tmp_path / "own"
    model.save_pretrained(own)
    (own / "tokenizer.model").write_bytes((run / "tokenizer.model").read_bytes())
    assert main(["convert", str(own), str(theirs), "--format", "mamba2"]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(theirs)
    assert isinstance(loaded, transformers.Mamba2ForCausalLM)
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id, loaded.config.pad_token_id) == (1, 2, 3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    assert torch.allclose(loaded(ids).logits, model(ids)[0], atol=1e-4)
    assert Tokenizer.load(theirs / "tokenizer.model").encode(TEXT) == ids[0, 1:].tolist()


@torch.no_grad()
def test_a_model_of_transformers_with_a_tokenizer_of_its_own(transformers, tmp_path):
    theirs, source, target = theirs_of(transformers, "mamba"), tmp_path / "source", tmp_path / "target"
    theirs.config.eos_token_id = 7
    theirs.generation_config.eos_token_id = 7
    theirs.save_pretrained(source)
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    (source / "tokenizer.model").write_bytes(b"another project's")
    (source / "modeling_mamba.py").write_text("1 / 0")
    (source / "generation_config.json").unlink()
    assert main(["convert", str(source), str(target)]) == 0
    assert (target / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert (target / "tokenizer.model").read_bytes() == b"another project's"
    assert not (target / "modeling_mamba.py").exists()
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 7
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target)
    tokens = torch.randint(VOCABULARY, (1, 20))
    assert torch.allclose(loaded(tokens).logits, theirs(tokens).logits, atol=1e-4)
    assert loaded.generation_config.eos_token_id == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "out"], "nowhere holds no model: there is no config.json; to fetch a model from the hub"),
        (["{run}", "{run}"], "is there already: choose another folder"),
        (["{run}", "{run}/tokenizer.model"], "tokenizer.model is there already: choose another folder"),
        (["{run}", "out", "--format", "mamba2"], "the format mamba2 has no layer like layer 0: mixer mamba2"),
        (["{run}", "out", "--format", "gguf"], "unknown format 'gguf': choose one of ssm_trn, mamba"),
    ],
)
def test_wrong_calls(run, words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *(word.format(run=run) for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_is_interrupted_leaves_nothing_and_can_be_done_again(run, tmp_path, monkeypatch, error):
    def interrupted(path, text):
        raise error

    target = tmp_path / "new" / "out"
    with monkeypatch.context() as context:
        context.setattr("ssm_trn.interop.tokenizer.write_whole", interrupted)
        assert main(["convert", str(run), str(target)]) != 0
    assert not target.exists() and not list(target.parent.iterdir())
    (target.parent / ".out.unfinished").mkdir()  # of one that was killed
    (target.parent / ".out.unfinished" / "model.safetensors").write_text("half")
    target.mkdir()
    assert main(["convert", str(run), str(target)]) == 0
    assert list(target.parent.iterdir()) == [target]
    LanguageModel.from_pretrained(target)


def test_the_documents_and_the_help_name_every_format():
    assert set(re.findall(r"^\| `(\w+)` \|", DOCS, re.MULTILINE)) == set(FORMATS)
    assert all(re.search(rf"\b{name}\b", convert.__doc__) for name in FORMATS)


def test_what_the_documents_type_works(transformers, run, tmp_path, monkeypatch):
    """On small models in the places that the page names."""
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer.load(run / "tokenizer.model")
    for folder, layers in (
        ("runs/llama_2m_sotu", ["attention"]),
        ("runs/mamba2_2m_sotu", ["mamba2"]),
        ("own", [{"mixer": "mamba2", "head_dim": 16, "feed_forward": "none"}]),
    ):
        LanguageModel(ModelConfig(400, 32, layers)).save_pretrained(folder)
        tokenizer.save(f"{folder}/tokenizer.model")
        export_tokenizer(tokenizer, folder)
    assert main(["convert", "own", "downloads/mamba2-130m", "--format", "mamba2"]) == 0
    commands = [line.split("#")[0].split() for line in re.findall(r"^    ssm-trn (.*)", DOCS, re.MULTILINE)]
    assert len(commands) == 2
    for words in commands:
        assert main(words) == 0
    for code in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL):
        exec(code, {})
