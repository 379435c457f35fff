"""The optimizer of which each process keeps a part, and the sums behind it: three processes on CPUs, with gloo."""

import copy
import tempfile

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ssm_trn.accelerators.collectives import ThroughHost, host_broadcast, host_gather, host_sum
from ssm_trn.accelerators.zero import OptimizerShards

PROCESSES = 3
CHECKS = []


def check(function):
    CHECKS.append(function.__name__)
    return function


def parameters() -> list[nn.Parameter]:
    """Sizes that three do not divide, one of them below three."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in ((5, 3), (7,), (2,))]


def gradient(parameter: nn.Parameter, step: int, rank: int) -> torch.Tensor:
    return torch.randn(
        parameter.shape, generator=torch.Generator().manual_seed(100 * step + 10 * rank + parameter.numel())
    )


def optimizer_of(own: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": own[:1], "weight_decay": 0.1}, {"params": own[1:], "lr": 0.2}], lr=0.1)


def reference(steps: int) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """One process with the mean of all gradients, clipped to a norm of 1."""
    own = parameters()
    optimizer = optimizer_of(own)
    for step in range(steps):
        for parameter in own:
            parameter.grad = torch.stack([gradient(parameter, step, rank) for rank in range(PROCESSES)]).mean(0)
        clip_grads_with_norm_(own, 1.0, get_total_norm([parameter.grad for parameter in own]))
        optimizer.step()
    return own, optimizer


def train(own, optimizer, shards, first: int, last: int, rank: int) -> None:
    for step in range(first, last):
        for parameter in own:
            parameter.grad = gradient(parameter, step, rank)
        shards.reduce_gradients()
        assert all(parameter.grad is None for parameter in own)
        parts = [part for group in optimizer.param_groups for part in group["params"]]
        clip_grads_with_norm_(parts, 1.0, shards.total_norm([part.grad for part in parts]))
        optimizer.step()


def assert_same_state(found, expected) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(found["state"][index][name], value)


@check
def shards_step_as_the_whole_does(rank: int) -> None:
    own, expected = parameters(), reference(4)
    optimizer = optimizer_of(own)
    shards = OptimizerShards(optimizer, ThroughHost(), rank, PROCESSES)
    train(own, optimizer, shards, 0, 4, rank)
    for parameter, value in zip(own, expected[0], strict=True):
        torch.testing.assert_close(parameter, value)
    assert sum(part.numel() for group in optimizer.param_groups for part in group["params"]) == 5 + 3 + 1
    assert_same_state(shards.state_dict(), expected[1].state_dict())


@check
def shards_go_on_from_a_whole_state(rank: int) -> None:
    (own, before), expected = reference(2), reference(4)
    optimizer = optimizer_of(own)
    shards = OptimizerShards(optimizer, ThroughHost(), rank, PROCESSES)
    shards.load_state_dict(copy.deepcopy(before.state_dict()))
    assert_same_state(shards.state_dict(), before.state_dict())
    train(own, optimizer, shards, 2, 4, rank)
    for parameter, value in zip(own, expected[0], strict=True):
        torch.testing.assert_close(parameter, value)


@check
def sums_are_of_all_processes(rank: int) -> None:
    assert host_sum(torch.tensor(rank)).item() == 3
    assert [part.item() for part in host_gather(torch.tensor(rank))] == [0, 1, 2]
    tensors = [torch.full((2,), float(rank)), torch.ones(1)]
    ThroughHost().all_reduce(tensors, 0.5)
    assert tensors[0].tolist() == [1.5, 1.5] and tensors[1].item() == 1.5
    assert ThroughHost().reduce_scatter(torch.arange(6.0) + rank).tolist() == [6.0 * rank + 3, 6.0 * rank + 6]
    assert ThroughHost().all_gather(torch.tensor([float(rank)])).tolist() == [0.0, 1.0, 2.0]


@check
def a_value_is_that_of_its_source(rank: int) -> None:
    for value in ({"folder": "läuft/ü", "step": 3, "rank": rank}, None, True, [rank] * 100 * (rank + 1)):
        found = host_broadcast(value, 1)
        expected = [1] * 200 if isinstance(value, list) else value | {"rank": 1} if isinstance(value, dict) else value
        assert found == expected


def run_checks(rank: int, store: str, results) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    for name in CHECKS:
        try:
            globals()[name](rank)
            results.append((name, rank, ""))
        except Exception as error:
            results.append((name, rank, repr(error)))
            break  # the others wait for this one in vain, and end with it
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results():
    """(check, rank, error) of all checks in all processes."""
    with multiprocessing.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        found = manager.list()
        # Forked, they need not import torch again; none of them asks autograd, which could not follow.
        multiprocessing.start_processes(run_checks, (f"{folder}/store", found), PROCESSES, start_method="fork")
        yield list(found)


@pytest.mark.parametrize("name", CHECKS)
def test_in_three_processes(results, name):
    assert sorted(result[1:] for result in results if result[0] == name) == [(rank, "") for rank in range(PROCESSES)]
