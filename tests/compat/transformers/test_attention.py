"""Models of transformers with the attention of lintra: as their own softmax, or as one of its mechanisms."""

import copy

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import lintra.hf  # noqa: E402
from benchmarks.families import FAMILIES  # noqa: E402
from lintra import attention  # noqa: E402
from lintra.attention import linear, performer, retention, softmax  # noqa: E402
from lintra.compat.transformers.attention import REGISTERED, attend, configured, restarts  # noqa: E402
from lintra.compat.transformers.cache import StateLayer, claim  # noqa: E402
from lintra.compat.transformers.masking import Visible  # noqa: E402

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.3}
DECODERS = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 4},
}
CONSTANT = ["linear", "performer", "cosformer"]
CAUSAL = [*CONSTANT, "aft", "bigbird", "longformer", "softmax"]
# Rounding of other layers: RMSNorm and rotary positions compute in float32 whatever the dtype of the model.
SAME = {"rtol": 1e-6, "atol": 1e-6}


def build(name, implementation, head="ForCausalLM", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **SIZES | DECODERS.get(name, {}) | {"pad_token_id": 0} | options
    )
    model = getattr(transformers, f"{name}{head}")._from_config(config, attn_implementation=implementation)
    return model.double().eval()


def tokens(b=2, t=20):
    return torch.randint(1, 50, (b, t), generator=torch.Generator().manual_seed(1))


def padding(side, b=2, t=20, pad=5):
    mask = torch.ones(b, t, dtype=torch.int64)
    mask[0, :pad] = 0
    return {"none": None, "left": mask, "right": mask.flip(1)}[side]


def inside(model):
    """The inputs and the output of attention in the first layer, [(q, k, v), y]."""
    kept = []

    def function(module, q, k, v, mask, **options):
        y = attend(model.config._attn_implementation, module, q, k, v, mask, **options)[0]
        kept.append(([x.transpose(1, 2) for x in (q, k, v)], y))
        return y, None

    return kept, function


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_lintra_is_what_the_model_was(name, side):
    """Logits at real tokens, and gradients, are those of sdpa; the softmax of eager is in 32 bits."""
    mask, results = padding(side), []
    for implementation in ("sdpa", "lintra"):
        model = build(name, implementation)
        y = model(tokens(), attention_mask=mask).logits
        y = y if mask is None else y[mask.bool()]
        y.square().mean().backward()
        results.append([y, *(x.grad for x in model.parameters())])
    assert_close(results[0], results[1], **SAME)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_encoders_are_what_they_were(name, side):
    mask = padding(side)
    a, b = (build(name, x, "Model")(tokens(), attention_mask=mask)[0] for x in ("sdpa", "lintra"))
    kept = slice(None) if mask is None else mask.bool()
    assert_close(a[kept], b[kept], rtol=1e-9, atol=1e-9)


