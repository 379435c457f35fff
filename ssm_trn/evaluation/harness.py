"""`ssm-trn lm-eval ...`: lm-eval's own command line, which knows `--model ssm_trn` and the tasks of this package."""

import os
import sys
from argparse import ArgumentParser
from functools import partial


def run(words: list[str]) -> None:
    """Runs lm-eval with these words, and with two options of ours.

    --benchmarks DIR: folder of benchmark files, from which tasks take their data; by default SSM_TRN_BENCHMARKS.
    --online: data that are not there may come from the Hugging Face hub, which is out of reach otherwise.
    """
    parser = ArgumentParser(prog="ssm-trn lm-eval", add_help=False, allow_abbrev=False)
    parser.add_argument("--benchmarks")
    parser.add_argument("--online", action="store_true")
    ours, theirs = parser.parse_known_args(words)
    if not ours.online:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when `datasets` is first imported
    import lm_eval.tasks
    from lm_eval.__main__ import cli_evaluate

    import ssm_trn.evaluation.lm  # noqa: F401  (makes `--model ssm_trn` known)
    from ssm_trn.evaluation.benchmarks import benchmarks_folder
    from ssm_trn.evaluation.tasks import Tasks
    from ssm_trn.runtime import set_up_process

    set_up_process()
    manager = partial(Tasks, benchmarks=benchmarks_folder(ours.benchmarks), online=ours.online)
    original, lm_eval.tasks.TaskManager = lm_eval.tasks.TaskManager, manager  # there is no other way in for it
    sys.argv = ["ssm-trn lm-eval", *theirs]
    try:
        cli_evaluate()
    finally:
        lm_eval.tasks.TaskManager = original
