import torch
from torch import nn

from ssm_trn import LanguageModel, ModelConfig
from ssm_trn.training import parameter_groups

MIXED = ["mamba", "mamba2", "gated_deltanet", {"mixer": "attention", "qk_norm": True}]
EXPECTED = [
    "embedding.weight",
    "blocks.0.mixer_norm.weight",
    "blocks.0.mixer.dt_bias",
    "blocks.0.mixer.A_log",
    "blocks.0.mixer.D",
    "blocks.0.mixer.conv.bias",
    "blocks.0.feed_forward_norm.weight",
    "blocks.1.mixer_norm.weight",
    "blocks.1.mixer.A_log",
    "blocks.1.mixer.dt_bias",
    "blocks.1.mixer.D",
    "blocks.1.mixer.conv.bias",
    "blocks.1.mixer.norm.weight",
    "blocks.1.feed_forward_norm.weight",
    "blocks.2.mixer_norm.weight",
    "blocks.2.mixer.A_log",
    "blocks.2.mixer.dt_bias",
    "blocks.2.mixer.norm.weight",
    "blocks.2.feed_forward_norm.weight",
    "blocks.3.mixer_norm.weight",
    "blocks.3.mixer.q_norm.weight",
    "blocks.3.mixer.k_norm.weight",
    "blocks.3.feed_forward_norm.weight",
    "norm.weight",
]


def names(groups, weight_decay):
    return [name for group in groups if group["weight_decay"] == weight_decay for name, _ in group["params"]]


def model(**options):
    return LanguageModel(ModelConfig(vocab_size=50, d_model=64, layers=MIXED, **options))


def test_the_exact_parameters_without_weight_decay():
    kept = names(parameter_groups(model(), weight_decay=0.1), 0.0)
    assert kept == EXPECTED


def test_all_other_parameters_are_decayed_and_none_twice():
    network = model()
    groups = parameter_groups(network, weight_decay=0.1)
    assert names(groups, 0.1) == [name for name, _ in network.named_parameters() if name not in EXPECTED]
    assert all("norm" not in name and "bias" not in name for name in names(groups, 0.1))


def test_gates_and_decays_of_recurrences_are_not_decayed():
    layers = ["linear_attention", "based", {"mixer": "hgrn2", "lower_bound": 0.5}, "gated_deltaproduct", "rg_lru"]
    groups = parameter_groups(LanguageModel(ModelConfig(50, 64, layers)), 0.1)
    kept = {name.partition("mixer.")[2] for name in names(groups, 0.0) if "mixer." in name}
    assert kept == {
        *("gamma_logit", "norm.weight"),
        *("A_log", "dt_bias"),
        *("Lambda", "in_proj.bias", "conv.bias", "input_gate.bias", "recurrence_gate.bias", "out_proj.bias"),
    }


def test_embeddings_are_decayed_on_request_and_a_separate_head_always():
    assert "embedding.weight" in names(parameter_groups(model(), 0.1, decay_embeddings=True), 0.1)
    untied = parameter_groups(model(tie_embeddings=False), 0.1)
    assert "embedding.weight" in names(untied, 0.0) and "head.weight" in names(untied, 0.1)


def test_a_module_may_exempt_its_parameters_and_frozen_ones_are_left_out():
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    layers[0].no_weight_decay = True
    layers.to("meta").to_empty(device="cpu")  # the parameters are others then
    layers[2].requires_grad_(False)
    groups = parameter_groups(layers, weight_decay=0.1)
    assert names(groups, 0.1) == ["1.weight"] and names(groups, 0.0) == ["0.weight", "0.bias", "1.bias"]


def test_the_optimizer_takes_the_groups_with_their_names():
    optimizer = torch.optim.AdamW(parameter_groups(model(), weight_decay=0.1), lr=1.0)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[1]["param_names"] == EXPECTED