def test_cross_attention_is_what_it_was():
    """For a memory as long as the sequence that reads it, and padded: only the mask tells them apart."""
    options = {"is_decoder": True, "add_cross_attention": True}
    other = torch.randn(2, 20, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    given = {"encoder_hidden_states": other, "encoder_attention_mask": padding("right")}
    a, b = (build("Bert", x, "Model", **options)(tokens(), **given)[0] for x in ("sdpa", "lintra"))
    assert_close(a, b, rtol=1e-9, atol=1e-9)
    with pytest.raises(NotImplementedError, match="cross-attention"):
        build("Bert", "lintra-linear", "Model", **options)(tokens(), **given)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize("cache", ["default", "static", "state"])
def test_generation_is_what_it_was(name, cache):
    options = {
        "do_sample": False,
        "min_new_tokens": 9,
        "max_new_tokens": 9,
        "attention_mask": padding("left"),
    }
    expected = build(name, "sdpa").generate(tokens(), **options)
    model = build(name, "lintra")
    if cache == "static":
        options["cache_implementation"] = "static"
        options["disable_compile"] = True
    elif cache == "state":
        options["past_key_values"] = lintra.hf.cache_for(model)
    assert torch.equal(model.generate(tokens(), **options), expected)


@pytest.mark.parametrize("implementation", ["lintra", "lintra-linear", "lintra-softmax"])
def test_packed_sequences_are_separate_ones(implementation):
    model, x = build("Llama", implementation), tokens(1)
    place = torch.cat((torch.arange(7), torch.arange(13)))[None]
    parts = torch.cat([model(part).logits for part in x.split([7, 13], 1)], 1)
    bounds = torch.tensor([0, 7, 20], dtype=torch.int32)
    for given in (
        {"use_cache": False},
        {"use_cache": True},
        {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds},
    ):
        assert_close(model(x, position_ids=place, **given).logits, parts, **SAME)
    two = model(x.expand(2, -1), position_ids=place, use_cache=False).logits
    assert_close(two, parts.expand(2, -1, -1), **SAME)
    cache = lintra.hf.cache_for(model)
    with pytest.raises(NotImplementedError, match="packed"):
        model(x, position_ids=place, past_key_values=cache)
    assert_close(model(x, past_key_values=cache).logits, model(x).logits, **SAME)  # the cache is as before
    with pytest.raises(ValueError, match="cu_seqlens must end"):
        model(x, cu_seq_lens_q=bounds[:2])


def test_packed_sequences_are_separate_ones_under_a_mask_of_pairs():
    """Llama 4 attends in chunks: its mask function gives a tensor."""
    sizes = {**SIZES, "num_key_value_heads": 2, "intermediate_size_mlp": 32, "head_dim": 8, "pad_token_id": 0}
    sizes |= {"num_local_experts": 2, "moe_layers": [1], "attention_chunk_size": 64}
    config = transformers.Llama4TextConfig(**sizes)
    torch.manual_seed(0)
    model = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="lintra").double().eval()
    )
    x, bounds = tokens(1), torch.tensor([0, 7, 20])
    place = torch.cat((torch.arange(7), torch.arange(13)))[None]
    parts = torch.cat([model(part).logits for part in x.split([7, 13], 1)], 1)
    for given in ({"use_cache": False}, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}):
        assert_close(model(x, position_ids=place, **given).logits, parts, **SAME)
    cache = model(x[:, :7]).past_key_values
    with pytest.raises(NotImplementedError, match="packed sequences after cached keys"):
        model(x[:, 7:], past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 13]))


@pytest.mark.parametrize("implementation", ["sdpa", "lintra"])
def test_positions_say_nothing_of_packing_beside_a_mask(implementation):
    """Neither if another row has padding, nor if positions jump during generation."""
    model, x = build("Llama", implementation), tokens(2, 10)
    again = torch.stack((torch.arange(10) % 5, torch.arange(10)))
    ones = torch.ones_like(x)
    first = [
        model(x, attention_mask=mask, position_ids=again, use_cache=False).logits[0]
        for mask in (ones, padding("left", 2, 10, 3).flip(0))
    ]
    assert_close(*first, **SAME)
    jump = torch.arange(10)[None] + 10 * (torch.arange(10) > 4)
    options = {"max_new_tokens": 4, "do_sample": False, "position_ids": jump, "attention_mask": ones[:1]}
    theirs = build("Llama", "sdpa").generate(x[:1], **options)
    assert torch.equal(model.generate(x[:1], **options), theirs)


