"""A callback for configurations of tests: the process dies as by a power cut."""

import os
import signal

from lightning.pytorch import Callback


class KillAfter(Callback):
    """Kills the process when `step` optimizer steps are done, or sends it another signal; of several, `rank`."""

    def __init__(self, step: int, rank: int = 0, number: int = int(signal.SIGKILL)):
        self.step, self.rank, self.number = step, rank, number

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.number)
