"""The lint: each thing that it refuses, and the table of what all releases have."""

import json
import textwrap
from pathlib import Path

import pytest

import ssm_nki
from ssm_nki import lint, portable
from ssm_nki.simulator import isa, language

HEADER = """
from ssm_nki import tiles
from ssm_nki.cumulative_sum import CHUNK
from ssm_nki.sdk import nisa, nki, nl
import os

LIMIT = 4 * 128
NAMES = [1, 2]

def helper(x, scale=2.0):
    return tiles.load(x)
"""
KERNELS = [path for path in sorted(lint.PACKAGE.glob("*.py")) if lint.Module(path).kernels]
LISTING = Path(__file__).parents[3] / "shared" / "nki" / "api.json"


def findings(body, tmp_path, header=HEADER, signature="kernel(x)"):
    path = tmp_path / "kernels.py"
    path.write_text(f"{header}\n@nki.jit\ndef {signature}:\n{textwrap.indent(textwrap.dedent(body), '    ')}\n")
    return [finding.message for finding in lint.lint(path)]


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_every_kernel_passes(path):
    assert lint.lint(path) == []


def test_there_are_kernels():
    assert Path(ssm_nki.__file__).parent / "cumulative_sum.py" in KERNELS


def test_what_is_accepted(tmp_path):
    body = """
    '''Doc.'''
    assert x.shape[0] <= LIMIT, f"too long: {x.shape}"
    rows, columns = x.shape
    many = []
    for start in range(0, rows, CHUNK):
        size = min(CHUNK, rows - start)
        many.append(helper(x[start : start + size, 0:columns], scale=3.0))
    tile = nl.ndarray((nl.tile_size.pmax, 2), dtype=nl.float32, buffer=nl.sbuf)
    while len(many) > 3 and many[-1] is not None:
        many.pop()
        if columns > 7:
            break
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        nisa.memset(dst=tile, value=0.0, engine=nisa.engine.vector, name="zero")
    view = tile.reshape((128, 1, 2)).ap(pattern=[[2, 128], [0, 4]], offset=0)
    nisa.activation(dst=view, op=nl.exp, data=view, bias=tiles.filled((128, 1), 1.0, x.dtype), scale=-1.0)
    return tile
    """
    assert findings(body, tmp_path) == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("f = lambda y: y", "a lambda"),
        ("def f(y):\n    return y", "a function in a function"),
        ("class C:\n    pass", "a class in a function"),
        ("y = [i for i in range(3)]", "a comprehension"),
        ("y = {i: i for i in range(3)}", "a comprehension"),
        ("y = max(i for i in range(3))", "a generator"),
        ("try:\n    y = 1\nexcept ValueError:\n    y = 2", "try"),
        ("with x:\n    y = 1", "with"),
        ("import math", "an import in a function"),
        ("raise ValueError('no')", "raise"),
        ("for i in range(3):\n    y = 1\nelse:\n    y = 2", "an else of a loop"),
        ("while x:\n    y = 1\nelse:\n    y = 2", "an else of a loop"),
        ("assert x, f'{x:.3f}'", "format specifiers"),
        ("y = max(1, 2, 3)", "max takes two numbers"),
        ("y = x.ndim", ".ndim is no attribute"),
        ("helper(*x)", "a star argument"),
        ("y = x @ x", "the operator @"),
        ("if (y := 3) > 2:\n    y = 1", "an assignment expression"),
        ("global LIMIT", "global"),
        ("yield x", "yield"),
        ("del x", "del"),
        ("y = {1, 2}", "accept set"),
        ("match x:\n    case 1:\n        y = 1", "match"),
        ("y = x is helper", "`is` between values"),
        ("y = NAMES", "NAMES is no parameter"),
        ("y = os.environ", "os is no parameter"),
        ("y = sorted(x)", "sorted is no parameter"),
        ("y = zip(x, x)", "zip is no parameter"),
        ("y = undefined", "undefined is no parameter"),
        ("y = tiles.nothing(x)", "ssm_nki.tiles has no nothing"),
        ("y = x.permute((1, 0))", ".permute is no attribute"),
        ("y = x.ap(pattern=[[1, 1]], scalar_offset=x)", ".ap: the parameter scalar_offset"),
        ("y = nl.exp(x)", "nl.exp is called"),
        ("y = nl.load(x)", "nl.load is not in every release"),
        ("y = nl.zeros((1, 1), dtype=nl.float32)", "nl.zeros is not in every release"),
        ("y = nl.ndarray((1, 1), dtype=nl.float32)", "buffer is always given"),
        ("y = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf, address=0)", "the parameter address"),
        ("y = nl.tile_size.psum_fmax", "nl.tile_size.psum_fmax"),
        ("y = nki.jit", "nki.jit has no place"),
        ("nisa.tensor_copy(x, x)", "nisa.tensor_copy: parameters are named"),
        ("nisa.tensor_copy(dst=x)", "src is required"),
        ("nisa.iota(dst=x, pattern=[[1, 1]])", "offset is required"),
        ("nisa.nc_matmul(dst=x, stationary=x, moving=x, accumulate=True)", "the parameter accumulate"),
        ("nisa.tensor_scalar_cumulative(dst=x, src=x, op0=nl.add, op1=nl.add, imm0=0.0, name='a')", "parameter name"),
        ("nisa.topk(val_dst=x, idx_dst=x, src=x, n=8)", "nisa.topk is not in every release"),
        ("nisa.memset(dst=x, value=0)", "write 0.0, not 0"),
        ("nisa.memset(**x)", "does not accept **"),
        ("y = nisa.engine.pool", "nisa.engine has no pool"),
    ],
)
def test_what_is_refused(body, expected, tmp_path):
    messages = findings(body, tmp_path)
    assert any(expected in message for message in messages), messages


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("kernel(*x)", "without *"),
        ("kernel(x, *, y)", "without *"),
        ("kernel(**x)", "without *"),
        ("kernel(x, y=[])", "defaults are constants"),
    ],
)
def test_signatures(signature, expected, tmp_path):
    assert any(expected in message for message in findings("return x", tmp_path, signature=signature))