def test_a_model_that_slices_its_mask():
    """Gemma 4, whose last layers share keys and values."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    sizes = {**SIZES, "num_hidden_layers": 4, "vocab_size_per_layer_input": 50, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8, "pad_token_id": 0}
    sizes |= {"sliding_window": 6, "num_kv_shared_layers": 2}
    config = transformers.Gemma4TextConfig(**sizes, layer_types=["sliding_attention", "full_attention"] * 2)
    found = []
    for implementation in ("sdpa", "lintra"):
        torch.manual_seed(0)
        kind = transformers.Gemma4ForCausalLM
        model = kind._from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
        found.append(model(tokens(t=12)).logits)
    assert_close(*found, rtol=1e-4, atol=1e-4)
    packed = Visible(True, sequence=torch.tensor([[0, 0, 1]]), size=(3, 3, "cpu"))
    with pytest.raises(NotImplementedError, match="packed sequences have no mask"):
        packed[:, :, -1:]


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize(
    ("name", "mechanism"),
    [*(("Llama", x) for x in CAUSAL), *(("Bert", x) for x in [*CAUSAL, "nystromformer", "clustered"])],
)
def test_a_mechanism_is_itself_on_the_layers_q_k_v(name, mechanism, side, monkeypatch):
    """On rotated q and k, with the scale of the model and a seed for each layer."""
    model = build(name, f"lintra-{mechanism}", "Model")
    kept, function = inside(model)
    transformers.AttentionInterface.register("lintra-kept", function)
    interface = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(interface, f"lintra-{mechanism}", interface.pop("lintra-kept"))
    mask = padding(side)
    model(tokens(), attention_mask=mask)
    for layer, ((q, k, v), y) in enumerate(kept):
        config = attention.in_layer(attention.load(mechanism).Config(), layer)
        ours = config.build(heads=4, kv_heads=k.shape[2], dim=8, causal=name == "Llama").double()
        expected = ours(q, k, v, mask=None if mask is None else mask.bool())
        if mechanism == "softmax" and mask is not None:  # it does not see whether queries are padded
            y, expected = y[mask.bool()], expected[mask.bool()]
        assert_close(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mechanism", CAUSAL)
def test_generating_with_a_cache_is_generating_without(mechanism):
    model, x = build("Llama", f"lintra-{mechanism}"), tokens()
    options = {"do_sample": False, "min_new_tokens": 9, "max_new_tokens": 9}
    for more in ({}, {"num_beams": 3}):
        given = options | more | {"attention_mask": padding("left")}
        plain = model.generate(x, use_cache=False, **given)
        state = lintra.hf.cache_for(model)
        assert torch.equal(model.generate(x, **given), plain)
        assert torch.equal(model.generate(x, past_key_values=state, **given), plain)
    alone = model.generate(x[:1, 5:], past_key_values=lintra.hf.cache_for(model), **options)
    assert torch.equal(alone, model.generate(x, attention_mask=padding("left"), **options)[:1, 5:])


@pytest.mark.parametrize("mechanism", CONSTANT)
def test_a_state_does_not_grow(mechanism):
    model, sizes = build("Llama", f"lintra-{mechanism}"), []
    cache = lintra.hf.cache_for(model)
    for part in tokens(2, 60).split([50, 9, 1], 1):
        model(part, past_key_values=cache)
        sizes.append(cache.nbytes)
    assert len(set(sizes)) == 1
    assert cache.get_seq_length() == 60


def test_a_state_is_taken_up_again_and_selected():
    model, x = build("Llama", "lintra-linear"), tokens(2, 30)
    whole = model(x, use_cache=False).logits
    cache = lintra.hf.cache_for(model)
    first = model(x[:, :11], past_key_values=cache).logits
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    rest = model(x[:, 11:].flip(0), past_key_values=cache).logits.flip(0)
    assert_close(torch.cat((first, rest), 1), whole, **SAME)
    cache.crop(0)
    with pytest.raises(ValueError, match=r"return to a copy\.copy"):
        cache.crop(-1)
    cache.reset()
    assert_close(model(x, past_key_values=cache).logits, whole, **SAME)


def test_a_copy_of_a_cache_is_a_place_to_come_back_to():
    model, x = build("Llama", "lintra-linear"), tokens(2, 15)
    cache = lintra.hf.cache_for(model)
    model(x[:, :11], past_key_values=cache)
    kept = copy.copy(cache)
    once, again = (model(x[:, 11:], past_key_values=each).logits for each in (cache, copy.copy(kept)))
    assert_close(once, again, rtol=0, atol=0)
    assert (cache.get_seq_length(), kept.get_seq_length()) == (15, 11)


def test_what_stands_in_padding_changes_nothing():
    model, mask = build("Llama", "lintra-linear"), padding("left")
    x = model.get_input_embeddings()(tokens()).detach()
    broken = x.masked_fill(~mask.bool()[..., None], torch.nan)
    a, b = (
        model(inputs_embeds=e, attention_mask=mask, use_cache=False).logits[mask.bool()] for e in (x, broken)
    )
    assert_close(a, b, rtol=0, atol=0)


def test_training_with_dropout_and_recomputed_blocks():
    model = build("Llama", "lintra", attention_dropout=0.5)
    model(tokens(), use_cache=False)  # evaluation before training
    model.train()
    torch.manual_seed(0)
    a = model(tokens(), use_cache=False).logits
    assert (a - model(tokens(), use_cache=False).logits).abs().max() > 0.01
    assert_close(model.eval()(tokens()).logits, build("Llama", "sdpa")(tokens()).logits, **SAME)
    model, grads = build("Llama", "lintra-linear").train(), []
    for recompute in (False, True):
        if recompute:
            model.activation_checkpointing_enable()
        model.zero_grad()
        model(tokens(), use_cache=False).logits.square().mean().backward()
        grads.append([x.grad for x in model.parameters()])
    assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-12)


def test_a_saved_model_keeps_its_weights_and_is_told_its_attention_again(tmp_path):
    model = build("Llama", "lintra-performer")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="lintra-performer", dtype=torch.float64
    )
    assert_close(again(tokens()).logits, model(tokens()).logits, rtol=0, atol=0)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert plain.config._attn_implementation == "sdpa"
    plain.set_attn_implementation("lintra-performer")
    assert_close(plain(tokens()).logits, model(tokens()).logits, rtol=0, atol=0)


def test_half_precision_and_autocast():
    model = build("Llama", "lintra-linear")
    wide = model.float()(tokens()).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(tokens()).logits
    assert_close(mixed.float(), wide, rtol=0.1, atol=0.3)  # bfloat16 has 8 bits, and the weights are large
    assert model.bfloat16()(tokens()).logits.dtype == torch.bfloat16


class Looks(TorchDispatchMode):
    """Count how often the value of a tensor is looked at, for which a GPU has to be waited for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_layers_look_once_whether_sequences_are_packed(monkeypatch):
    """And no layer looks for mechanisms in a folder."""
    counts = []
    for layers in (1, 4):
        model = build("Llama", "lintra", num_hidden_layers=layers)
        model(tokens())
        monkeypatch.setattr(attention, "names", None)
        with Looks() as looks:
            model(tokens())
        counts.append(looks.count)
        monkeypatch.undo()
    assert counts[0] == counts[1] == 1
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert restarts(positions).tolist() == [[1, 1, 1, 2, 2]]
    assert restarts(positions[:, :3]) is None
    positions[0, 3] = 3
    positions[0, 4] = 4
    assert restarts(positions) is None  # and not what it was before


