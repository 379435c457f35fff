"""A callback for configurations of tests: the process dies as by a power cut."""

import os
import signal

from lightning.pytorch import Callback


class KillAfter(Callback):
    """Kills the process when `step` optimizer steps are done."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
