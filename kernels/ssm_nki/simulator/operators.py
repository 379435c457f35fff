"""The values of `op=`: what the arithmetic units of VectorE and GpSimd do, and the functions of ScalarE."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ssm_nki.simulator.errors import KernelError, require


@dataclass(frozen=True)
class Operator:
    """One operator of nki.language, used as a value: `op=nl.add`.

    inputs: how many operands it has as an arithmetic operator (0: it is none).
    activation: whether ScalarE's `activation` takes it; valid: the inputs for which ScalarE's result is defined.
    bitwise: it works on bit patterns of integers; reduces: `tensor_reduce` takes it.
    """

    name: str
    function: Callable = field(compare=False)
    inputs: int = 0
    activation: bool = False
    valid: tuple[float, float] | None = None
    valid_magnitude: bool = False  # `valid` limits |x|, not x
    bitwise: bool = False
    reduces: bool = False

    def __call__(self, *operands: np.ndarray) -> np.ndarray:
        """The result on NumPy arrays; a kernel that calls nl.exp(tile) is refused."""
        if not all(isinstance(operand, np.ndarray | np.generic) for operand in operands):
            raise KernelError(
                f"nl.{self.name}(...) is called as a function, which NKI 0.2.0 does not have; "
                f"give it as op=nl.{self.name} to an instruction of nki.isa."
            )
        return self.function(*operands)

    def activate(self, x: np.ndarray) -> np.ndarray:
        """The function as ScalarE evaluates it; inputs outside the valid range are an error."""
        if self.valid is not None and x.size:
            low, high = self.valid
            checked = np.abs(x) if self.valid_magnitude else x
            least, most = float(checked.min()), float(checked.max())
            require(
                low <= least and most <= high,
                "nl.{} is defined on ScalarE for {} in [{:.6g}, {:.6g}], and the input reaches from {:.6g} to {:.6g}.",
                self.name,
                "|x|" if self.valid_magnitude else "x",
                low,
                high,
                least,
                most,
            )
        return self(x)

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _silu_dx(x: np.ndarray) -> np.ndarray:
    return _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))


def _erf(x: np.ndarray) -> np.ndarray:
    return np.frompyfunc(math.erf, 1, 1)(x).astype(np.float32)


def _erf_dx(x: np.ndarray) -> np.ndarray:
    return 2 / math.sqrt(math.pi) * np.exp(-np.square(x))


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def _gelu_dx(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + _erf(x / math.sqrt(2))) + x * np.exp(-np.square(x) / 2) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gelu_sigmoid(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(1.702 * x)


def _gelu_sigmoid_dx(x: np.ndarray) -> np.ndarray:
    return _sigmoid(1.702 * x) * (1 + 1.702 * x * (1 - _sigmoid(1.702 * x)))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


def _truth(function: Callable) -> Callable:
    """A comparison that answers 1.0 or 0.0."""
    return lambda *operands: function(*operands).astype(np.float32)


def _arithmetic(name: str, function: Callable, **properties: object) -> Operator:
    return Operator(name, function, inputs=2, **properties)  # type: ignore[arg-type]


def _scalar(name: str, function: Callable, **properties: object) -> Operator:
    return Operator(name, function, activation=True, **properties)  # type: ignore[arg-type]


OPERATORS = {
    operator.name: operator
    for operator in (
        _arithmetic("add", np.add, reduces=True),
        _arithmetic("subtract", np.subtract, reduces=True),
        _arithmetic("multiply", np.multiply, reduces=True),
        _arithmetic("maximum", np.maximum, reduces=True),
        _arithmetic("minimum", np.minimum, reduces=True),
        _arithmetic("power", np.power),
        _arithmetic("equal", _truth(np.equal)),
        _arithmetic("not_equal", _truth(np.not_equal)),
        _arithmetic("greater", _truth(np.greater)),
        _arithmetic("greater_equal", _truth(np.greater_equal)),
        _arithmetic("less", _truth(np.less)),
        _arithmetic("less_equal", _truth(np.less_equal)),
        _arithmetic("logical_and", _truth(np.logical_and)),
        _arithmetic("logical_or", _truth(np.logical_or)),
        _arithmetic("logical_xor", _truth(np.logical_xor)),
        _arithmetic("bitwise_and", np.bitwise_and, bitwise=True, reduces=True),
        _arithmetic("bitwise_or", np.bitwise_or, bitwise=True, reduces=True),
        _arithmetic("bitwise_xor", np.bitwise_xor, bitwise=True, reduces=True),
        _arithmetic("left_shift", np.left_shift, bitwise=True),
        _arithmetic("right_shift", np.right_shift, bitwise=True),
        Operator("invert", np.invert, inputs=1, bitwise=True),
        _scalar("abs", np.abs, inputs=1),
        _scalar("rsqrt", lambda x: 1 / np.sqrt(x), inputs=1, valid=(2.0**-87, 2.0**97)),
        _scalar("reciprocal", np.reciprocal, inputs=1, valid=(2.0**-42, 2.0**42), valid_magnitude=True),
        _scalar("copy", lambda x: x),
        _scalar("square", np.square),
        _scalar("exp", np.exp),
        _scalar("log", np.log, valid=(2.0**-64, 2.0**64)),
        _scalar("sqrt", np.sqrt, valid=(2.0**-116, 2.0**118)),
        _scalar("sigmoid", _sigmoid),
        _scalar("relu", lambda x: np.maximum(x, 0)),
        _scalar("silu", lambda x: x * _sigmoid(x)),
        _scalar("silu_dx", _silu_dx),
        _scalar("tanh", np.tanh),
        _scalar("softplus", _softplus),
        _scalar("mish", lambda x: x * np.tanh(_softplus(x))),
        _scalar("erf", _erf),
        _scalar("erf_dx", _erf_dx),
        _scalar("gelu", _gelu),
        _scalar("gelu_dx", _gelu_dx),
        _scalar("gelu_apprx_tanh", _gelu_tanh),
        _scalar("gelu_apprx_sigmoid", _gelu_sigmoid),
        _scalar("gelu_apprx_sigmoid_dx", _gelu_sigmoid_dx),
        _scalar("sign", np.sign),
        _scalar("sin", np.sin, valid=(-math.pi, math.pi)),
        _scalar("arctan", np.arctan, valid=(-math.pi / 2, math.pi / 2)),
    )
}
