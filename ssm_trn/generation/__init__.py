"""Text from a model: prompts are read in chunks, then each token is one step with a state of constant size.

sampling.py    how a token is chosen from logits
loop.py        rows of tokens that grow: `Generation`, `generate`
text.py        the same as text that streams
command.py     `ssm-trn generate`
"""

from ssm_trn.generation.loop import Generation, generate, prefill
from ssm_trn.generation.sampling import GREEDY, Sampling
from ssm_trn.generation.text import encode_prompts, stream_text

__all__ = ["GREEDY", "Generation", "Sampling", "encode_prompts", "generate", "prefill", "stream_text"]
