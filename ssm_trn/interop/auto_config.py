"""config.json of an ssm_trn folder as transformers' AutoConfig reads it."""

from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ssm_trn.model import FORMAT_VERSION, MODEL_TYPE, parse_config


class SsmTrnConfig(PreTrainedConfig):
    """The model's own config (a ModelConfig as a dictionary) under `model`, beside what transformers asks for.

    Raises:
        ValueError: for another format version, or options that a ModelConfig does not have.
    """

    model_type = MODEL_TYPE

    def __init__(self, model: dict[str, Any] | None = None, format_version: int = FORMAT_VERSION, **options):
        # AutoModelForCausalLM looks for the class by the type of a config: it is there as soon as there is a config.
        import ssm_trn.interop.auto  # noqa: F401

        self.format_version, self.model = format_version, model
        if model is not None:  # transformers makes one without arguments to compare with
            config = parse_config({"format_version": format_version, "model": model}, "the config")
            sizes = {"vocab_size": config.vocab_size, "hidden_size": config.d_model}
            options = {**sizes, "num_hidden_layers": len(config.layers), **options}
            options["tie_word_embeddings"] = False  # a tied head is no weight of its own in ours
        super().__init__(**options)


CONFIG_MAPPING.register(MODEL_TYPE, SsmTrnConfig, exist_ok=True)
