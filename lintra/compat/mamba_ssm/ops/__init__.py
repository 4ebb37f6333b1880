"""The ops of mamba_ssm by the names of their modules there."""

from lintra.compat.mamba_ssm.ops import selective_scan_interface, triton

__all__ = ["selective_scan_interface", "triton"]
