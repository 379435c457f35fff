"""The plan of a training, and the experiments for trn1 that it is for, on shapes alone."""

import re
import shlex
from dataclasses import replace
from functools import wraps
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssm_trn import LanguageModel, ModelConfig, plan
from ssm_trn.cli import main
from ssm_trn.data import prepare as prepare_module
from ssm_trn.plan import GIB, MACHINES, Experiment, activation_bytes, trace_step
from ssm_trn.results import into_markers

ROOT = Path(__file__).parents[1]
PATHS = sorted(ROOT.glob("experiments/trn1_*.yaml"))
PAGE = ROOT / "docs" / "trn1_runs" / "README.md"
BUDGETS = {"130m": (130e6, 2.6e9), "340m": (340e6, 15e9)}  # parameters, tokens
HYBRID = ["mamba2", {"mixer": "attention", "n_heads": 2}]


def size_of(path: Path) -> str:
    return path.stem.split("_")[1]


@pytest.fixture(scope="module")
def runs() -> dict[str, Experiment]:
    return {path.stem: Experiment.read(path) for path in PATHS}


def write_experiment(path: Path, **trainer) -> Path:
    """An experiment in one file: 2 blocks of 16 tokens a batch, 4 batches a step, 8 steps."""
    model = {"init_args": {"config": {"vocab_size": 300, "d_model": 32, "layers": HYBRID}}}
    data = {"init_args": {"block_length": 16, "batch_size": 2}}
    trainer = {"max_steps": 8, "accumulate_grad_batches": 4, **trainer}
    path.write_text(yaml.safe_dump({"model": model, "data": data, "trainer": trainer}))
    return path


def test_there_are_three_models_of_two_sizes(runs):
    models = {"mamba2", "gated_deltanet_hybrid", "transformer"}
    assert set(runs) == {f"trn1_{size}_{model}" for size in BUDGETS for model in models}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_training_step_has_shapes_without_values(path, runs):
    run = runs[path.stem]
    model = trace_step(run.config, run.block_length)
    assert run.block_length == 2048
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape, name


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_size_and_tokens_are_those_of_its_name(path, runs):
    run, (parameters, tokens) = runs[path.stem], BUDGETS[size_of(path)]
    assert run.config.parameter_count() == pytest.approx(parameters, rel=0.01)
    assert run.step_tokens == 2**19
    assert 0 <= run.tokens - tokens < run.step_tokens, "the first step that reaches the budget is the last"


@pytest.mark.parametrize("size", BUDGETS)
def test_models_of_a_size_are_matched(size, runs):
    chosen = [run for name, run in runs.items() if f"_{size}_" in name]
    counts = [run.config.parameter_count() for run in chosen]
    assert max(counts) / min(counts) < 1.01
    settings = [yaml.safe_load(path.read_text()) for path in PATHS if size_of(path) == size]
    for content in settings:
        content.pop("run_folder"), content["model"]["init_args"].pop("config")
    assert settings[0] == settings[1] == settings[2], "they differ in their model alone"


