"""Rows depend on (seed, split, step) alone, and their targets are what the definition of the task says."""

import re
from itertools import permutations

import numpy as np
import pytest
import torch

from ssm_trn.data.datamodule import IGNORED
from ssm_trn.data.synthetic import SPLITS, TASKS, make
from ssm_trn.data.synthetic.base import first_places, top
from tests.data.synthetic.cases import CASES, NAMES

ROWS = 50
each_case = pytest.mark.parametrize(("name", "options"), CASES, ids=NAMES)


def rows_of(task, rows=ROWS, split="train", step=0):
    batch = task.batch(split, step, rows)
    return batch["tokens"].numpy(), batch["targets"].numpy()


@each_case
def test_batches_have_one_form_and_depend_on_seed_split_and_step_alone(name, options):
    task, again = make(name, **options), make(name, **options)
    batch = task.batch("train", 3, ROWS, seed=1)
    shape = (ROWS, task.steps)
    assert {key: (value.dtype, tuple(value.shape)) for key, value in batch.items()} == {
        "tokens": (torch.int64, shape),
        "targets": (torch.int64, shape),
        "reset": (torch.bool, shape),
    }
    assert batch["reset"][:, 0].all() and not batch["reset"][:, 1:].any()
    tokens, targets = batch["tokens"], batch["targets"]
    assert tokens.min() >= 0 and tokens.max() < task.vocab_size
    scored = targets[targets != IGNORED]
    assert len(scored) and scored.min() >= 0 and scored.max() < task.vocab_size
    assert all(torch.equal(value, again.batch("train", 3, ROWS, seed=1)[key]) for key, value in batch.items())
    if task.answers > 2:
        others = [task.batch(split, 3, ROWS, seed=1) for split in SPLITS[1:]]
        others += [task.batch("train", 4, ROWS, seed=1), task.batch("train", 3, ROWS, seed=2)]
        assert not any(torch.equal(tokens, other["tokens"]) for other in others)


@each_case
def test_targets_are_the_oracles(name, options):
    task = make(name, **options)
    answers_where_unscored = name in ("mqar", "parity")
    for step in range(4):
        for tokens, targets in zip(*rows_of(task, step=step), strict=True):
            answers = task.solve(tokens)
            if answers_where_unscored:
                answers = np.where(targets == IGNORED, IGNORED, answers)
            assert targets.tolist() == answers.tolist()


@each_case
def test_guessing_is_right_as_often_as_chance(name, options):
    task = make(name, **options)
    _, targets = rows_of(task, 2000)
    answers = targets[targets != IGNORED]
    if name in ("copying", "palindrome"):
        answers = answers[answers < task.letters]  # the end sign is not a letter
    if name == "mqar" or task.answers > 50:
        frequent = np.bincount(answers).max() / len(answers)
        # Of many, some are more frequent by accident; and a few swaps get to few of all permutations.
        assert frequent < (6 if "moved" in options else 2.5) / task.answers
        return
    assert len(np.unique(answers)) <= task.answers
    frequent = np.bincount(answers).max() / len(answers)
    bias = 0.15 if name == "modular_arithmetic" else 0.04  # products are 0 more often than not
    assert 1 / task.answers <= frequent < 1 / task.answers + bias


# What the oracles say of rows that were worked out by hand


