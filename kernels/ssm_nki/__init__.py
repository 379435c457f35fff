"""NKI kernels for linear recurrences on AWS Trainium, with a simulator, a lint and a cost model for them."""

from ssm_nki.limits import supports

__all__ = ["supports"]
