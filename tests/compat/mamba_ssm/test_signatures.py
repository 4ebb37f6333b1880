"""Names, order and defaults of parameters are those of the packages: transformers filters by them."""

import ast
import inspect
from importlib import import_module, util
from pathlib import Path

import pytest

PACKAGES = "lintra.compat"
DECORATOR = "use_kernel_func_from_hub_with_fallback"
SIGNATURES = {
    "mamba_ssm.ops.selective_scan_interface.selective_scan_fn": (
        "u delta A B C D=None z=None delta_bias=None delta_softplus=False return_last_state=False"
    ),
    "mamba_ssm.ops.selective_scan_interface.mamba_inner_fn": (
        "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight out_proj_bias A "
        "B=None C=None D=None delta_bias=None B_proj_bias=None C_proj_bias=None delta_softplus=True "
        "checkpoint_lvl=1 b_rms_weight=None c_rms_weight=None dt_rms_weight=None b_c_dt_rms_eps=1e-06"
    ),
    "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined": (
        "x dt A B C chunk_size D=None z=None dt_bias=None initial_states=None seq_idx=None cu_seqlens=None "
        "dt_softplus=False dt_limit=(0.0,inf) return_final_states=False return_varlen_states=False "
        "state_dtype=None"
    ),
    "mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined": (
        "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states=None seq_idx=None "
        "dt_limit=(0.0,inf) return_final_states=False activation='silu' rmsnorm_weight=None "
        "rmsnorm_eps=1e-06 outproj_weight=None outproj_bias=None headdim=None ngroups=1 "
        "norm_before_gate=True state_dtype=None"
    ),
    "mamba_ssm.ops.triton.selective_state_update.selective_state_update": (
        "state x dt A B C D=None z=None dt_bias=None dt_softplus=False state_batch_indices=None"
    ),
    "mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn": (
        "x weight bias z=None eps=1e-06 group_size=None norm_before_gate=True"
    ),
    "mamba_ssm.ops.triton.layernorm_gated.layernorm_fn": (
        "x weight bias z=None eps=1e-06 group_size=None norm_before_gate=True is_rms_norm=False"
    ),
    "mamba_ssm.ops.triton.layernorm_gated.RMSNorm": (
        "hidden_size eps=1e-05 group_size=None norm_before_gate=True device=None dtype=None"
    ),
    "mamba_ssm.ops.triton.layer_norm.rms_norm_fn": (
        "x weight bias residual=None x1=None weight1=None bias1=None eps=1e-06 dropout_p=0.0 rowscale=None "
        "prenorm=False residual_in_fp32=False return_dropout_mask=False"
    ),
    "mamba_ssm.ops.triton.layer_norm.layer_norm_fn": (
        "x weight bias residual=None x1=None weight1=None bias1=None eps=1e-06 dropout_p=0.0 rowscale=None "
        "prenorm=False residual_in_fp32=False is_rms_norm=False return_dropout_mask=False"
    ),
    "mamba_ssm.ops.triton.layer_norm.RMSNorm": "hidden_size eps=1e-05 dropout_p=0.0 device=None dtype=None",
    "causal_conv1d.causal_conv1d_fn": (
        "x weight bias=None seq_idx=None initial_states=None return_final_states=False final_states_out=None "
        "activation=None"
    ),
    "causal_conv1d.causal_conv1d_update": (
        "x conv_state weight bias=None activation=None cache_seqlens=None conv_state_indices=None"
    ),
    "causal_conv1d.causal_conv1d_varlen.causal_conv1d_varlen_states": "x cu_seqlens state_len",
}
# Functions that select one of transformers' own fallbacks.
THEIRS = {"use_mambapy", "use_associative_scan"}


def find(name):
    module, _, function = f"{PACKAGES}.{name}".rpartition(".")
    return getattr(import_module(module), function)


def told(parameter):
    default = parameter.default
    return parameter.name + ("" if default is parameter.empty else f"={default!r}".replace(" ", ""))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert " ".join(map(told, inspect.signature(find(name)).parameters.values())) == SIGNATURES[name]


def calls():
    """Yield the original name, number of positional arguments, keywords and place of transformers' calls."""
    spec = util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed (pip install -e '.[dev]')")
    names = {name.rpartition(".")[2] for name in SIGNATURES}
    for file in sorted((Path(spec.origin).parent / "models").glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        if DECORATOR not in text:
            continue
        nodes = list(ast.walk(ast.parse(text)))
        aliases = {}
        for node in nodes:
            for decorator in getattr(node, "decorator_list", ()):
                if (
                    getattr(getattr(decorator, "func", None), "id", "")
                    == "use_kernel_func_from_hub_with_fallback"
                ):
                    aliases[node.name] = decorator.args[0].value
        for node in nodes:
            if not isinstance(node, ast.Call):
                continue
            original = aliases.get(getattr(node.func, "id", ""))
            if original in names:
                keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
                yield original, len(node.args), keywords, f"{file.parent.name}:{node.lineno}"


def test_every_keyword_that_transformers_passes_is_known():
    functions = {name.rpartition(".")[2]: find(name) for name in SIGNATURES if "orm" not in name}
    seen = set()
    for name, positional, keywords, place in calls():
        seen.add(name)
        known = list(inspect.signature(functions[name]).parameters)
        assert positional <= len(known), place
        unknown = set(keywords) - set(known) - THEIRS
        assert not unknown, f"{place}: {name} has no {unknown}"
        assert not set(keywords) & set(known[:positional]), place
    assert len(seen) == 7
