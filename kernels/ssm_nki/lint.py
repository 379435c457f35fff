"""`python -m ssm_nki.lint [FILE ...]`: does a kernel keep to what the NKI compiler accepts, in every release?

A simulator runs any Python; the compiler does not. Numbers, lists, loops and branches it evaluates itself, and calls of
nki.isa become instructions. This checks the kernels of a file (functions decorated with nki.jit) and all functions that
they call, in that file and in other modules of ssm_nki:

* statements and expressions are those that the compiler reads: no closures, lambdas, comprehensions, try, with, raise;
* instructions are called with keywords only, and with names and parameters of `ssm_nki.portable`;
* operators of nki.language are values (op=nl.exp), never called;
* other names are parameters, local variables, constants of a module, functions of ssm_nki and a few of Python's.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

from ssm_nki import portable

PACKAGE = Path(__file__).parent
_OTHER_WORDS = {  # for what people try most
    "ClassDef": "a class in a function",
    "DictComp": "a comprehension",
    "FunctionDef": "a function in a function",
    "GeneratorExp": "a generator",
    "Import": "an import in a function",
    "ImportFrom": "an import in a function",
    "Lambda": "a lambda",
    "ListComp": "a comprehension",
    "NamedExpr": "an assignment expression",
    "SetComp": "a comprehension",
    "Starred": "a star argument",
}


@dataclass(frozen=True)
class Finding:
    """One thing that the compiler, or some release of it, does not accept."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