@pytest.fixture
def registered():
    yield lintra.hf.register_attention
    for mapping in (
        transformers.AttentionInterface._global_mapping,
        REGISTERED,
    ):
        mapping.pop("lintra-mine", None)
    transformers.AttentionMaskInterface._global_mapping.pop("lintra-mine", None)


def test_a_configuration_gets_a_name(registered):
    registered("lintra-mine", performer.Config(features=24, seed=3))
    model = build("Llama", "lintra-mine")
    assert_close(model(tokens()).logits, model(tokens()).logits, rtol=0, atol=0)
    assert (model(tokens()).logits - build("Llama", "lintra-performer")(tokens()).logits).abs().max() > 1e-3
    registered("lintra-mine", softmax.Config(window=4, dropout=0.5))
    expected = build("Mistral", "sdpa", sliding_window=4)(tokens()).logits
    model = build("Mistral", "lintra-mine", sliding_window=None)
    assert_close(model(tokens()).logits, expected, **SAME)
    first = model(tokens()[:, :15])
    rest = model(tokens()[:, 15:], past_key_values=first.past_key_values).logits
    assert_close(torch.cat((first.logits, rest), 1), expected, **SAME)
    registered("lintra-mine", softmax.Config(window=2, scale=0.5))  # which the model's own do not replace
    own = build("Mistral", "lintra-mine", sliding_window=8)
    expected = build("Mistral", "lintra", sliding_window=2)
    for layer in expected.model.layers:
        layer.self_attn.scaling = 0.5
    assert_close(own(tokens()).logits, expected(tokens()).logits, **SAME)
    for name in ("mine", "lintra-", "lintra-linear"):
        with pytest.raises(ValueError, match="name must be"):
            registered(name, linear.Config())
    with pytest.raises(TypeError, match="mechanism's Config"):
        registered("lintra-mine", 3)


