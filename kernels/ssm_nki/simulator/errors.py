"""What a kernel can do wrong."""


class KernelError(ValueError):
    """The kernel breaks a rule of the machine; the message names the instruction, the operand and the rule."""


class UnsupportedError(KernelError):
    """The kernel may be right, but it uses an operation or a parameter that the simulator does not have."""


class MissingError(UnsupportedError, AttributeError):
    """The same for a name of a module or of a tensor, so that hasattr() answers False."""


def require(condition: bool, message: str, *values: object) -> None:
    """Raise `KernelError` unless `condition` holds; `message` takes `values` at its {}, formatted only then."""
    if not condition:
        raise KernelError(message.format(*values))
