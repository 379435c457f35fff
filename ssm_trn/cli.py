"""The command `ssm-trn`. Each command imports what it needs only when it runs, so that help comes at once."""

import errno
import os
import re
import sys
import time
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature
from typing import Any

from ssm_trn.runtime import yield_idle_threads

DESCRIPTION = """usage: ssm-trn COMMAND ...

Sequence models beyond the transformer: made for AWS Trainium, running on GPUs and CPUs, compared with transformers.

commands:"""

_MENDS = {
    errno.ENOSPC: "free some and run the same command again",
    errno.EDQUOT: "free some and run the same command again",
    errno.EACCES: "choose another path or change its permissions",
    errno.EROFS: "choose another path",
    errno.EEXIST: "a file stands where a folder should be, choose another path",
    errno.ENOTDIR: "a file stands where a folder should be, choose another path",
    errno.EISDIR: "name a file, not a folder",
}
_GOING_ON = {
    "prepare": ": the same command goes on from what was saved",
    "fit": ": the same command goes on from the last checkpoint, with --ckpt_path last",
    "compare": ": the same command goes on from there",
}
_LOST = "Connection (closed|reset) by peer"  # in the words of gloo
_PATIENCE = 10  # seconds, which a busy machine may need to end the first process, and torchrun then the others
_WRAPPING = re.compile("Parser key|Problem with given class_path|Does not validate")


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    That is 0, or 2 after wrong input, told in one sentence, 75 of a training that was told to stop and saved, 130 after
    Ctrl-C, 141 when the reader of the output left, and 1 where another process of the training is lost or `doctor`
    found a fault.
    `--debug` anywhere, or SSM_TRN_DEBUG=1, shows the whole traceback of an error instead.
    """
    yield_idle_threads()
    words = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in words or os.environ.get("SSM_TRN_DEBUG") == "1"
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help"):
        print(DESCRIPTION)
        print("\n".join(f"  {name:10} {summary}" for name, (summary, _) in COMMANDS.items()))
        print("\nssm-trn COMMAND --help tells more; --debug shows the traceback of an error.")
        return 0
    try:
        if words[0] not in COMMANDS:
            raise ValueError(f"unknown command '{words[0]}': choose one of {', '.join(COMMANDS)}")
        _, run = COMMANDS[words[0]]
        run(words[1:])
    except SystemExit as stop:  # how argument parsers end, after --help too
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        print(f"ssm-trn: stopped{_GOING_ON.get(words[0], '')}", file=sys.stderr)
        return 130  # as shells tell it: 128 + SIGINT
    except BrokenPipeError:  # who read our output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at the end would fail again
        return 141  # as shells tell it: 128 + SIGPIPE
    except Exception as error:
        if not debug and _is_lost_connection(error):
            print("ssm-trn: another process of the training ended: it, or torchrun below, tells why", file=sys.stderr)
            return 1
        if debug or not _is_wrong_input(error):
            raise
        _let_first_process_tell()
        hint = f"; see ssm-trn {words[0]} --help" if isinstance(error, ArgumentError) else ""
        print(f"ssm-trn: error: {_sentence(error)}{hint}", file=sys.stderr)
        return 2
    return 0


def _train(subcommand: str) -> Callable[[list[str]], None]:
    def run(words: list[str]) -> None:
        import_module("ssm_trn.training.command_line").run(subcommand, words)

    return run


def _function(module: str, name: str) -> Callable[[list[str]], None]:
    """A command that is a function: its arguments are the options, its docstring the help."""
    return lambda words: _call(name, getattr(import_module(module), name), words)


def _functions(name: str, modules: dict[str, str]) -> Callable[[list[str]], None]:
    """A command with subcommands, each a function in the module beside its name."""
    return lambda words: _call(name, [getattr(import_module(module), of) for of, module in modules.items()], words)


def _call(command: str, functions: Any, words: list[str]) -> None:
    from jsonargparse import auto_cli

    from ssm_trn.runtime import set_up_process

    parameters = [
        parameter
        for function in (functions if isinstance(functions, list) else [functions])
        for parameter in signature(function).parameters.values()
    ]
    switches = {f"--{parameter.name}" for parameter in parameters if parameter.default is False}
    words = [f"{word}=true" if word in switches else word for word in words]
    set_up_process()
    auto_cli(functions, args=words, prog=f"ssm-trn {command}", exit_on_error=False)


def _lm_eval(words: list[str]) -> None:
    import_module("ssm_trn.evaluation.harness").run(words)


def _doctor(words: list[str]) -> None:
    import_module("ssm_trn.doctor").run(words)


COMMANDS: dict[str, tuple[str, Callable[[list[str]], None]]] = {
    "prepare": ("turn text into a tokenizer and token files", _function("ssm_trn.data.prepare", "prepare")),
    "fit": ("train a model as YAML files describe it", _train("fit")),
    "validate": ("loss and bits per byte of a run's checkpoint on the validation data", _train("validate")),
    "test": ("the same (the held-out data serves both)", _train("test")),
    "evaluate": ("score a run with lm-eval tasks", _function("ssm_trn.evaluation.evaluate", "evaluate")),
    "lm-eval": ("lm-eval's own command line, with --model ssm_trn", _lm_eval),
    "benchmarks": (
        "list the tasks that need no network, and the benchmark files that a folder lacks",
        _function("ssm_trn.evaluation.tasks", "benchmarks"),
    ),
    "compare": (
        "train and evaluate several models as a study describes them, and write a report",
        _function("ssm_trn.evaluation.comparison", "compare"),
    ),
    "generate": (
        "go on from a prompt with a trained model, as it writes",
        _function("ssm_trn.generation.command", "generate"),
    ),
    "convert": (
        "turn a model from or into another project's format, with its tokenizer",
        _function("ssm_trn.interop.command", "convert"),
    ),
    "plan": ("memory, hours and cost of a training on trn1, from its file", _function("ssm_trn.plan", "plan")),
    "bench": (
        "what models cost on this device; ops and models beside other implementations",
        _functions(
            "bench",
            {
                "ops": "ssm_trn.bench.command",
                "step": "ssm_trn.bench.command",
                "model": "ssm_trn.bench.model_command",
            },
        ),
    ),
    "doctor": ("what this environment can train on, and what in it is known not to work", _doctor),
}


def _is_lost_connection(error: Exception) -> bool:
    """Whether what failed is an exchange between the processes that torchrun started, as one of them had ended."""
    told = type(error).__name__ in ("DistBackendError", "DistNetworkError") or re.search(_LOST, str(error))
    return "TORCHELASTIC_RUN_ID" in os.environ and isinstance(error, RuntimeError) and bool(told)


def _let_first_process_tell() -> None:
    """Waits in all processes of a training but the first: if that has the same error, torchrun ends them meanwhile."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0":
        time.sleep(_PATIENCE)


def _is_wrong_input(error: Exception) -> bool:
    if isinstance(error, ValueError | OSError | ArgumentError):
        return True
    return type(error).__name__ == "MisconfigurationException"  # Lightning's, not worth its import


def _sentence(error: BaseException) -> str:
    """What was wrong, without the wrapping that jsonargparse puts around errors of options and classes."""
    if isinstance(error, OSError) and error.strerror:  # the operating system's, not one of ours
        mend = _MENDS.get(error.errno or 0, "check that path")
        return f"{error.filename or 'a file'}: {error.strerror.lower()}; {mend}"
    option = re.findall(r'Parser key "(.+?)"', str(error))
    while (inner := error.__cause__ or error.__context__) and _WRAPPING.match(str(error)):
        error = inner
    message = " ".join(str(error).split()) or type(error).__name__
    if message.startswith("- "):  # a list of what it might have been; the first says enough
        message = message[2:].split(" - ")[0]
    return f"{option[-1]}: {message}" if option and message.startswith("Expected") else message