@pytest.mark.parametrize("size", BUDGETS)
def test_both_machines_take_the_same_steps(size):
    small = yaml.safe_load((ROOT / f"configs/trainer/trn1_{size}.yaml").read_text())
    large = small | yaml.safe_load((ROOT / "configs/trainer/trn1_32xlarge.yaml").read_text())
    data = yaml.safe_load(next(path for path in PATHS if size_of(path) == size).read_text())["data"]
    batch_size = yaml.safe_load((ROOT / "experiments" / data).read_text())["init_args"]["batch_size"]
    assert (small["devices"], large["devices"]) == tuple(MACHINES.values()) == (batch_size, 32)
    for name, sign in (("accumulate_grad_batches", 1), ("val_check_interval", -1), ("limit_val_batches", 1)):
        if sign == 1:  # as many blocks
            assert small[name] * small["devices"] == large[name] * large["devices"]
        else:  # as many steps
            assert small[name] / small["accumulate_grad_batches"] == large[name] / large["accumulate_grad_batches"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_fits_on_the_core_that_it_is_for(path, runs):
    needs = runs[path.stem].memory
    sharded = size_of(path) == "340m"
    total = sum(needs.values()) - (needs["Adam"] / 2 if sharded else 0)
    assert total < 0.9 * 16 * GIB


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_its_head_types_prepares_its_data(path, monkeypatch):
    """The command in the file makes the folder that the file reads, with its vocabulary and enough tokens."""
    calls = []

    @wraps(prepare_module.prepare)
    def prepare(**options):
        calls.append(options)

    monkeypatch.setattr(prepare_module, "prepare", prepare)
    head = re.match(r"(#.*\n)*", path.read_text())[0].replace("\\\n#", "")
    command, fit = (shlex.split(line) for line in re.findall(r"^#   (?:ssm-trn|launch/torchrun.sh) (.*)", head, re.M))
    assert command[0] == "prepare" and fit == ["fit", "--config", f"experiments/{path.name}"]
    main(command)
    run = Experiment.read(path)
    piece = ROOT / "experiments" / yaml.safe_load(path.read_text())["data"]
    (options,) = calls
    assert options["output"] == yaml.safe_load(piece.read_text())["init_args"]["folder"]
    assert options["vocab_size"] == run.config.vocab_size and options["max_tokens"] > run.tokens
    for place in (PAGE, piece):
        assert " ".join(command) in " ".join(re.sub(r"\\\n#?", " ", place.read_text()).split()), place


def test_the_page_has_the_tables_of_the_experiments(runs):
    assert into_markers(PAGE.read_text(), plan.tables(list(runs.values()))) == PAGE.read_text()


def test_tables_go_into_a_page_or_to_the_screen(tmp_path, capsys):
    path, page = write_experiment(tmp_path / "mine.yaml", accumulate_grad_batches=32), tmp_path / "page.md"
    page.write_text("before <!-- results: begin --> <!-- results: end --> after")
    plan.main([str(path)])
    plan.main([str(path), "--into", str(page)])
    assert re.sub(r"<!--.*?-->\n*", "", page.read_text()) == f"before {capsys.readouterr().out}\n after"


@pytest.mark.parametrize("layer", ["attention", "mamba2", "gated_deltanet"])
def test_saved_bytes_are_those_of_a_real_forward_pass(layer):
    """Counted without memory, and in a pass over real tensors whose saved storages are told apart by address."""
    config = ModelConfig(300, 128, [layer])
    model = LanguageModel(config)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x):
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    tokens = torch.zeros(1, 96, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), sdpa_kernel(SDPBackend.MATH):
        x, _ = model.features(tokens, reset=tokens.bool())
    real = sum(storage.nbytes() for storage in kept.values())
    assert activation_bytes(config, 96, torch.float32) == pytest.approx(real, rel=0.02)
    assert x.requires_grad


def test_feed_forward_keeps_what_its_formula_says():
    """x, its three products and what they make: bfloat16; the norm and its input: float32."""
    layer = {"mixer": "attention", "n_heads": 2}
    kept = [activation_bytes(ModelConfig(300, 128, [layer] * depth, d_ff=256), 64) for depth in (1, 2)]
    wide = [activation_bytes(ModelConfig(300, 128, [layer] * depth, d_ff=512), 64) for depth in (1, 2)]
    a_layer, a_wide_layer = kept[1] - kept[0], wide[1] - wide[0]
    assert a_wide_layer - a_layer == 64 * 256 * 4 * 2  # gate and up in one, silu(gate), and their product


def test_checkpoints_keep_inputs_and_one_layer():
    config = ModelConfig(300, 128, HYBRID * 4)
    plain, checkpointed = (activation_bytes(config, 64, checkpointed=choice) for choice in (False, True))
    hungriest = max(activation_bytes(replace(config, layers=[layer]), 64) for layer in config.layers)
    assert checkpointed - hungriest < plain / 4
    assert checkpointed > hungriest + 7 * 64 * 128 * 2  # what enters each block but the first