@pytest.mark.parametrize(
    ("name", "options", "tokens", "answers"),
    [
        ("mqar", {"length": 8, "pairs": 2, "vocab_size": 8}, [1, 5, 3, 6, 3, 0, 1, 0], "----6-5-"),
        ("needle", {"length": 8, "keys": 2, "values": 3, "hay": 2}, [0, 1, 2, 5, 1, 3, 4, 2], "-------5"),
        ("in_context_recall", {"length": 10, "vocab_size": 6}, [0, 3, 1, 5, 0, 3, 2, 4, 1, 5], "----3---5-"),
        ("noisy_recall", {"length": 8, "vocab_size": 6, "noise": 2}, [0, 3, 4, 5, 4, 4, 0, 3], "------3-"),
        ("fuzzy_recall", {"length": 12, "vocab_size": 7}, [0, 1, 3, 0, 4, 5, 0, 4, 5, 0, 1, 3], "------45--3-"),
        ("compression", {"length": 4, "vocab_size_of_text": 4}, [2, 0, 1, 3, 4, 5, 6], "----201"),
        ("copying", {"length": 3, "letters": 3}, [3, 2, 0, 1, 4, 2, 0, 1], "----2015"),
        ("copying", {"length": 3, "letters": 3, "shortest": 1}, [3, 2, 4, 2, 6, 6, 6, 6], "--25----"),
        ("palindrome", {"length": 3, "letters": 3}, [3, 2, 0, 1, 4, 1, 0, 2], "----1025"),
        ("selective_copying", {"length": 7, "count": 2, "vocab_size": 5}, [0, 3, 0, 0, 1, 4, 4], "-----31"),
        ("selective_copying", {"length": 6, "count": 2, "vocab_size": 5, "cue": "sign"}, [3, 0, 1, 4, 0, 0], "----31"),
        ("induction_heads", {"length": 6, "vocab_size": 4}, [0, 3, 2, 1, 1, 3], "-----2"),
        ("parity", {"length": 5, "every_step": True}, [1, 0, 1, 1, 2], "1101-"),
        ("modular_arithmetic", {"length": 7}, [2, 6, 3, 7, 2, 10, 11], "-----1-"),  # 2 - 3 * 2 = -4
        ("modular_arithmetic", {"length": 9, "brackets": True}, [8, 2, 6, 8, 6, 4, 9, 9, 10], "--------1"),  # 2 - (-4)
        ("word_problem", {"length": 3, "group": "S3"}, [2, 1, 2], "245"),  # swaps of the first two and of the last two
    ],
)
def test_oracles(name, options, tokens, answers):
    expected = [IGNORED if answer == "-" else int(answer) for answer in answers]
    assert make(name, **options).solve(np.array(tokens)).tolist() == expected


@pytest.mark.parametrize("brackets", [False, True])
def test_expressions_are_worth_what_python_says(brackets):
    task = make("modular_arithmetic", length=23, shortest=2, brackets=brackets)
    lengths = set()
    for tokens, targets in zip(*rows_of(task, 400), strict=True):
        text = "".join("01234+-*()="[token] for token in tokens if token != 11)
        lengths.add(len(text))
        assert text.endswith("=") and re.fullmatch("[0-4()+*-]+", text[:-1])
        assert targets[len(text) - 1] == eval(text[:-1]) % 5
        if not brackets:
            assert re.fullmatch(r"\d([+*-]\d)*", text[:-1])
    assert lengths == (set(range(2, 24)) if brackets else set(range(2, 23, 2)))


@pytest.mark.parametrize(("group", "size"), [("S3", 6), ("A4", 12), ("S4", 24), ("A5", 60), ("S5", 120)])
def test_products_are_those_of_permutation_matrices(group, size):
    task = make("word_problem", group=group, length=7)
    things = int(group[1])
    matrices = [np.eye(things)[list(order)] for order in permutations(range(things))]  # matrix @ row reorders it
    if group[0] == "A":
        matrices = [matrix for matrix in matrices if np.linalg.det(matrix) > 0]
    assert task.vocab_size == len(matrices) == size
    for tokens, targets in zip(*rows_of(task), strict=True):
        product = np.eye(things)
        for token, target in zip(tokens, targets, strict=True):
            # `elements[g]` sends thing i to elements[g][i]: as a matrix on columns that is the inverse reordering.
            product = matrices[token].T @ product
            assert np.array_equal(matrices[target].T, product)


def test_permutations_that_move_little():
    identity = np.arange(5)
    for moved, kinds in ((2, 1 + 10), (3, 1 + 10 + 20), (None, 120)):
        task = make("word_problem", moved=moved, length=10)
        drawn = np.unique(rows_of(task, 1000)[0])
        assert len(drawn) == kinds
        assert all((task.elements[g] != identity).sum() <= (moved or 5) for g in drawn)


# Where the scored steps and the places of things are


def test_mqar_asks_for_each_key_once_behind_the_pairs():
    task = make("mqar", length=64, pairs=6, vocab_size=512)
    tokens, targets = rows_of(task, 200)
    for row, answers in zip(tokens, targets, strict=True):
        keys, values, asked = row[0:12:2], row[1:12:2], np.flatnonzero(answers != IGNORED)
        assert len(set(keys)) == len(set(values)) == len(asked) == 6
        assert all(1 <= key < 256 <= value < 512 for key, value in zip(keys, values, strict=True))
        assert (asked >= 12).all() and (asked % 2 == 0).all()
        assert dict(zip(row[asked], answers[asked], strict=True)) == dict(zip(keys, values, strict=True))


