"""Claims of papers, run again: what papers/NAME/run.py is made of.

A `Claim` is what a folder of papers/ shows. Its `Experiment` (a `Grid` of synthetic tasks, language models, timings)
makes rows, results.csv keeps them, and table, figure and the shapes that a paper reports are computed from them alone.
"""

from ssm_trn.claims.claim import Claim, Shape
from ssm_trn.claims.command import main
from ssm_trn.claims.experiment import Experiment, Job, Row
from ssm_trn.claims.grid import Grid, Task
from ssm_trn.claims.rows import Results

__all__ = ["Claim", "Experiment", "Grid", "Job", "Results", "Row", "Shape", "Task", "main"]