def test_memory_by_hand(tmp_path):
    run = Experiment.read(write_experiment(tmp_path / "a.yaml"))
    parameters = run.config.parameter_count()
    kept = activation_bytes(run.config, 16, torch.float32)
    logits = 2 * 16 * 300 * 12
    adam = 8 * parameters
    assert run.micro_batch == 2 and run.step_blocks == 8 and run.tokens == 8 * 8 * 16
    assert run.memory == {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "Adam": adam,
        "activations": 2 * kept,
        "logits": logits,
    }
    mixed = Experiment.read(write_experiment(tmp_path / "b.yaml", precision="bf16-mixed", devices=2))
    assert mixed.micro_batch == 1
    assert mixed.memory["weights"] == 6 * parameters and mixed.memory["logits"] == 16 * 300 * 10
    assert mixed.memory["activations"] < 0.75 * kept


def test_command(tmp_path, capsys):
    path = str(write_experiment(tmp_path / "mine.yaml", devices=2))
    assert main(["plan", path]) == 2  # 8 blocks do not divide among 32 cores
    assert "does not divide into batches of 1 on 32 cores" in capsys.readouterr().err
    words = ["plan", path, "--machine", "trn1.2xlarge", "--nodes", "2", "--utilisation", "[0.5]"]
    assert main([*words, "--price_per_hour", "3e12"]) == 0
    out = capsys.readouterr().out
    hours = 3 * Experiment.read(path).config.flops_per_token(16) * 1024 / (0.5 * 95e12 * 4) / 3600
    assert f"| mine | 2 trn1.2xlarge | 2 | {hours:.1f} | {hours * 2 * 3e12:,.0f} |" in out
    assert "modelled" in out
    assert "--trainer.devices 2 --trainer.accumulate_grad_batches 2 --data.init_args.batch_size 4" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--machine", "trn9"], "unknown machine 'trn9': choose one of trn1.2xlarge, trn1.32xlarge"),
        (["--price_per_hour", "3"], "name it with --machine"),
        (["--price_per_hour", "-1", "--machine", "trn1.2xlarge"], "price_per_hour is -1"),
        (["--price_per_hour", ".nan", "--machine", "trn1.2xlarge"], "price_per_hour"),
        (["--nodes", "0"], "nodes is 0"),
        (["--micro_batch", "0"], "micro_batch 0"),
        (["--utilisation", "[]"], r"utilisation is []"),
        (["--utilisation", "[2]"], r"utilisation is [2.0]: give shares of the peak"),
    ],
)
def test_wrong_words(tmp_path, capsys, words, sentence):
    assert main(["plan", str(write_experiment(tmp_path / "a.yaml")), *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda content: content["trainer"].pop("max_steps"), "lacks max_steps: name an experiment"),
        (lambda content: content.pop("data"), "lacks data"),
        (lambda content: content.update(data={}), "lacks init_args"),
        (lambda content: content.update(data="none.yaml"), "a.yaml names none.yaml, but there is no file"),
        (lambda content: content["trainer"].update(precision="16-mixed"), "no plan for precision 16-mixed"),
        (lambda content: content["trainer"].update(devices=4), "a batch of 2 blocks does not divide among 4 devices"),
        (lambda content: content["trainer"].update(max_steps=0), "max_steps is 0"),
        (lambda content: content["trainer"].update(max_steps=None), "max_steps is None"),
        (lambda content: content["trainer"].update(num_nodes=0), "num_nodes is 0"),
        (lambda content: content["trainer"].update(devices="two"), "devices is 'two'"),
        (lambda content: content["trainer"].update(accumulate_grad_batches=[1]), "accumulate_grad_batches is [1]"),
        (lambda content: content["data"]["init_args"].update(block_length="16"), "block_length is '16'"),
        (lambda content: content["data"]["init_args"].update(batch_size=1.5), "batch_size is 1.5"),
    ],
)
def test_incomplete_experiments(tmp_path, capsys, change, sentence):
    path = write_experiment(tmp_path / "a.yaml")
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content))
    assert main(["plan", str(path)]) == 2
    assert sentence in capsys.readouterr().err


def test_no_such_experiment(capsys):
    assert main(["plan", "none.yaml"]) == 2
    assert "names none.yaml, but there is no file none.yaml" in capsys.readouterr().err
