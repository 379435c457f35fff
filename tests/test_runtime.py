"""What a run gives must not depend on what ran before it in the process."""

import subprocess
import sys

GRADIENTS = """
import hashlib, torch
from ssm_trn.ops.contexts import one_thread
from ssm_trn.runtime import set_up_process

{before}
torch.manual_seed(0)
q = torch.randn(3, 8, 4, 256, 32, requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(*q, is_causal=True).square().sum().backward()
print(torch.get_num_threads(), hashlib.sha256(q.grad.numpy().tobytes()).hexdigest())
"""
EARLIER_WORK = "with one_thread(): pass"


def gradients(before: str) -> str:
    """Threads and hash of attention's gradients, with two threads, in a process of its own."""
    command = [sys.executable, "-c", GRADIENTS.format(before=before)]
    run = subprocess.run(command, env={"OMP_NUM_THREADS": "2"}, capture_output=True, text=True, check=True)
    return run.stdout


def test_gradients_do_not_depend_on_what_ran_before():
    alone, after = gradients("set_up_process()"), gradients(f"set_up_process()\n{EARLIER_WORK}")
    assert alone == after and alone.startswith("2 ")
