"""`python -m ssm_trn`: the same as the command `ssm-trn`."""

import sys

from ssm_trn.cli import main

sys.exit(main())
