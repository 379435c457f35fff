"""Checkpoints of state-spaces/mamba, whose package is for GPUs alone: transformers' models stand for theirs, which have
the same weights under nearly the same names, and read such a dictionary of tensors themselves."""

import json
import pickle

import pytest
import torch

from ssm_trn import LanguageModel, ModelConfig, interop
from ssm_trn.generation import generate

from .models import SIZE

VOCABULARY, PADDED = 45, 48
TOKENS = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
MAMBA = {"d_model": 32, "n_layer": 2, "vocab_size": VOCABULARY, "ssm_cfg": {}, "rms_norm": True}
MAMBA |= {"residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 8}
MAMBA2 = MAMBA | {"d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}, "tie_embeddings": True}
MAMBA2 |= {"ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 16, "ngroups": 2}}
CASES = {
    "state_spaces_mamba": (MAMBA, "MambaForCausalLM", {}),
    "state_spaces_mamba2": (
        MAMBA2,
        "Mamba2ForCausalLM",
        {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "tie_word_embeddings": True},
    ),
}
formats = pytest.mark.parametrize("format", CASES)


@pytest.fixture
def original(transformers, tmp_path):
    """A function: transformers' model for a format, and the folder of the same model as state-spaces writes it."""

    def make(format):
        config, name, options = CASES[format]
        model = getattr(transformers, name)
        torch.manual_seed(0)
        theirs = model(model.config_class(**{**SIZE, "vocab_size": PADDED, **options})).eval()
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
        weights = {name.replace("embeddings", "embedding"): value for name, value in theirs.state_dict().items()}
        folder = tmp_path / "original"
        folder.mkdir()
        torch.save(weights, folder / "pytorch_model.bin")
        (folder / "config.json").write_text(json.dumps(config))
        return theirs, folder

    return make


@formats
@torch.no_grad()
def test_they_are_the_same_models_and_go_back(original, format, tmp_path):
    theirs, folder = original(format)
    ours = interop.load(folder)
    expected = theirs(TOKENS).logits[..., :VOCABULARY]
    assert ((ours(TOKENS)[0] - expected).norm() / expected.norm()).item() < 1e-5
    prompts = TOKENS[:, :9]
    generated = theirs.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=64,
        do_sample=False,
        suppress_tokens=[*range(VOCABULARY, PADDED)],
    )
    assert generate(ours, prompts.tolist(), 64) == generated[:, 9:].tolist()
    interop.save(ours, tmp_path / "again", format)
    saved = torch.load(tmp_path / "again" / "pytorch_model.bin", weights_only=True)
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], value) for name, value in weights.items())
    theirs.load_state_dict(saved)  # transformers knows the names
    again = interop.load(tmp_path / "again")
    assert (again.config.vocab_size, again.config.padded_vocab_size) == (VOCABULARY, PADDED)
    assert torch.equal(again(TOKENS)[0], ours(TOKENS)[0])


@torch.no_grad()
def test_from_one_format_into_another(original, transformers, tmp_path):
    _, folder = original("state_spaces_mamba2")
    interop.save(interop.load(folder), tmp_path / "hf", "mamba2")
    theirs = transformers.Mamba2ForCausalLM.from_pretrained(tmp_path / "hf").eval()
    logits = interop.load(folder)(TOKENS)[0]
    assert ((theirs(TOKENS).logits - logits).norm() / logits.norm()).item() < 1e-5


@torch.no_grad()
def test_a_norm_before_the_gate_has_a_word(tmp_path):
    options = {"mixer": "mamba2", "head_dim": 16, "norm_before_gate": True, "feed_forward": "none"}
    model = LanguageModel(ModelConfig(VOCABULARY, 32, [options], tie_embeddings=False))
    interop.save(model, tmp_path, "state_spaces_mamba2")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["ssm_cfg"]["norm_before_gate"] is True and config["pad_vocab_size_multiple"] == 1
    assert torch.equal(interop.load(tmp_path)(TOKENS)[0], model(TOKENS)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_layer_idx": [1]}, r"attn_layer_idx = \[1\]: a model of ssm_trn can only have \[\] there"),
        ({"d_intermediate": 64}, "d_intermediate = 64"),
        ({"rms_norm": False}, "rms_norm = False"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "layer = 'Mamba3'"),
        ({"ssm_cfg": {"layer": "Mamba2", "rmsnorm": False}}, "rmsnorm = False"),
        ({"ssm_cfg": {"layer": "Mamba2", "dt_limit": [0.001, 0.1]}}, "dt_limit"),
        ({"ssm_cfg": {"layer": "Mamba1", "headdim": 8}}, "options unknown .* ssm_cfg.headdim = 8"),
        ({"ssm_cfg": 3}, "ssm_cfg = 3, which should be an object"),
    ],
)
def test_what_ours_lacks_is_told(original, changes, message):
    _, folder = original("state_spaces_mamba2")
    (folder / "config.json").write_text(json.dumps(MAMBA2 | changes))
    with pytest.raises(ValueError, match=message):
        interop.load(folder)


class Attack:
    def __reduce__(self):
        return eval, ("1 / 0",)  # must never run: it would be a ZeroDivisionError


@pytest.mark.parametrize("content", [Attack(), {"backbone.embedding.weight": Attack()}, [1], {"a": 3}, {1: TOKENS}])
def test_pickles_give_tensors_or_nothing(original, content):
    _, folder = original("state_spaces_mamba")
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin (is damaged, or holds more|is no dictionary of tensors)"):
        interop.load(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(ValueError, match="pytorch_model.bin (is damaged, or holds more|is no dictionary of tensors)"):
        interop.load(folder)


def test_pickles_that_are_damaged(original):
    _, folder = original("state_spaces_mamba")
    whole = (folder / "pytorch_model.bin").read_bytes()
    for content in (b"", b"\x80\x02.", b"PK\x03\x04", whole[: len(whole) // 2], whole[:-10], bytes(range(256))):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(ValueError, match="pytorch_model.bin is damaged, or holds more than tensors"):
            interop.load(folder)
