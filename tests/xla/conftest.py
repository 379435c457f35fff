"""These tests run on torch-xla's CPU client, in an environment of their own: `make test-xla`."""

import os
from importlib.util import find_spec

if find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("SSM_TRN_NEURON", "xla-cpu")
    from ssm_trn.accelerators.detect import xla_device

    xla_device()  # autograd counts devices at its first backward pass, which may be one on the CPU
