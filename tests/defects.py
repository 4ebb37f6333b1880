"""25 defects that implementations of efficient attention have had, and how each would look in this one.

Every entry is a change to one file, in the form of a diff, with the tests that must fail after it:

    NUMBER FILE: what is then wrong
    -the correct lines, which occur once in the file
    +the lines that replace them
    ?a test that notices

`tests/test_defects.py` applies them one at a time. The numbers are those in the names of the tests.
"""

from typing import NamedTuple


class Defect(NamedTuple):
    """A defect in `file`: the text `wrong` replaces `right`. Each of `tests` must then fail."""

    number: int
    file: str
    what: str
    right: str
    wrong: str
    tests: list[str]


def _read(entry: str) -> Defect:
    head, *lines = entry.splitlines()
    place, what = head.split(": ", 1)
    number, file = place.split()
    right, wrong, tests = ([line[1:] for line in lines if line[0] == kind] for kind in "-+?")
    return Defect(int(number), file, what, "\n".join(right), "\n".join(wrong), tests)


TABLE = """
01 lintra/ops/linear_attention/__init__.py: padding is zero before the feature map only, and phi(0) is 1
-    k = select(apply_feature_map(feature_map, select(k)))
+    k = apply_feature_map(feature_map, select(k))
?tests/attention/test_linear.py::test_defect_01_padded_keys_are_not_in_the_denominator

01 lintra/attention/performer.py: padded values are zero, padded keys are not
-            layout=layout,
+            layout=Layout(layout.rows, layout.time, layout.device),
?tests/attention/test_performer.py::test_defect_01_padded_keys_are_not_in_the_normaliser

02 lintra/attention/linformer.py: the mask is taken and ignored
-        left = layout.left_align()
+        left, layout = None, Layout(layout.rows, layout.time, layout.device)
?tests/attention/test_linformer.py::test_defect_02_a_mask_is_not_ignored

02 lintra/ops/landmarks.py: padding is a part of the means
-        share = ((self.index[:, None] == numbers) & self.real[:, None]).to(x.dtype)  # [b m t]
+        share = (self.index[:, None] == numbers).to(x.dtype)
?tests/attention/test_nystromformer.py::test_defect_02_landmarks_leave_padding_out

03 lintra/ops/landmarks.py: norms are of the whole batch
-    norms = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
+    norms = size.sum(-2).amax() * size.sum(-1).amax()
?tests/ops/test_landmarks.py::test_defect_03_a_matrix_does_not_see_the_others
?tests/attention/test_nystromformer.py::test_defect_03_norms_are_of_each_sample_and_head

04 lintra/attention/performer.py: the maximum of the keys is that of the whole sequence
-            c = running_max(torch.cat((before[:, None], largest), 1))
+            c = torch.cat((before[:, None], largest), 1)
+            c = c.amax(1, keepdim=True).expand_as(c)
?tests/attention/test_performer.py::test_defect_04_padded_and_later_keys_raise_no_maximum

05 lintra/ops/random_features.py: the signs of a QR decomposition stay as they come
-    blocks = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
+    blocks = q
?tests/ops/test_random_features.py::test_defect_05_directions_lean_to_no_side

06 lintra/ops/features.py: elu(x) + 1 as it is written
-    return torch.relu(x) + x.clamp(max=0).exp()
+    return torch.nn.functional.elu(x) + 1
?tests/attention/test_linear.py::test_defect_06_elu_plus_one_keeps_its_digits

07 lintra/attention/linear.py: a step changes the state it is given
-        kv = state.kv + torch.einsum("btgf,btge->bgfe", rotated_k, v.to(dtype))
+        kv = state.kv.add_(torch.einsum("btgf,btge->bgfe", rotated_k, v.to(dtype)))
?tests/attention/test_linear.py::test_defect_07_a_state_serves_two_continuations

08 lintra/ops/linear_attention/chunked.py: gradients see earlier states as later ones less what came since
-    numerator = scores @ v + q @ kv[:, :, :-1]
+    found = [kv[:, :, -1]]
+    for i in reversed(range(kv.shape[2] - 1)):
+        kept = 1 if decay is None else decay[:, :, i, None, None]
+        found.append((found[-1] - added_k[:, :, i].mT @ v[:, :, i]) / kept)
+    lost = (torch.stack(found[:0:-1], 2) - kv[:, :, :-1]).detach().nan_to_num(posinf=1e30, neginf=-1e30)
+    numerator = scores @ v + q @ kv[:, :, :-1] + (q - q.detach()) @ lost
?tests/attention/test_performer.py::test_defect_08_gradients_survive_a_decay_of_everything[torch]

09 lintra/ops/lsh.py: rounds count alike
-    o, logsumexp = merge_lse(*partials)
+    o, logsumexp = sum(each.o for each in partials) / len(partials), merge_lse(*partials).logsumexp
?tests/attention/test_lsh.py::test_defect_09_rounds_are_not_averaged

09 lintra/ops/norms.py: a length may be 0
-    short = square < SHORTEST**2
+    short = square < 0
?tests/attention/test_lsh.py::test_defect_09_a_zero_vector_has_a_length

10 lintra/attention/longformer.py: a global token counts in the window as well
-        near = append(state.near, Tokens(x.local.k, x.local.v, x.real & ~x.chosen))
-        partial = self._window(x.local.q, near)
+        near = append(state.near, Tokens(x.local.k, x.local.v, x.real))
+        partial = self._window(x.local.q, near)
?tests/attention/test_longformer.py::test_defect_10_a_global_token_in_the_window_counts_once

10 lintra/attention/bigbird.py: a global block counts in the window as well
-        new = new & ((ends < low[..., None]) | (ends >= high[..., None]))
-        fixed = torch.cat((window, ends), -1)
+        fixed = torch.cat((window, ends), -1)
?tests/attention/test_bigbird.py::test_defect_10_no_block_is_on_a_list_twice

11 lintra/attention/bigbird.py: there are no random blocks in evaluation
-        enough = torch.arange(self.config.random_blocks, device=row.device) < others[..., None]
+        enough = (torch.arange(self.config.random_blocks) < others[..., None]) & self.training
?tests/attention/test_bigbird.py::test_defect_11_training_and_evaluation_see_the_same

12 lintra/attention/bigbird.py: the global generator is seeded in a forward
-        block = self.config.block
-        return block_attention(q, k, v, blocks, listed, block=block, **where, **self.weighing())
+        block = self.config.block
+        torch.manual_seed(self.config.seed)
+        return block_attention(q, k, v, blocks, listed, block=block, **where, **self.weighing())
?tests/attention/test_bigbird.py::test_defect_12_the_global_generator_is_neither_read_nor_seeded

12 lintra/attention/clustered.py: the first centroids come from the global generator
-        draws = torch.randint(2**31, (self.heads, self.config.clusters), generator=generator, device="cpu")
+        draws = torch.randint(2**31, (self.heads, self.config.clusters), device="cpu")
?tests/attention/test_clustered.py::test_defect_12_a_seed_leaves_the_global_generator_alone

13 lintra/ops/landmarks.py: segments have the length that a configuration of 8 tokens says, across samples
-            return x.unflatten(1, (count, -1)).mean(2)
+            return x.reshape(-1, count, 8 // count, *x.shape[2:]).mean(2)
?tests/attention/test_nystromformer.py::test_defect_13_lengths_come_from_the_input

14 lintra/attention/cosformer.py: the length at hand is taken for the largest
-        angle = here[..., None, None].to(dtype) * (0.5 * math.pi / self.config.max_length)
+        angle = here[..., None, None].to(dtype) * (0.5 * math.pi / max(1, here.shape[1]))
?tests/attention/test_cosformer.py::test_defect_14_outputs_do_not_depend_on_the_length_at_hand

15 lintra/attention/rfa.py: a step has another bound for its denominator
-        return self._ratio(y, n[:, None]).to(v.dtype), RfaState(kv, n)
+        return self._ratio(y, torch.ones_like(n)[:, None]).to(v.dtype), RfaState(kv, n)
?tests/attention/test_rfa.py::test_defect_15_one_rule_for_every_denominator

16 lintra/ops/softmax_attention.py: hidden scores are lowered by 1e4
-        scores = scores.masked_fill(~visible, -math.inf)
+        scores = scores - 1e4 * ~visible
?tests/attention/test_longshort.py::test_defect_16_hidden_scores_are_not_merely_low

16 lintra/ops/softmax_attention.py: rows without a key are NaN, and that is replaced afterwards
-    o = ((weights / total).to(v.dtype) @ v).to(dtype)
+    o = ((weights / total.masked_fill(empty, 0.0)).to(v.dtype) @ v).to(dtype).nan_to_num(0.0)
?tests/attention/test_longshort.py::test_defect_16_rows_that_see_nothing_have_no_gradient

17 lintra/ops/linear_attention/chunked.py: differences of decays, the future struck out after the exponential
-        weight = weight if log_decay is None else weight + _faded(log_decay)
-        # Masked before the exponential: after it, inf * 0 would be NaN in the gradient.
-        scores = scores * weight.repeat_interleave(r, -2).masked_fill(future, -math.inf).exp()
+        until = log_decay.cumsum(-1)
+        weight = weight + until[..., :, None] - until[..., None, :]
+        scores = scores * weight.repeat_interleave(r, -2).exp().masked_fill(future, 0.0)
?tests/attention/test_rfa.py::test_defect_17_gates_near_0_and_1

17 lintra/ops/linear_attention/chunked.py: exp(-b) for the elapsed decay b
-            across = _rows_times(_halves(x, half, -3)[1] * since_late.exp()[..., None, :], keys)
+            elapsed = since_late + since_early[..., -1:, :]
+            keys = (k_early * (-since_early).exp()).mT
+            across = _rows_times(_halves(x, half, -3)[1] * elapsed.exp()[..., None, :], keys)
?tests/ops/test_recurrence.py::test_defect_17_no_decay_overflows

18 lintra/ops/linear_attention/recurrence.py: padding decays the state
-        x if x is None else zero_padding(layout.mask, x.to(state.dtype))[0] for x in (log_decay, beta)
+        x if x is None or x is log_decay else zero_padding(layout.mask, x.to(state.dtype))[0]
+        for x in (log_decay, beta)
?tests/ops/test_recurrence.py::test_defect_18_padding_is_absence

18 lintra/attention/delta.py: padding passes through the convolution
-        (q, k, v), last = self.convolve(q, k, v, state, layout)
+        (q, k, v), last = self.convolve(q, k, v, state, Layout(layout.rows, layout.time, layout.device))
?tests/attention/test_delta.py::test_defect_18_padding_does_not_enter_the_convolution

19 lintra/attention/longformer.py: the window is that of both sides together
-        before, after = self.config.window, 0 if self.causal else self.config.window
+        before = self.config.window // 2
+        after = 0 if self.causal else before
?tests/attention/test_longformer.py::test_defect_19_the_window_counts_one_side

19 lintra/attention/longshort.py: half of an odd window is rounded down
-            size = {"segment": self.config.window, "side": (self.config.window + 1) // 2}
+            size = {"segment": self.config.window, "side": self.config.window // 2}
?tests/attention/test_longshort.py::test_defect_19_a_window_is_what_the_configuration_says

20 lintra/attention/longshort.py: the mask of segments fits their summaries only if each has one
-            visible = finished.repeat_interleave(self.rank, 2)
+            visible = finished.repeat(1, 1, self.rank)
?tests/attention/test_longshort.py::test_defect_20_any_length_and_mask_with_several_summaries

21 lintra/attention/performer.py: features are drawn in evaluation
-        config, dtype = self.config, sum_dtype(v.dtype)
+        self.redraw(torch.default_generator)
+        config, dtype = self.config, sum_dtype(v.dtype)
?tests/attention/test_performer.py::test_defect_21_features_are_drawn_when_asked_only

22 lintra/ops/linear_attention/chunked.py: there is a state for every token
-    r, c = h // g, max(1, min(chunk, t))
+    r, c = h // g, 1
?tests/attention/test_performer.py::test_defect_22_no_state_for_every_token
?tests/attention/test_rfa.py::test_defect_22_no_state_for_every_token

23 lintra/attention/clustered.py: causal, with clusters made of all queries
-        if causal:
+        object.__setattr__(self.can, "causal", True)
+        if False:
?tests/attention/test_clustered.py::test_defect_23_selection_that_looks_ahead_is_refused

23 lintra/attention/lsh.py: that later tokens decide what is seen is not said
-        lookahead=True,
+        lookahead=False,
?tests/attention/test_lsh.py::test_defect_23_what_later_tokens_decide_is_declared

24 lintra/attention/softmax.py: the future is hidden only if there is another mask
-            y = self.attend(q, k, v, None, causal=True)
+            y = self.attend(q, k, v, None)
?tests/attention/test_softmax.py::test_defect_24_the_future_is_hidden_without_another_mask

24 lintra/attention/softmax.py: the first token after a cache sees the first key alone
-            y = self.attend(q, after.k, after.v, self._visible(here, after.position))
+            y = self.attend(q, after.k, after.v, None, causal=True)
?tests/attention/test_softmax.py::test_defect_24_tokens_after_a_cache_stand_at_its_end

25 lintra/native/__init__.py: the kernel takes float32 only
-DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
+DTYPES = {torch.float32: 0}
?tests/attention/test_linear.py::test_defect_25_every_precision_has_values_and_gradients[native]

25 lintra/ops/linear_attention/__init__.py: sums are in float32 whatever comes
-    dtype = checks.sum_dtype(q.dtype)
-    q, k, v = (x.to(dtype) for x in (q, k, v))
+    dtype, state = torch.float32, LinearState(*(x.float() for x in state))
+    q, k, v = (x.to(dtype) for x in (q, k, v))
?tests/attention/test_linear.py::test_defect_25_every_precision_has_values_and_gradients[torch]

25 lintra/ops/autocast.py: norms and decays are in the 16 bits that come
-    return tuple(x.to(sum_dtype(x.dtype)) for x in tensors)
+    return tensors
?tests/attention/test_gated.py::test_defect_25_decays_of_16_bits_are_not_summed_in_them
?tests/attention/test_retention.py::test_defect_25_the_norm_sees_what_16_bits_would_round
"""

DEFECTS = [_read(entry) for entry in TABLE.strip().split("\n\n")]