class Module:
    """What a kernel file defines and imports."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.functions: dict[str, ast.FunctionDef] = {}
        self.constants: set[str] = set()
        self.modules: dict[str, str] = {}  # local name: nki, nl, nisa, or a module of ssm_nki
        self.imported: dict[str, tuple[str, str]] = {}  # local name: (module of ssm_nki, name there)
        for node in ast.parse(path.read_text(), str(path)).body:
            self._read(node)

    def _read(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef):
            self.functions[node.name] = node
        elif isinstance(node, ast.Assign) and _is_constant(node.value):
            self.constants |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                role = {"nki": "nki", "nki.language": "nl", "nki.isa": "nisa"}.get(alias.name)
                if role and (alias.asname or "." not in alias.name):
                    self.modules[alias.asname or alias.name] = role
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                self._import(node.module, alias.name, alias.asname or alias.name)

    def _import(self, module: str, name: str, local: str) -> None:
        if module == "ssm_nki.sdk":
            self.modules[local] = name
        elif module == "ssm_nki" and (PACKAGE / f"{name}.py").exists():
            self.modules[local] = f"ssm_nki.{name}"
        elif module.startswith("ssm_nki."):
            self.imported[local] = (module, name)

    @property
    def kernels(self) -> list[str]:
        """Names of the functions decorated with nki.jit."""
        return [name for name, node in self.functions.items() if any(map(self._is_jit, node.decorator_list))]

    def _is_jit(self, node: ast.expr) -> bool:
        named = isinstance(node, ast.Attribute) and node.attr == "jit" and isinstance(node.value, ast.Name)
        return named and self.modules.get(node.value.id) == "nki"  # type: ignore[attr-defined]


def _is_constant(node: ast.expr) -> bool:
    """Whether an expression is made of numbers, strings and arithmetic only."""
    allowed = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.operator, ast.unaryop, ast.Name, ast.expr_context)
    return all(isinstance(part, allowed) for part in ast.walk(node))


def lint(path: Path | str) -> list[Finding]:
    """What is wrong with the kernels of a file and the functions they use, in the order of files and lines.

    Raises:
        ValueError: the file has no kernel.
    """
    modules: dict[Path, Module] = {}
    first = _module(Path(path), modules)
    if not first.kernels:
        raise ValueError(f"{path} has no function decorated with nki.jit; name a file of kernels.")
    waiting = [(first, name) for name in first.kernels]
    seen: set[tuple[Path, str]] = set()
    findings: list[Finding] = []
    while waiting:
        module, name = waiting.pop()
        if (module.path, name) in seen:
            continue
        seen.add((module.path, name))
        check = _Check(module, module.functions[name])
        findings += check.findings
        for module_name, callee in check.calls:
            target = module if not module_name else _module(_path_of(module_name), modules)
            if callee in target.functions:
                waiting.append((target, callee))
            elif callee not in target.constants:
                findings.append(Finding(module.path, module.functions[name].lineno, f"{module_name} has no {callee}"))
    return sorted(findings, key=lambda finding: (str(finding.path), finding.line))


def _module(path: Path, known: dict[Path, Module]) -> Module:
    if path not in known:
        known[path] = Module(path)
    return known[path]


def _path_of(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")


class _Check(ast.NodeVisitor):
    """The findings in one function, and the functions of ssm_nki that it names: ("" for its own module, name)."""

    def __init__(self, module: Module, function: ast.FunctionDef) -> None:
        self.module, self.findings, self.calls = module, list[Finding](), set[tuple[str, str]]()
        self._check_signature(function)
        self.local = {argument.arg for argument in function.args.args}
        self.local |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and _is_stored(node)}
        for statement in function.body:
            self.visit(statement)

    def _report(self, node: ast.AST, message: str) -> None:
        self.findings.append(Finding(self.module.path, node.lineno, message))  # type: ignore[attr-defined]

    def _check_signature(self, function: ast.FunctionDef) -> None:
        arguments = function.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
            self._report(function, f"{function.name}: parameters are plain, without *, ** and /")
        for default in arguments.defaults:
            if not _is_constant(default) and not self._is_language(default):
                self._report(default, f"{function.name}: defaults are constants")
        for decorator in function.decorator_list:
            if not self.module._is_jit(decorator):
                self._report(decorator, f"{function.name}: the only decorator is nki.jit, and helpers have none")

    def _is_language(self, node: ast.expr) -> bool:
        named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return named and self.module.modules.get(node.value.id) == "nl"  # type: ignore[attr-defined]

    def visit(self, node: ast.AST) -> None:
        """Check `node` and all below it."""
        name = type(node).__name__
        if isinstance(node, ast.stmt | ast.expr) and name not in portable.STATEMENTS | portable.EXPRESSIONS:
            self._report(node, f"the compiler does not accept {_OTHER_WORDS.get(name, name.lower())}")
            return
        super().visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Products of matrices are instructions."""
        if isinstance(node.op, ast.MatMult):
            self._report(node, "the compiler does not accept the operator @")
        self.generic_visit(node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        """Numbers in strings are printed as they are."""
        if node.format_spec is not None:
            self._report(node, "the compiler does not accept format specifiers in strings")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """`is` compares with None only."""
        for operator, right in zip(node.ops, node.comparators, strict=True):
            none = isinstance(right, ast.Constant) and right.value is None
            if isinstance(operator, ast.Is | ast.IsNot) and not none:
                self._report(node, "`is` between values is not accepted; use ==")
        self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.While) -> None:
        """A loop has no else."""
        if node.orelse:
            self._report(node, "the compiler does not accept an else of a loop")
        self.generic_visit(node)

    visit_While = visit_For

    def visit_Name(self, node: ast.Name) -> None:
        """A name is local, a constant, a function, or one of a few of Python's."""
        name, module = node.id, self.module
        if name in self.local or name in module.constants or name in portable.BUILTINS:
            return
        if name in module.functions:
            self.calls.add(("", name))
        elif name in module.imported:
            self.calls.add(module.imported[name])
        else:
            self._report(node, f"{name} is no parameter, local variable, constant, or function of ssm_nki")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """`nl.x`, `nisa.x`, `module.x`, or an attribute of a value."""
        inner = node.value
        if isinstance(inner, ast.Name) and inner.id not in self.local and inner.id in self.module.modules:
            self._check_module_attribute(node, self.module.modules[inner.id])
            return
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            owner = self.module.modules.get(inner.value.id)
            if owner == "nisa" and inner.attr in portable.ISA_CLASSES:
                if node.attr not in portable.ISA_CLASSES[inner.attr]:
                    self._report(node, f"nisa.{inner.attr} has no {node.attr} in every release")
                return
            if owner == "nl" and inner.attr == "tile_size":
                if node.attr not in portable.TILE_SIZE:
                    self._report(node, f"nl.tile_size.{node.attr} is not in every release")
                return
        known = portable.TENSOR_ATTRIBUTES | portable.CONTAINER_METHODS | portable.TENSOR_METHODS.keys()
        if node.attr not in known:
            self._report(node, f".{node.attr} is no attribute of tensors or containers in every release")
        self.visit(inner)

    def _check_module_attribute(self, node: ast.Attribute, owner: str) -> None:
        name = node.attr
        if owner.startswith("ssm_nki."):
            self.calls.add((owner, name))
        elif owner == "nki":
            self._report(node, f"nki.{name} has no place in a kernel")
        elif owner == "nl":
            if name not in portable.LANGUAGE_NAMES | portable.OPERATORS | portable.LANGUAGE_FUNCTIONS.keys():
                self._report(node, f"nl.{name} is not in every release from {portable.RELEASES[0]} on")
        elif name not in portable.ISA.keys() | portable.ISA_NAMES | portable.ISA_FUNCTIONS_WITHOUT_PARAMETERS:
            self._report(node, f"nisa.{name} is not in every release from {portable.RELEASES[0]} on, or not simulated")

    def visit_Call(self, node: ast.Call) -> None:
        """Instructions have keywords only; operators are not called."""
        function = node.func
        owner = None
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            owner = self.module.modules.get(function.value.id)
        if owner == "nisa":
            self._check_instruction(node, function.attr)  # type: ignore[attr-defined]
        elif owner == "nl":
            self._check_language_call(node, function.attr)  # type: ignore[attr-defined]
        elif isinstance(function, ast.Name) and function.id in ("min", "max") and len(node.args) > 2:
            self._report(node, f"{function.id} takes two numbers, or one list")
        elif isinstance(function, ast.Attribute) and function.attr in portable.TENSOR_METHODS and owner is None:
            self._check_keywords(node, f".{function.attr}", portable.TENSOR_METHODS[function.attr])
        self.generic_visit(node)

    def _check_instruction(self, node: ast.Call, name: str) -> None:
        if name in portable.ISA_FUNCTIONS_WITHOUT_PARAMETERS or name not in portable.ISA:
            return
        required, allowed = portable.ISA[name]
        if node.args:
            self._report(node, f"nisa.{name}: parameters are named, as their order differs between releases")
        self._check_keywords(node, f"nisa.{name}", allowed)
        given = {keyword.arg for keyword in node.keywords}
        for missing in sorted(required - given) if not node.args else []:
            self._report(node, f"nisa.{name}: {missing} is required in some release")
        for keyword in node.keywords:
            if name == "memset" and keyword.arg == "value" and _is_whole(keyword.value):
                self._report(node, "nisa.memset: the value has the type of dst, so write 0.0, not 0, for floats")

    def _check_language_call(self, node: ast.Call, name: str) -> None:
        if name in portable.OPERATORS:
            self._report(node, f"nl.{name} is called; release 0.2.0 has it as a value of op= only")
        elif name in portable.LANGUAGE_FUNCTIONS:
            self._check_keywords(node, f"nl.{name}", portable.LANGUAGE_FUNCTIONS[name])
            if name == "ndarray" and "buffer" not in {keyword.arg for keyword in node.keywords}:
                self._report(node, "nl.ndarray: buffer is always given")

    def _check_keywords(self, node: ast.Call, name: str, allowed: frozenset[str]) -> None:
        for keyword in node.keywords:
            if keyword.arg is None:
                self._report(node, f"{name}: the compiler does not accept **")
            elif keyword.arg not in allowed:
                self._report(node, f"{name}: the parameter {keyword.arg} is not in every release")


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _is_whole(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def main(paths: list[str]) -> int:
    """Print the findings of `paths`, by default of all kernels of the package; return how many there are."""
    files = [Path(path) for path in paths] or [path for path in sorted(PACKAGE.glob("*.py")) if Module(path).kernels]
    findings = [finding for path in files for finding in lint(path)]
    for finding in dict.fromkeys(findings):
        print(finding)
    return len(findings)


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
