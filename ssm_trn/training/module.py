"""The training of a language model: loss, optimizer, schedule, what is logged and what a checkpoint holds."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ssm_trn.config import ModelConfig
from ssm_trn.data.datamodule import IGNORED
from ssm_trn.model import LanguageModel
from ssm_trn.training.accuracy import accuracies, accuracy_counts
from ssm_trn.training.faults import FiniteUpdates
from ssm_trn.training.parameter_groups import parameter_groups
from ssm_trn.training.resumption import check_settings, deciding_settings, random_states, restore_random_states
from ssm_trn.training.schedule import learning_rate_ratio
from ssm_trn.training.sharding import shard

FORMAT_VERSION = 1


class LanguageModelModule(LightningModule):
    """Trains a `LanguageModel` on batches {tokens: int64 [B, T], targets: int64 [B, T], reset: bool [B, T]}.

    Logged: `train/loss`, `validation/loss` and `test/loss` in nats per token, `validation/bits_per_byte` (and of test),
    accuracies of synthetic tasks, `learning_rate`, `gradient_norm` before clipping, and `step`, the optimizer steps
    done. Values stay tensors, so no step waits for the device. The Trainer's `gradient_clip_val` clips.

    Args:
        config: the model.
        learning_rate: peak of the schedule.
        weight_decay: of AdamW, for the parameters that `parameter_groups` does not exempt.
        betas: of AdamW.
        warmup_steps: optimizer steps of the linear rise to the peak.
        final_learning_rate_ratio: where the cosine ends, as a share of the peak.
        decay_embeddings: whether weight decay applies to embeddings.
        checkpoint_activations: less memory for a third more time, see `LanguageModel`.
        skip_nonfinite_batches: whether a batch whose loss or gradient is not finite is left out and counted in
            `skipped_batches`; by default it ends the training.
    """

    def __init__(
        self,
        config: ModelConfig,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 100,
        final_learning_rate_ratio: float = 0.1,
        decay_embeddings: bool = False,
        checkpoint_activations: bool = False,
        skip_nonfinite_batches: bool = False,
    ):
        super().__init__()
        if not learning_rate > 0:
            raise ValueError(f"learning_rate is {learning_rate}; it must be above 0")
        if not 0 <= final_learning_rate_ratio <= 1:
            raise ValueError(f"final_learning_rate_ratio is {final_learning_rate_ratio}; it must be between 0 and 1")
        if not (weight_decay >= 0 and warmup_steps >= 0):  # NaN is neither
            raise ValueError(f"weight_decay is {weight_decay}, warmup_steps {warmup_steps}; both must be at least 0")
        self.config = config
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = tuple(betas)
        self.warmup_steps = warmup_steps
        self.final_learning_rate_ratio = final_learning_rate_ratio
        self.decay_embeddings = decay_embeddings
        self.model = LanguageModel(config)
        self.model.checkpoint_activations = checkpoint_activations
        self.register_buffer("piece_bytes", torch.zeros(config.vocab_size, dtype=torch.int64), persistent=False)
        self._scores: list[Tensor] = []
        self._finite_updates = FiniteUpdates(skip_nonfinite_batches)
        self._random_states: list[dict[str, Any]] = []

    def configure_model(self) -> None:
        """Under FSDP2 (`trainer.strategy: fsdp2`), leaves each process its part of the weights."""
        if self.device_mesh is not None:
            shard(self.trainer.strategy.precision_plugin.convert_module(self).model, self.device_mesh["data_parallel"])

    def setup(self, stage: str) -> None:
        """Learns from the data's tokenizer, if there is one, how many bytes each token stands for."""
        tokenizer = getattr(self.trainer.datamodule, "tokenizer", None)
        if tokenizer is None:
            return
        if tokenizer.vocab_size != self.config.vocab_size:
            raise ValueError(
                f"the data has a vocabulary of {tokenizer.vocab_size}, the model one of {self.config.vocab_size}: "
                "make model.init_args.config.vocab_size the same"
            )
        self.piece_bytes.copy_(torch.from_numpy(tokenizer.piece_bytes))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits [B, T, vocab_size] of a batch."""
        logits, _ = self.model(batch["tokens"], reset=batch["reset"])
        return logits

    def configure_optimizers(self) -> torch.optim.AdamW:
        # One fused kernel takes a third of the CPU time of the loop over tensors. Under 16-mixed it would unscale the
        # gradients itself, after they were clipped.
        fused = self.trainer.strategy.root_device.type in ("cpu", "cuda") and self.trainer.precision != "16-mixed"
        groups = parameter_groups(self.model, self.weight_decay, self.decay_embeddings)
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas, fused=fused or None)

    def on_train_start(self) -> None:
        self._total_steps = self.trainer.estimated_stepping_batches
        if not 0 < self._total_steps < math.inf:
            raise ValueError("the training has no end, which the learning rate needs: set trainer.max_steps")
        # Last of all: the loaders have drawn by now, as they had in the run that is resumed.
        restore_random_states(self._random_states, self.global_rank, self.device)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        step = self.trainer.global_step
        ratio = learning_rate_ratio(step, self.warmup_steps, self._total_steps, self.final_learning_rate_ratio)
        for group in self.optimizers().param_groups:
            group["lr"] = self.learning_rate * ratio

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        targets = batch["targets"].flatten()
        nats = F.cross_entropy(self(batch).float().flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
        # Of all processes: a mean of their means would weigh tokens by how many others are scored beside them.
        totals = self._over_processes(torch.stack([nats.detach(), (targets != IGNORED).sum().to(nats.dtype)]))
        tokens = totals[1].clamp(min=1)
        self.log("train/loss", totals[0] / tokens)
        self._log_number("learning_rate", self.optimizers().param_groups[0]["lr"])
        return nats * (self.trainer.world_size / tokens)  # strategies average the gradients over the processes

    def on_train_batch_end(self, outputs, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._log_step()
        if self.trainer.global_step % self.trainer.log_every_n_steps == 0:
            self._finite_updates.read(self.trainer)
            if self._finite_updates.skip:
                self._log_number("skipped_batches", self._finite_updates.skipped)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        total_norm = getattr(self.trainer.strategy, "total_norm", get_total_norm)  # where a process holds but a part
        norm = total_norm([parameter.grad for parameter in parameters])
        self.log("gradient_norm", norm)
        if gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:
            clip_grads_with_norm_(parameters, gradient_clip_val, norm)
        if self.trainer.precision != "16-mixed":  # whose scaler leaves out such steps, and finds its scale by them
            self._finite_updates.check(parameters, norm, self.trainer)

    def on_validation_epoch_start(self) -> None:
        self._scores.clear()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._scores.append(self._score(batch))

    def on_validation_epoch_end(self) -> None:
        self._log_scores("validation")
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._log_step()

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self._log_scores("test")

    def _score(self, batch: dict[str, Tensor]) -> Tensor:
        """float32 [4 + ...]: nats and tokens of all scored steps, nats and bytes of those whose target is text, and
        what `accuracy_counts` counts."""
        logits, targets = self(batch), batch["targets"].flatten()
        nats = F.cross_entropy(logits.float().flatten(0, 1), targets, ignore_index=IGNORED, reduction="none")
        scored = targets != IGNORED
        lengths = self.piece_bytes[targets.clamp(min=0)] * scored  # 0 at special tokens, the end of a document too
        sums = torch.stack([nats.sum(), scored.sum(), (nats * (lengths > 0)).sum(), lengths.sum()])
        return torch.cat([sums, accuracy_counts(logits, batch)])

    def _log_scores(self, stage: str) -> None:
        # Sums of single batches are exact enough in float32; over a whole data set they are added in float64.
        totals = self._over_processes(torch.stack([score.cpu() for score in self._scores]).double().sum(0))
        nats, tokens, text_nats, text_bytes, *counts = totals.tolist()
        self._log_number(f"{stage}/loss", nats / max(tokens, 1))
        if text_bytes:
            self._log_number(f"{stage}/bits_per_byte", text_nats / (math.log(2) * text_bytes))
        if counts:
            for name, value in accuracies(counts, self.trainer.datamodule.parts(stage)):
                self._log_number(f"{stage}/{name}", value)

    def _over_processes(self, numbers: Tensor) -> Tensor:
        """The sum over all processes of the training."""
        if self.trainer.world_size == 1:
            return numbers
        return self.trainer.strategy.reduce(numbers.to(self.device), reduce_op="sum")

    def _log_step(self) -> None:
        """Gives all loggers the optimizer steps done as `step`: Lightning's own count may shift in a resumed run."""
        self._log_number("step", self.trainer.global_step)

    def _log_number(self, name: str, value: float) -> None:
        """Keeps it on the CPU: Lightning would send a number to the device, at every step, and read it back."""
        self.log(name, torch.tensor(float(value)))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ssm_trn_format_version"] = FORMAT_VERSION
        checkpoint["model_config"] = self.config.to_dict()
        checkpoint["settings"] = deciding_settings(self)
        checkpoint["random_states"] = random_states(self.device)
        self._finite_updates.read(self.trainer)  # no checkpoint takes the place of one before a step that went wrong
        checkpoint["skipped_batches"] = self._finite_updates.skipped

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Checks that the checkpoint is one of this model and takes nothing but tensors from it.

        The optimizer's options come from this object, not from the checkpoint, so that what the user asks for now wins.
        """
        version = checkpoint.get("ssm_trn_format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"the checkpoint has format version {version}, this ssm_trn reads {FORMAT_VERSION}")
        saved, wanted = checkpoint.get("model_config", {}), self.config.to_dict()
        differing = [name for name in wanted if saved.get(name) != wanted[name]]
        if differing:
            raise ValueError(
                f"the checkpoint is of another model: its {differing[0]} is {saved.get(differing[0])}, "
                f"the config's {wanted[differing[0]]}"
            )
        if checkpoint["state_dict"].keys() != self.state_dict().keys():
            raise ValueError("the checkpoint does not hold the weights of its model: name another with --ckpt_path")
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        if not {"optimizer_states", "loops"} <= checkpoint.keys():
            raise ValueError("the checkpoint holds weights only, no training goes on from it: name another one")
        check_settings(checkpoint.get("settings", {}), deciding_settings(self), self.trainer)
        self._random_states = checkpoint.get("random_states", [])
        self._finite_updates.skipped = checkpoint.get("skipped_batches", 0)
        for state in checkpoint["optimizer_states"]:
            groups = self.configure_optimizers().state_dict()["param_groups"]
            if [group["param_names"] for group in state["param_groups"]] != [group["param_names"] for group in groups]:
                raise ValueError(
                    "the checkpoint's optimizer groups its parameters in another way: keep decay_embeddings as it was"
                )
            state["param_groups"] = groups
