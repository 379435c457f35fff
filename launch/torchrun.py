"""torchrun, with the same options, that ends with the exit status of the process that failed first.

torchrun itself ends with 1, whatever failed. A job script must tell a run that was stopped and saved (75)
from one that failed.
"""

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    try:
        run.main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode  # minus the number of the signal, if one ended the process
        raise SystemExit(code if code > 0 else 128 - code) from error
    except SignalException as stop:
        raise SystemExit(128 + stop.sigval) from stop


if __name__ == "__main__":
    main()
