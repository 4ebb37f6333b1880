"""Sharing parameters between models."""

from torch import nn

from lintra.compat.fast_transformers.feature_maps import RandomFourierFeatures


def make_mirror(src_module: nn.Module, dst_module: nn.Module) -> None:
    """Set each parameter of `src_module` in `dst_module`, under its name: they share it from then on.

    For a recurrent model that generates while its parallel twin is trained. Random features are copied, as
    they are now: mirror again after `new_feature_map`. Other buffers stay apart. Raises AttributeError where
    `dst_module` has no module of such a name.
    """
    for name, parameter in src_module.named_parameters():
        path, _, last = name.rpartition(".")
        setattr(dst_module.get_submodule(path), last, parameter)
    for name, module in src_module.named_modules():
        if isinstance(module, RandomFourierFeatures):
            dst_module.get_submodule(name).omega = module.omega