def test_mqar_asks_sooner_with_a_small_power():
    steps = {}
    for power in (0.01, 1.0):
        _, targets = rows_of(make("mqar", length=128, pairs=2, vocab_size=64, power=power), 2000)
        steps[power] = np.argwhere(targets != IGNORED)[:, 1]
    weights = np.arange(1, 63) ** -0.99
    first = (steps[0.01] == 4).sum() / 2000  # either of two draws without putting back
    p = weights / weights.sum()
    assert first == pytest.approx(p[0] + ((p / (1 - p))[1:] * p[0]).sum(), abs=0.04)
    assert steps[1.0].mean() == pytest.approx(4 + 61, abs=2)


def test_a_needle_stands_as_deep_as_it_should():
    for depth in (0.0, 0.5, 1.0):
        tokens, _ = rows_of(make("needle", length=101, depth=depth))
        assert ((tokens == tokens[:, -1:]).argmax(1) == round(98 * depth)).all()
    several, _ = rows_of(make("needle", length=60, needles=5), 2000)
    places = (several == several[:, -1:]).argmax(1)
    assert set(places) == set(range(58))
    keys = (several >= 64) & (several < 128)
    assert (keys.sum(1) == 6).all() and (several[:, 1:][keys[:, :-1]] >= 128).all()


def test_every_place_comes_up():
    selective, _ = rows_of(make("selective_copying", length=20, count=3), 500)
    assert ((selective > 0) & (selective < 15))[:, :17].any(0).all()
    induction, targets = rows_of(make("induction_heads", length=12), 500)
    assert set((induction == 15).argmax(1)) == set(range(10))
    assert ((targets != IGNORED).sum(1) == 1).all() and (targets[:, -1] != IGNORED).all()


def test_recall_asks_for_a_key_that_was_seen_at_the_end():
    for name, last in (("in_context_recall", -2), ("noisy_recall", -2)):
        _, targets = rows_of(make(name, length=24), 300)
        assert (targets[:, last] != IGNORED).all()
    tokens, targets = rows_of(make("fuzzy_recall", length=40, shortest_key=3), 300)
    assert (targets != IGNORED).any(1).all()
    assert (tokens[:, -1] != 15).all()  # padding stands in front
    noisy, _ = rows_of(make("noisy_recall", length=128), 300)
    assert (noisy.reshape(300, 64, 2)[:, :, 0] >= 16).mean() == pytest.approx(0.2, abs=0.01)


def test_what_is_learnt_by_heart_is_the_same_in_all_splits_and_other_facts_are_others():
    task, other = make("memorisation"), make("memorisation", facts=1)
    facts = {}
    for split in SPLITS:
        tokens, targets = rows_of(task, 400, split)
        for key, value in zip(tokens[:, ::2].ravel(), targets[:, 1::2].ravel(), strict=True):
            assert facts.setdefault(key, value) == value
    assert len(facts) == len(set(facts.values())) == 127
    assert (task.value_of != other.value_of).mean() > 0.9


# Splits, errors, parts


@pytest.mark.parametrize("name", TASKS)
def test_test_rows_were_not_trained_on(name):
    if name == "memorisation":
        pytest.skip("its rows are made of the same facts on purpose")
    task = make(name) if make(name).steps < 1000 else make(name, length=256)
    seen = {row.tobytes() for step in range(3) for row in rows_of(task, 200, "train", step)[0]}
    assert len(seen) == 600
    for split in ("validation", "test"):
        assert not seen & {row.tobytes() for row in rows_of(task, 200, split)[0]}


def test_longer_rows_are_disjoint_from_training_by_their_length():
    train, test = make("parity", length=40, shortest=3), make("parity", length=256, shortest=41)
    assert {(row != 2).sum() for row in rows_of(train, 2000)[0]} == set(range(3, 41))
    assert {(row != 2).sum() for row in rows_of(test, 4000)[0]} == set(range(41, 257))