def test_functions_that_a_kernel_calls_are_checked_too(tmp_path):
    header = HEADER + "\ndef inner(x):\n    return [y for y in x]\n\ndef outer(x):\n    return inner(x)\n"
    assert findings("return outer(x)", tmp_path, header) == ["the compiler does not accept a comprehension"]
    assert findings("return helper(x)", tmp_path, header) == []  # what no kernel calls may be any Python
    header += "\n@other\ndef decorated(x):\n    return x\n"
    assert "the only decorator is nki.jit" in findings("return decorated(x)", tmp_path, header)[0]


def test_kernels_of_others_are_found_by_their_imports(tmp_path):
    header = "import nki\nimport nki.isa as nisa\nimport nki.language as nl\n"
    body = "y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)\nnisa.dma_copy(y, x)\nreturn y"
    assert findings(body, tmp_path, header) == [
        "nisa.dma_copy: parameters are named, as their order differs between releases"
    ]


def test_command(tmp_path, capsys):
    path = tmp_path / "kernels.py"
    path.write_text("import nki\n\n@nki.jit\ndef kernel(x):\n    return sorted(x)\n")
    assert lint.main([str(path)]) == 1
    assert capsys.readouterr().out.startswith(f"{path}:5: sorted is no parameter")
    assert lint.main([]) == 0
    with pytest.raises(ValueError, match="has no function decorated with nki.jit"):
        lint.lint(Path(lint.__file__))


def test_the_simulator_has_all_that_the_table_lists():
    for name in portable.ISA:
        assert callable(getattr(isa, name))
    for name, members in portable.ISA_CLASSES.items():
        assert members <= {member.name for member in getattr(isa, name)}
    for name in portable.ISA_NAMES | portable.ISA_FUNCTIONS_WITHOUT_PARAMETERS:
        getattr(isa, name)
    for name in portable.LANGUAGE_NAMES | portable.OPERATORS | portable.LANGUAGE_FUNCTIONS.keys():
        getattr(language, name)
    for name in portable.TILE_SIZE:
        getattr(language.tile_size, name)


@pytest.mark.skipif(not LISTING.exists(), reason="the listing of the releases' stub files is not at hand")
def test_the_table_is_what_the_releases_have():
    listing = json.loads(LISTING.read_text())
    releases = [listing[release] for release in portable.RELEASES]
    for name, (required, allowed) in portable.ISA.items():
        found = [release["isa"]["functions"][name] for release in releases]
        assert allowed == frozenset.intersection(*(frozenset(one["params"]) for one in found)), name
        assert required == frozenset.union(*(frozenset(one["required"]) for one in found)), name
    for name, allowed in portable.LANGUAGE_FUNCTIONS.items():
        found = [release["language"]["functions"][name] for release in releases]
        assert allowed == frozenset.intersection(*(frozenset(one["params"]) for one in found)), name
    for name, members in portable.ISA_CLASSES.items():
        assert members == frozenset.intersection(
            *(frozenset(release["isa"]["classes"][name]) for release in releases)
        ), name
    for release in releases:
        names, classes = release["language"]["names"], release["language"]["classes"]
        assert set(names) | set(classes) >= portable.LANGUAGE_NAMES
        assert set(release["isa"]["names"]) >= portable.ISA_NAMES
    values = listing["op_values"]
    everything = {*values["bitvec"], *values["arithmetic"], *values["activation_valid_input"]}
    assert everything == portable.OPERATORS