def test_value_heads_that_the_model_does_not_project_to_are_refused(registered):
    registered("lintra-mine", retention.Config(gate=False, value_heads=8))
    with pytest.raises(ValueError, match="has value_heads=8 where the model projects to 2: leave"):
        build("Llama", "lintra-mine")(tokens())


@pytest.mark.parametrize("mechanism", ["gated", "delta", "kda", "ssd", "retention", "rfa", "longshort"])
def test_mechanisms_with_weights_of_their_own_are_refused(mechanism):
    with pytest.raises(ValueError, match="needs weights that this model does not have"):
        build("Llama", f"lintra-{mechanism}")(tokens())


@pytest.mark.parametrize(
    ("name", "implementation", "options", "message"),
    [
        ("Llama", "lintra-nystromformer", {}, "has no causal form"),
        ("Llama", "lintra-lsh", {"num_key_value_heads": 4}, "one projection"),
        ("Mistral", "lintra-linear", {}, "no sliding window of 4 tokens"),
        ("Llama", "lintra-nothing", {}, "is not supported"),
    ],
)
def test_what_cannot_be_is_refused(name, implementation, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, implementation, **options)(tokens())


def test_calls_that_cannot_be_served_are_refused():
    model = build("Llama", "lintra-linear")
    with pytest.raises(NotImplementedError, match="says which query sees which key"):
        model(tokens(), attention_mask=torch.ones(2, 1, 20, 20, dtype=torch.bool))
    with pytest.raises(ValueError, match="drops no weights"):
        build("Llama", "lintra-linear", attention_dropout=0.1).train()(tokens())
    x = torch.zeros(1, 4, 3, 8)
    for option in (
        {"softcap": 30.0},
        {"s_aux": torch.zeros(4)},
        {"output_attentions": True},
        {"block_indices": torch.zeros(1, 3, 2)},
    ):
        with pytest.raises(NotImplementedError, match=f"does not support {next(iter(option))}"):
            attend("lintra", model, x, x, x, Visible(True), **option)
    with pytest.raises(TypeError, match=r"reads the attention mask \(its sum with scores\)"):
        torch.zeros(1, 4, 3, 3) + Visible(True)
    with pytest.raises(AttributeError, match=r"reads the attention mask \(its dtype\)"):
        _ = Visible(True).dtype
    exact = build("Llama", "lintra")
    given = {"attention_mask": torch.ones(2, 1, 20, 20, dtype=torch.bool)}
    with pytest.raises(NotImplementedError, match="a StateCache does not support a mask"):
        exact(tokens(), past_key_values=(cache := lintra.hf.cache_for(exact)), **given)
    assert_close(exact(tokens(), past_key_values=cache).logits, exact(tokens()).logits, **SAME)
    with pytest.raises(ValueError, match="attn_implementation='lintra'"):
        lintra.hf.cache_for(build("Llama", "sdpa"))
    cache = lintra.hf.StateCache()
    other = build("Llama", "sdpa")
    other(tokens(), past_key_values=cache)
    with pytest.raises(RuntimeError, match="were not taken"):
        other(tokens(), past_key_values=cache)


@pytest.mark.parametrize("cached", [False, True])
def test_padding_between_tokens_counts_in_a_window(cached):
    """As in transformers: a window is one of places."""
    mask = torch.tensor([[1] * 8 + [0] * 3 + [1] * 9, [0] * 4 + [1] * 16])
    found = [
        build("Mistral", name)(tokens(), attention_mask=mask, use_cache=cached).logits
        for name in ("sdpa", "lintra")
    ]
    assert_close(found[1][mask > 0], found[0][mask > 0], **SAME)


def test_a_window_with_padding_between_tokens_has_no_state():
    model = build("Mistral", "lintra")
    mask = torch.tensor([[1] * 8 + [0] * 3 + [1] * 9, [1] * 20])
    with pytest.raises(NotImplementedError, match="does not count padding between tokens"):
        model(tokens(), attention_mask=mask, past_key_values=lintra.hf.cache_for(model))
    cache = lintra.hf.cache_for(model)  # nor where the padding ends a call
    model(tokens()[:, :11], attention_mask=mask[:, :11], past_key_values=cache)
    with pytest.raises(NotImplementedError, match="does not count padding between tokens"):
        model(tokens()[:, 11:], attention_mask=mask, past_key_values=cache)