BAD = [
    ("mqar", {"length": 63}, "must be even"),
    ("mqar", {"pairs": 17}, "17 pairs do not fit"),
    ("mqar", {"vocab_size": 9}, "vocab_size must be even"),
    ("mqar", {"power": 0.0}, "power is 0.0"),
    ("mqar", {"vocab_size": 2**40}, "choose at most"),
    ("needle", {"depth": 1.5}, "from 0 to 1"),
    ("needle", {"needles": 65}, "the 64 keys"),
    ("needle", {"length": 2}, "length must be above 2"),
    ("needle", {"hay": 0}, "at least 1"),
    ("in_context_recall", {"length": 5}, "must be even, at least 4"),
    ("in_context_recall", {"vocab_size": 7}, "vocab_size without noise is 7"),
    ("in_context_recall", {"noise_share": 0.5}, "set noise"),
    ("noisy_recall", {"noise_share": 1.0}, r"noise_share in \[0, 1\)"),
    ("fuzzy_recall", {"length": 11}, "may take 12"),
    ("fuzzy_recall", {"vocab_size": 6}, "from 7 to 128"),
    ("fuzzy_recall", {"shortest_key": 4}, "must hold"),
    ("fuzzy_recall", {"longest_value": 0}, "from 1 to 3"),
    ("memorisation", {"length": 3}, "must be even"),
    ("memorisation", {"vocab_size": 2}, "at least 3"),
    ("memorisation", {"facts": -1}, "from 0 to"),
    ("compression", {"length": 1}, "at least 2"),
    ("compression", {"vocab_size_of_text": 1}, "at least 2"),
    ("copying", {"length": 0}, "at least 1"),
    ("copying", {"shortest": 301}, "from 1 to the length, 300"),
    ("copying", {"letters": 0}, "at least 1"),
    ("copying", {"length": 10**9}, "choose a smaller length"),
    ("palindrome", {"length": "9"}, "should be of type int"),
    ("selective_copying", {"length": 31}, "need at least 32"),
    ("selective_copying", {"cue": "none"}, "signs or sign"),
    ("selective_copying", {"count": 0}, "count is 0"),
    ("selective_copying", {"vocab_size": 2}, "at least 3"),
    ("induction_heads", {"length": 2}, "at least 3"),
    ("induction_heads", {"vocab_size": 1}, "at least 2"),
    ("parity", {"length": True}, "should be of type int"),
    ("parity", {"every_step": 1}, "should be of type bool"),
    ("modular_arithmetic", {"modulus": 1}, "at least 2"),
    ("modular_arithmetic", {"shortest": 1}, "a digit and ="),
    ("word_problem", {"group": "S9"}, "choose one of S3"),
    ("word_problem", {"moved": 1}, "must be at least 2"),
    ("word_problem", {"group": "A5", "moved": 2}, "must be at least 3"),
    ("word_problem", {"fillers": -1}, "at least 0"),
    ("parity", {"bits": 3}, "no option 'bits': it takes length, shortest, every_step"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_sizes_that_do_not_fit_are_told_in_a_sentence(name, options, message):
    with pytest.raises(ValueError, match=f"^the task {TASKS[name].__name__}: .*{message}") as error:
        make(name, **options)
    assert "\n" not in str(error.value)


def test_names_and_batches_that_do_not_exist_are_told():
    with pytest.raises(ValueError, match=r"unknown task 'partiy' \(did you mean parity\?\)"):
        make("partiy")
    task = make("parity")
    with pytest.raises(ValueError, match="no split 'valid': choose one of train, validation, test"):
        task.batch("valid", 0)
    for numbers in ({"rows": 0}, {"step": -1}, {"seed": -1}, {"seed": 2**32}):
        with pytest.raises(ValueError, match="rows must be at least 1"):
            task.batch("train", **({"step": 0} | numbers))
    with pytest.raises(ValueError, match="are too many"):
        task.batch("train", 0, rows=2**40)


def test_top_is_the_highest_first_and_first_places_the_first_of_their_kind():
    scores = np.random.RandomState(0).random_sample((20, 9))
    for count in (1, 4, 9):
        assert np.array_equal(top(scores, count), np.argsort(-scores, 1)[:, :count])
    items = np.random.RandomState(1).randint(4, size=(20, 9))
    expected = [[list(row).index(item) for item in row] for row in items]
    assert first_places(items).tolist() == expected
