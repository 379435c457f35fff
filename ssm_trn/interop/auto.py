"""A LanguageModel as transformers' AutoModelForCausalLM gives it, with `generate`.

After `import ssm_trn`, `AutoModelForCausalLM.from_pretrained(folder)` reads the folder of a run or what
`ssm-trn convert` wrote. `save_pretrained` writes such a folder.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

try:
    from transformers import AutoModelForCausalLM, Cache, GenerationMixin, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.modeling_utils import slice_logits_to_keep
except ImportError as error:
    raise ImportError("this needs transformers, 5.24 or newer: pip install 'ssm-trn[hf]'") from error

from ssm_trn.config import ModelConfig
from ssm_trn.interop.auto_config import SsmTrnConfig
from ssm_trn.layers import Float32Parameters
from ssm_trn.model import LanguageModel
from ssm_trn.state import map_state


class StateCache(Cache):
    """The state of a LanguageModel in the place of transformers' caches of keys and values.

    Attributes:
        state: as `LanguageModel` takes and gives it.
        length: how many steps it has read, padding included.
    """

    is_linear = (False,)  # transformers may give back the whole text: it then cuts off the `length` steps in the cache
    is_croppable = False
    is_compileable = False

    def __init__(self, state):
        super().__init__(layers=[])
        self.state, self.length = state, 0

    def __len__(self) -> int:
        return len(self.state)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state = map_state(lambda part: part.index_select(0, indices.to(part.device)), self.state)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = map_state(lambda part: part.repeat_interleave(repeats, 0), self.state)

    def reset(self) -> None:
        raise ValueError("a StateCache cannot be emptied: leave it out, and the model makes a new one")

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a recurrent state cannot forget its last tokens: generate without an assistant model")


class SsmTrnForCausalLM(PreTrainedModel, GenerationMixin):
    """`model` is the LanguageModel."""

    config_class = SsmTrnConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]
    _is_stateful = True

    def __init__(self, config: SsmTrnConfig):
        super().__init__(config)
        self.model = LanguageModel(ModelConfig.from_dict(config.model or {}))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **options):
        """As transformers' own, but weights that are missing, left over or of another shape are an error."""
        model, report = super().from_pretrained(*args, output_loading_info=True, **options)
        if problems := {name: sorted(map(str, keys)) for name, keys in report.items() if keys}:
            raise ValueError(f"the weights do not fit the config: {problems}")
        return (model, report) if output_loading_info else model

    def save_pretrained(self, save_directory: str | Path, state_dict: Any = None, **options) -> None:
        """Writes the folder as ssm_trn does, and generation_config.json. Options of transformers do not apply."""
        if state_dict is not None:
            raise ValueError("save_pretrained writes the weights that the model has: leave out state_dict")
        self.model.save_pretrained(save_directory)
        self.generation_config.save_pretrained(save_directory)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, and the cache after T new steps.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, S], of which the last T columns are those of input_ids; 0 at padding, which may stand
                anywhere. Positions count real tokens, so position_ids are not needed.
            cache: of an earlier call; it is changed in place.
            labels: int64 [B, T], -100 where none counts: `loss` is then that of the next tokens.
            use_cache: whether to make a cache where there is none; by default, when the model is not in training.
            logits_to_keep: of how many last steps to give logits, or of which; 0: of all.
            options: what transformers hands on to all its models.
        """
        if cache is not None and not isinstance(cache, StateCache):
            raise ValueError(f"cache is a {type(cache).__name__}: only a StateCache of an earlier call fits this model")
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :].bool()
        if mask is not None and mask.device.type in ("cpu", "cuda") and bool(mask.all()):
            mask = None  # faster, and the same
        features, state = self.model.features(input_ids, None if cache is None else cache.state, mask)
        if cache is None and (not self.training if use_cache is None else use_cache):
            cache = StateCache(state)
        if cache is not None:
            cache.state, cache.length = state, cache.length + input_ids.shape[1]
        logits = self.model.logits(slice_logits_to_keep(features, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)

    def get_input_embeddings(self):
        return self.model.embedding

    def get_output_embeddings(self):
        return self.model.head

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **options):
        if new_num_tokens in (None, self.config.vocab_size):
            return self.model.embedding
        raise ValueError("the vocabulary of an ssm_trn model is part of its config: train one with another vocab_size")

    def _init_weights(self, module) -> None:
        """Only asked for weights that are not in the file, which `from_pretrained` then tells of."""
        if isinstance(module, Float32Parameters):
            module.reset_parameters()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, mode, batch_size, max_cache_length):
        """A state with room for all tokens, so that it never has to grow."""
        if model_kwargs.get("cache") is None and generation_config.use_cache is not False:
            rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
            model_kwargs["cache"] = StateCache(self.model.init_state(rows, max_cache_length + 1))


AutoModelForCausalLM.register(SsmTrnConfig, SsmTrnForCausalLM, exist_ok=True)
