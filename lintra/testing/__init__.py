"""The laws of attention as a kit: for lintra's mechanisms, and for plain functions of any library.

    report = check_attention(linear.Config())
    print(report)
    report.raise_if_failed()

Only PyTorch is needed; `laws_of` gives pytest, or a loop, one test for each law.
"""

from lintra.testing.check import check_attention, laws_of
from lintra.testing.function_laws import MODULE_LAWS, check_module
from lintra.testing.laws import LAWS, WITH_DEFINITION
from lintra.testing.report import Finding, Report

__all__ = [
    "LAWS",
    "MODULE_LAWS",
    "WITH_DEFINITION",
    "Finding",
    "Report",
    "check_attention",
    "check_module",
    "laws_of",
]