def test_a_model_called_in_inference_mode_is_trained_afterwards(registered):
    registered("lintra-kept", retention.Config(gate=False))
    model = build("Llama", "lintra-kept")
    with torch.inference_mode():
        model(tokens())
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()


def test_masks_of_any_form_are_served_exactly():
    mask = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(0)) < 0.5
    mask |= torch.eye(20, dtype=torch.bool)
    a, b = (build("Llama", x)(tokens(), attention_mask=mask).logits for x in ("sdpa", "lintra"))
    assert_close(a, b, **SAME)
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    assert_close(build("Llama", "lintra")(tokens(), attention_mask=added).logits, b, **SAME)
    with pytest.raises(NotImplementedError, match="0 and the least number"):
        build("Llama", "lintra")(tokens(), attention_mask=added.clamp(min=-1))
    dropping = build("Llama", "lintra", attention_dropout=0.5).train()
    a, b = (dropping(tokens(), attention_mask=mask).logits for _ in range(2))
    assert (a - b).abs().max() > 0.01


def test_softmax_by_name_is_lintra():
    assert configured("lintra") == softmax.Config()
    a, b = (build("Mistral", x)(tokens()).logits for x in ("lintra", "lintra-softmax"))
    assert_close(a, b, rtol=0, atol=0)


HYBRID = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}


@pytest.mark.parametrize("implementation", ["lintra", "lintra-linear"])
@torch.no_grad()
def test_a_hybrid_keeps_states_beside_those_of_its_recurrences(implementation):
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**HYBRID, initializer_range=0.3)
    model = transformers.Qwen3_5ForCausalLM._from_config(config, attn_implementation=implementation).eval()
    x = tokens(2, 12)
    with lintra.accelerate(model):
        wanted = model(x, use_cache=False).logits
        cache = lintra.hf.cache_for(model)
        found = [model(x[:, :5], past_key_values=cache).logits]
        kept = copy.copy(cache)
        for state in (cache, kept):
            rest = [model(x[:, i : i + 1], past_key_values=state).logits for i in range(5, 12)]
            assert_close(torch.cat((*found, *rest), 1), wanted, rtol=1e-4, atol=1e-4)
    assert cache.nbytes > sum(layer.nbytes for layer in cache.layers[1:])


@pytest.mark.parametrize("name", ["kimi_linear", "bailing_hybrid", "glm5_next"])
def test_families_with_latent_attention_are_refused(name):
    model = FAMILIES[name].build()
    model.set_attn_implementation("lintra")
    with pytest.raises(ValueError, match="Config, which has multi-head latent attention"):
        lintra.hf.cache_for(model)


def test_models_that_a_state_cannot_serve_are_refused():
    bart = transformers.BartForConditionalGeneration._from_config(
        transformers.BartConfig(vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1),
        attn_implementation="lintra",
    )
    with pytest.raises(ValueError, match="BartConfig, which is an encoder-decoder"):
        lintra.hf.cache_for(bart)
    model = build("Llama", "lintra")
    model.config.attention_chunk_size = 4
    with pytest.raises(ValueError, match="which attends to chunks"):
        lintra.hf.cache_for(model)
    model.config.attention_chunk_size = None
    model.config.kv_lora_rank = 8
    with pytest.raises(ValueError, match="which has multi-head latent attention"):
        lintra.hf.cache_for(model)
    layer = StateLayer()
    x = torch.zeros(1, 2, 3, 4)
    keys, _ = layer.update(x, x)
    assert claim(keys) is layer
    with pytest.raises(NotImplementedError, match="does not support layers that share keys"):
        claim(keys)


def test_a_composite_model_has_the_cache_of_its_text_model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**sizes, vocab_size=64),
    )
    implementation = {"text_config": "lintra-linear"}
    model = transformers.LlavaForConditionalGeneration._from_config(
        config, attn_implementation=implementation
    )
    assert isinstance(lintra.hf.cache_for(model), lintra.hf.StateCache)


def test_packed_masks_have_no_tensor():
    with pytest.raises(NotImplementedError, match="packed sequences have no mask as a tensor"):
        Visible(causal=True, sequence=torch.tensor([[0, 0, 1]]))[:, :, -1:]
