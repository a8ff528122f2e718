"""Typical mistakes of authors of kernels that ``make mutate`` inserts into the Triton kernels.

Each `Fault` is one wrong line that changes a result, reads out of bounds or leaves memory
unwritten. tests/kernels/faulty_launches.py has mistakes that only compiled code shows, such as tf32
and spills. The mistakes in the C++ code are in cpp_faults.py.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of one line that makes the code wrong.

    The path ``file`` is relative to the root of the repository, and the file contains ``old``
    exactly once. The name ``noun`` selects the tests that must fail.
    """

    name: str
    noun: str
    file: str
    old: str
    new: str

    def broken(self, text: str) -> str:
        """Return ``text`` with the fault; raise ValueError unless ``old`` occurs exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {self.file} contains {self.old!r} {count} times")
        return text.replace(self.old, self.new)


PARITY = "tests/ops/test_parity.py"

# Noun → the tests that run with each fault of the noun; at least one of them must fail.
SELECTIONS: dict[str, list[str]] = {
    "attention": [
        "tests/kernels/test_attention_kernels.py",
        "-k",
        "against_oracle or bias_and_sharp or philox",
    ],
    "attention_bias": ["tests/kernels/test_attention_bias.py"],
    "attention_edges": [
        "tests/kernels/test_attention_kernels.py",
        "-k",
        "poison or log_sum_exp or layouts or slack or every_way or positions",
    ],
    "attention_short": ["tests/kernels/test_attention_short.py"],
    "attention_weights": ["tests/kernels/test_attention_weights.py"],
    "cross_entropy": [
        "tests/kernels/test_cross_entropy_kernels.py",
        PARITY,
        "-k",
        "kernels or (cross_entropy and triton)",
    ],
    "embedding": [
        "tests/kernels/test_embedding_kernels.py",
        PARITY,
        "-k",
        "kernels or (embedding and triton)",
    ],
    "encoder": ["tests/modules/test_triton_inference.py"],
    "feed_forward": ["tests/kernels/test_feed_forward_kernels.py"],
    "large_offsets": ["tests/kernels/test_large_offsets.py"],
    "layer": ["tests/modules/test_triton_training.py", "-k", "bits or frozen"],
    "layer_norm": [
        "tests/kernels/test_layer_norm_kernels.py",
        PARITY,
        "-k",
        "kernels or (layer_norm and triton)",
    ],
    "philox": ["tests/kernels/test_philox.py"],
    "reduction": ["tests/kernels/test_reduction_kernels.py"],
    "rms_norm": [
        "tests/kernels/test_rms_norm_kernels.py",
        PARITY,
        "-k",
        "kernels or (rms_norm and triton)",
    ],
    "rotary": [
        "tests/kernels/test_rotary_kernels.py",
        PARITY,
        "-k",
        "kernels or (rotary and triton)",
    ],
}


ATTENTION = (
    Fault(
        "encoder_layer_without_residual",
        "encoder",
        "kernels/encoder.py",
        "residual=hidden, x_bias=bo",
        "residual=None, x_bias=bo",
    ),
    Fault(
        "encoder_states_share_memory",
        "encoder",
        "kernels/encoder.py",
        "if all_states or number == 0:",
        "if number == 0:",
    ),
    Fault(
        "layer_norm_takes_the_memory_of_attention",
        "encoder",
        "kernels/layer_parts.py",
        "layer_norm.layer_norm_backward, layer_norm.allocate_results",
        "layer_norm.layer_norm_backward, attention.allocate_results",
    ),
    Fault(
        "last_key_dropped",
        "attention",
        "kernels/attention_mask.py",
        "allowed = cols < k_len\n",
        "allowed = cols < k_len - 1\n",
    ),
    Fault(
        "window_misses_its_leftmost_key",
        "attention",
        "kernels/attention_mask.py",
        "cols >= rows + (offset - left)",
        "cols > rows + (offset - left)",
    ),
    Fault(
        "causal_hides_the_diagonal",
        "attention",
        "kernels/attention_mask.py",
        "cols <= rows + (offset + right)",
        "cols < rows + (offset + right)",
    ),
    Fault(
        "window_range_ends_one_key_early",
        "attention",
        "kernels/attention_mask.py",
        "tl.minimum(last + offset + right + 1, length), low)",
        "tl.minimum(last + offset + right, length), low)",
    ),
    Fault(
        "tile_full_though_its_last_row_does_not_see_it",
        "attention",
        "kernels/attention_mask.py",
        "full_low = tl.maximum(last + offset - left, 0)",
        "full_low = tl.maximum(first + offset - left, 0)",
    ),
    Fault(
        "last_partial_tile_taken_for_full",
        "attention",
        "kernels/attention_mask.py",
        "full_stop = tl.maximum(full_high // BLOCK * BLOCK, full_start)",
        "full_stop = tl.maximum((full_high + BLOCK - 1) // BLOCK * BLOCK, full_start)",
    ),
    Fault(
        "offset_ignores_that_keys_outnumber_queries",
        "attention",
        "kernels/attention.py",
        "offset = k_len - q_len",
        "offset = k_len - k_len",
    ),
    Fault(
        "mask_of_pairs_read_transposed",
        "attention",
        "kernels/attention_mask.py",
        "offsets += rows.to(tl.int64) * stride_mask_row",
        "offsets += rows.to(tl.int64) * stride_mask_key",
    ),
    Fault(
        "masked_values_are_read",
        "attention_edges",
        "kernels/attention_mask.py",
        "attended = attended & (tl.load(pointers, mask=attended, other=0) != 0)",
        "attended = attended & (tl.load(pointers, mask=attended, other=0) < 2)",
    ),
    Fault(
        "scale_off_by_one_percent",
        "attention",
        "kernels/attention_softmax.py",
        "tl.exp2(scores * (scale * LOG2E) - maximum)",
        "tl.exp2(scores * (scale * 1.01 * LOG2E) - maximum)",
    ),
    Fault(
        "exponential_takes_e_for_2",
        "attention",
        "kernels/attention_softmax.py",
        "return tl.exp2((scores - maximum) * LOG2E)",
        "return tl.exp2(scores - maximum)",
    ),
    Fault(
        "ln_2_in_one_part",
        "attention",
        "kernels/common.py",
        "rest = tl.fma(powers, -LN2_LOW, rest)",
        "rest = tl.fma(powers, 0.0, rest)",
    ),
    Fault(
        "row_without_keys_unguarded",
        "attention",
        "kernels/attention_softmax.py",
        "reference = tl.where(new_maximum == -INFINITY, 0.0, new_maximum)",
        "reference = tl.where(new_maximum == INFINITY, 0.0, new_maximum)",
    ),
    Fault(
        "lse_of_fp32_in_the_wrong_unit",
        "attention_edges",
        "kernels/attention_softmax.py",
        "result = maximum + logarithm * LN2",
        "result = maximum + logarithm",
    ),
    Fault(
        "lse_of_16_bit_in_the_wrong_unit",
        "attention",
        "kernels/attention_softmax.py",
        "result = (maximum + logarithm) * LN2",
        "result = maximum + logarithm",
    ),
    Fault(
        "slack_not_zeroed",
        "attention",
        "kernels/attention_rows.py",
        "store_rows(base, zeros, rows, inside,",
        "store_rows(base, zeros, rows, rows < used,",
    ),
    Fault(
        "sequence_one_row_too_long",
        "attention",
        "kernels/attention_rows.py",
        "length = tl.load(cu_seqlens_ptr + batch + 1) - start",
        "length = tl.load(cu_seqlens_ptr + batch + 1) - start + 1",
    ),
    Fault(
        "bias_not_added",
        "attention",
        "kernels/attention.py",
        "stride_bias_row, stride_bias_key, HAS_BIAS, SCALING,",
        "stride_bias_row, stride_bias_key, False, SCALING,",
    ),
    Fault(
        "log_sum_exp_of_the_batches_overlaps",
        "attention",
        "kernels/attention_problem.py",
        '"stride_lse_batch": 0 if is_varlen else heads * q_rows,',
        '"stride_lse_batch": 0 if is_varlen else q_rows,',
    ),
    Fault(
        "dropout_keeps_what_it_should_drop",
        "attention",
        "kernels/launch.py",
        "threshold=int(p * 2**24 + 0.5)",
        "threshold=int((1.0 - p) * 2**24 + 0.5)",
    ),
    Fault(
        "sum_of_the_past_not_rescaled",
        "attention",
        "kernels/attention.py",
        "total = total * rescale + tl.sum(weights, axis=1)",
        "total = total + tl.sum(weights, axis=1)",
    ),
    Fault(
        "output_of_the_past_not_rescaled",
        "attention",
        "kernels/attention.py",
        "v, out * rescale[:, None])",
        "v, out)",
    ),
    Fault(
        "dropout_scale_forgotten",
        "attention",
        "kernels/attention.py",
        "inverse = divided(dropout_scale, total, SCALING)",
        "inverse = divided(1.0, total, SCALING)",
    ),
    Fault(
        "dropout_of_heads_and_sequences_swapped",
        "attention",
        "kernels/attention.py",
        "dropout_keep(seed, rows, head, batch, first_key,",
        "dropout_keep(seed, rows, batch, head, first_key,",
    ),
    Fault(
        "dropout_of_dv_not_replayed",
        "attention",
        "kernels/attention_backward.py",
        "                    dropout_keep(seed, rows, head, batch, first_key,",
        "                    dropout_keep(seed, rows, head, batch, first_row,",
    ),
    Fault(
        "dropout_of_dq_from_another_seed",
        "attention",
        "kernels/attention_backward.py",
        "keep = dropout_keep(seed, rows, head, batch, first_key,",
        "keep = dropout_keep(seed + 1, rows, head, batch, first_key,",
    ),
    Fault(
        "dropout_scale_of_dv_forgotten",
        "attention",
        "kernels/attention_backward.py",
        "dv = narrow(dv * dropout_scale, ",
        "dv = narrow(dv, ",
    ),
    Fault(
        "delta_of_dq_missing",
        "attention",
        "kernels/attention_backward.py",
        "dscores = weights * (dweights - delta[:, None])",
        "dscores = weights * dweights",
    ),
    Fault(
        "delta_of_dk_added",
        "attention",
        "kernels/attention_backward.py",
        "dscores = weights * (dweights - delta[None, :])",
        "dscores = weights * (dweights + delta[None, :])",
    ),
    Fault(
        "scale_of_dq_missing",
        "attention",
        "kernels/attention_backward.py",
        "dq * scale), dq_ptr",
        "dq), dq_ptr",
    ),
    Fault(
        "gradient_of_a_single_key",
        "attention",
        "kernels/attention_backward.py",
        "tl.where(k_len == 1, 0.0, dk * scale)",
        "tl.where(k_len == 0, 0.0, dk * scale)",
    ),
    Fault(
        "window_of_dkv_not_mirrored",
        "attention",
        "kernels/attention_backward.py",
        "-offset, q_len, window_right, window_left, HAS_RIGHT, HAS_LEFT, BLOCK_M",
        "-offset, q_len, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_M",
    ),
    Fault(
        "nan_of_a_masked_value_reaches_dk",
        "attention_edges",
        "kernels/attention_backward.py",
        "                    dscores = tl.where(allowed, dscores, 0.0)",
        "                    dscores = tl.where(allowed, dscores, dscores)",
    ),
    Fault(
        "dq_reads_dout_at_the_strides_of_q",
        "attention_edges",
        "kernels/attention_backward.py",
        "dout_ptr, rows, inside, stride_dout_row, stride_dout_dim,",
        "dout_ptr, rows, inside, stride_q_row, stride_q_dim,",
    ),
    Fault(
        "lse_taken_for_a_logarithm_to_base_2",
        "attention",
        "kernels/attention_statistics.py",
        "shift = shift * LOG2E",
        "shift = shift * 1.0",
    ),
    Fault(
        "lse_of_a_row_without_keys_unguarded",
        "attention",
        "kernels/attention_statistics.py",
        "shift = tl.where(shift == -INFINITY, INFINITY, shift)",
        "shift = tl.where(shift == INFINITY, INFINITY, shift)",
    ),
    Fault(
        "lse_of_the_neighbouring_row",
        "attention",
        "kernels/attention_statistics.py",
        "shift = tl.load(shift_ptr + rows, mask=inside,",
        "shift = tl.load(shift_ptr + rows + 1, mask=rows + 1 < q_len,",
    ),
    Fault(
        "delta_from_out_alone",
        "attention",
        "kernels/attention_statistics.py",
        "delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)",
        "delta = tl.sum(out.to(tl.float32) * out.to(tl.float32), axis=1)",
    ),
    Fault(
        "delta_of_the_past_not_rescaled",
        "attention",
        "kernels/attention_statistics.py",
        "delta = delta * rescale + tl.sum(",
        "delta = delta + tl.sum(",
    ),
    Fault(
        "delta_without_the_dropout_scale",
        "attention",
        "kernels/attention_statistics.py",
        "dweights = tl.where(keep, dweights * dropout_scale, 0.0)",
        "dweights = tl.where(keep, dweights, 0.0)",
    ),
)

ATTENTION_BIAS = (
    Fault(
        "bias_gradient_loses_the_last_combinations",
        "attention_bias",
        "kernels/attention_bias.py",
        "share = tl.cdiv(combinations, partials)",
        "share = combinations // partials",
    ),
    Fault(
        "bias_gradient_summed_over_the_wrong_heads",
        "attention_bias",
        "kernels/attention_bias.py",
        "shared_heads = heads // bias_heads",
        "shared_heads = heads",
    ),
    Fault(
        "bias_gradient_of_the_first_sequence_alone",
        "attention_bias",
        "kernels/attention_bias.py",
        "batch = bias_batch + rest // shared_heads",
        "batch = bias_batch",
    ),
    Fault(
        "bias_gradient_of_masked_pairs",
        "attention_bias",
        "kernels/attention_bias.py",
        "tl.where(allowed, weights * (dweights - delta[:, None]), 0.0)",
        "weights * (dweights - delta[:, None])",
    ),
    Fault(
        "bias_gradient_without_dropout",
        "attention_bias",
        "kernels/attention_bias.py",
        "dweights = tl.where(keep, dweights * dropout_scale, 0.0)",
        "dweights = tl.where(keep, dweights, dweights)",
    ),
    Fault(
        "bias_gradient_skips_a_tile_of_the_window",
        "attention_bias",
        "kernels/attention_bias.py",
        "first_key + BLOCK_N > first_row + offset - window_left",
        "first_key > first_row + offset - window_left",
    ),
    Fault(
        "bias_read_transposed",
        "attention_bias",
        "kernels/attention_softmax.py",
        "rows.to(tl.int64) * stride_bias_row + cols.to(tl.int64) * stride_bias_key",
        "rows.to(tl.int64) * stride_bias_key + cols.to(tl.int64) * stride_bias_row",
    ),
)

ATTENTION_WEIGHTS = (
    Fault(
        "weights_of_the_wrong_heads",
        "attention_weights",
        "kernels/attention_weights.py",
        "head = tl.load(heads_ptr + place).to(tl.int32)",
        "head = place",
    ),
    Fault(
        "weights_take_the_lse_of_other_rows",
        "attention_weights",
        "kernels/attention_weights.py",
        "tl.load(lse_ptr + rows, mask=rows < q_len,",
        "tl.load(lse_ptr + places, mask=places < q_len,",
    ),
    Fault(
        "weights_of_rows_beyond_the_sequence",
        "attention_weights",
        "kernels/attention_weights.py",
        "tl.where((rows < q_len)[:, None], weights, 0.0)",
        "tl.where((rows < q_length)[:, None], weights, 0.0)",
    ),
    Fault(
        "weights_of_keys_beyond_the_sequence_not_written",
        "attention_weights",
        "kernels/attention_weights.py",
        "range(0, k_len if weights_pass == 0 else k_length, BLOCK_N)",
        "range(0, k_len, BLOCK_N)",
    ),
)

ATTENTION_SHORT = (
    Fault(
        "wrong_descriptors_of_an_old_assembler",
        "attention_short",
        "kernels/assembler.py",
        "assembler(arch).release < KEEPS_DESCRIPTORS",
        "assembler(arch).release > KEEPS_DESCRIPTORS",
    ),
    Fault(
        "short_keys_beyond_the_last_whole_chunk_forgotten",
        "attention_short",
        "kernels/tiles.py",
        "chunks = max(1, ceil_div(max_keys, block))",
        "chunks = max(1, max_keys // block)",
    ),
    Fault(
        "short_output_of_the_past_not_rescaled",
        "attention_short",
        "kernels/attention_short.py",
        "out = dot(weights, values[chunk], out * rescale[:, None])",
        "out = dot(weights, values[chunk], out)",
    ),
    Fault(
        "short_forward_skips_the_last_item",
        "attention_short",
        "kernels/attention_short.py",
        "tl.program_id(0), items, tl.num_programs(0)):\n        group",
        "tl.program_id(0), items - 1, tl.num_programs(0)):\n        group",
    ),
    Fault(
        "short_forward_skips_a_last_row",
        "attention_short",
        "kernels/attention_short.py",
        "for first_row in range(first, q_len, step):",
        "for first_row in range(first, q_len - 1, step):",
    ),
    Fault(
        "short_keys_of_the_last_row_not_loaded",
        "attention_short",
        "kernels/attention_short.py",
        "keys + chunk * BLOCK_N, first, q_len - 1, step,",
        "keys + chunk * BLOCK_N, first, q_len - 2, step,",
    ),
    Fault(
        "short_packed_lengths_taken_for_full",
        "attention_short",
        "kernels/attention_short.py",
        "IS_FULL=not is_varlen and problem.max_k",
        "IS_FULL=problem.max_k",
    ),
    Fault(
        "short_dropout_not_replayed",
        "attention_short",
        "kernels/attention_short.py",
        "dropout_keep(seed, rows, head, batch, first_key,",
        "dropout_keep(seed, rows, batch, head, first_key,",
    ),
    Fault(
        "short_dropout_scale_of_the_weights_forgotten",
        "attention_short",
        "kernels/attention_short.py",
        "dweights = tl.where(keep, dweights * dropout_scale, 0.0)",
        "dweights = tl.where(keep, dweights, 0.0)",
    ),
    Fault(
        "short_delta_missing",
        "attention_short",
        "kernels/attention_short.py",
        "dscores = narrow(weights * (dweights - delta[None, :]), q.dtype)",
        "dscores = narrow(weights * dweights, q.dtype)",
    ),
    Fault(
        "short_lse_of_a_row_without_keys_unguarded",
        "attention_short",
        "kernels/attention_short.py",
        "lse = tl.where(lse == -INFINITY, INFINITY, lse)",
        "lse = tl.where(lse == INFINITY, INFINITY, lse)",
    ),
    Fault(
        "short_dv_takes_the_undropped_weights",
        "attention_short",
        "kernels/attention_short.py",
        "dv = dot(narrow(dropped, dout.dtype), dout, dv)",
        "dv = dot(narrow(weights, dout.dtype), dout, dv)",
    ),
)

FEED_FORWARD = (
    Fault(
        "gelu_erf_and_tanh_swapped",
        "feed_forward",
        "kernels/activation.py",
        'elif FUNCTION == "gelu":',
        'elif FUNCTION == "gelu_tanh":',
    ),
    Fault(
        "gelu_cubic_digits_swapped",
        "feed_forward",
        "kernels/activation.py",
        "TANH_CUBIC = tl.constexpr(0.044715)",
        "TANH_CUBIC = tl.constexpr(0.044751)",
    ),
    Fault(
        "gelu_slope_without_the_density",
        "feed_forward",
        "kernels/activation.py",
        "slope = share + x * (INVERSE_SQRT_2PI * bell)",
        "slope = share",
    ),
    Fault(
        "relu_slope_of_zero",
        "feed_forward",
        "kernels/activation.py",
        "slope = tl.where(x <= 0.0, 0.0, 1.0)",
        "slope = tl.where(x < 0.0, 0.0, 1.0)",
    ),
    Fault(
        "slope_of_a_huge_number_overflows",
        "feed_forward",
        "kernels/activation.py",
        "bounded = tl.where(tl.abs(x) < 128.0, x, 0.0)",
        "bounded = tl.where(tl.abs(x) >= 0.0, x, 0.0)",
    ),
    Fault(
        "gate_and_factor_share_a_bias",
        "feed_forward",
        "kernels/feed_forward.py",
        "biased(linear, bias_ptr, columns + cols,",
        "biased(linear, bias_ptr, cols,",
    ),
    Fault(
        "saved_factor_without_its_place",
        "feed_forward",
        "kernels/feed_forward.py",
        "store_narrow(h_ptr + columns, h_offsets, linear, inside)",
        "store_narrow(h_ptr + columns, h_offsets, h, inside)",
    ),
    Fault(
        "persistent_loop_skips_the_last_tile",
        "feed_forward",
        "kernels/feed_forward.py",
        "tl.range(tl.program_id(0), tiles, tl.num_programs(0))",
        "tl.range(tl.program_id(0), tiles - 1, tl.num_programs(0))",
    ),
    Fault(
        "depth_taken_for_even",
        "feed_forward",
        "kernels/feed_forward.py",
        '"EVEN_K": depth % block_k == 0,',
        '"EVEN_K": depth >= block_k,',
    ),
    Fault(
        "last_block_of_k_skipped",
        "feed_forward",
        "kernels/gemm.py",
        "for first_k in range(0, depth, BLOCK_K):",
        "for first_k in range(0, depth // BLOCK_K * BLOCK_K, BLOCK_K):",
    ),
    Fault(
        "mask_of_k_one_too_far",
        "feed_forward",
        "kernels/gemm.py",
        "inside = k < depth",
        "inside = k <= depth",
    ),
    Fault(
        "last_group_of_tiles_taken_for_full",
        "feed_forward",
        "kernels/gemm.py",
        "tl.minimum(row_blocks - group * GROUP_M, GROUP_M)",
        "tl.minimum(row_blocks, GROUP_M)",
    ),
    Fault(
        "bias_gradient_counts_rows_beyond_the_last",
        "feed_forward",
        "kernels/feed_forward_backward.py",
        "da = tl.where((rows < rows_total)[:, None], da, 0.0)",
        "da = tl.where((rows >= 0)[:, None], da, 0.0)",
    ),
    Fault(
        "bias_gradient_of_one_block_of_rows_lost",
        "feed_forward",
        "kernels/feed_forward_backward.py",
        "tl.store(pointers, tl.sum(dh, axis=0), mask=cols < columns)",
        "tl.store(pointers, tl.sum(dh, axis=0) * (partial == 0), mask=cols < columns)",
    ),
    Fault(
        "gradient_of_the_gate_without_its_factor",
        "feed_forward",
        "kernels/feed_forward_backward.py",
        "da *= linear",
        "da *= 1.0",
    ),
    Fault(
        "gradient_of_the_factor_takes_the_preactivation",
        "feed_forward",
        "kernels/feed_forward_backward.py",
        "dlinear = da * a\n",
        "dlinear = da * h\n",
    ),
)

ROWS = (
    Fault(
        "eps_outside_the_root",
        "layer_norm",
        "kernels/norm_rows.py",
        "reciprocal_root(variance + eps)",
        "1.0 / (tl.sqrt_rn(variance) + eps)",
    ),
    Fault(
        "variance_of_a_sample",
        "layer_norm",
        "kernels/norm_rows.py",
        "variance = row_mean(centred * centred, columns)",
        "variance = row_mean(centred * centred, columns - 1)",
    ),
    Fault(
        "mean_not_corrected",
        "layer_norm",
        "kernels/norm_rows.py",
        "centred = tl.where(inside, centred - correction[:, None], 0.0)",
        "centred = tl.where(inside, centred, 0.0)",
    ),
    Fault(
        "mean_of_the_backward_not_corrected",
        "layer_norm",
        "kernels/norm_rows.py",
        "(centred - correction[:, None]) * rstd[:, None]",
        "centred * rstd[:, None]",
    ),
    Fault(
        "gradient_through_the_mean_missing",
        "layer_norm",
        "kernels/norm_rows.py",
        "dsum = dnormalised - average[:, None] - normalised",
        "dsum = dnormalised - normalised",
    ),
    Fault(
        "x_bias_forgotten",
        "layer_norm",
        "kernels/norm_rows.py",
        "total += load_parameter(x_bias_ptr, cols, columns)",
        "total += load_parameter(x_bias_ptr, cols, 0)",
    ),
    Fault(
        "residual_read_at_the_stride_of_x",
        "layer_norm",
        "kernels/norm_rows.py",
        "first_row, stride_residual_row, 1, rows_total,",
        "first_row, stride_x_row, 1, rows_total,",
    ),
    Fault(
        "residual_dropped_too",
        "layer_norm",
        "kernels/norm_rows.py",
        "total += tl.load(residual_ptr + offsets, mask=inside, other=0.0)",
        "total += tl.load(residual_ptr + offsets, mask=inside & keep, other=0.0)",
    ),
    Fault(
        "dweight_and_dbias_swapped",
        "layer_norm",
        "kernels/layer_norm.py",
        "dweight = next(sums)\n    dbias = next(sums) if has_bias else None\n",
        "dbias = next(sums) if has_bias else None\n    dweight = next(sums)\n",
    ),
    Fault(
        "bias_forgotten",
        "layer_norm",
        "kernels/layer_norm.py",
        "y += load_parameter(bias_ptr, cols, columns)",
        "y += load_parameter(bias_ptr, cols, 0)",
    ),
    Fault(
        "plane_of_an_absent_bias_left_empty",
        "layer_norm",
        "kernels/layer_norm.py",
        "    if HAS_BIAS:\n        partials += plane\n",
        "    partials += plane\n    if HAS_BIAS:\n",
    ),
    Fault(
        "dropout_scale_of_dx_forgotten",
        "layer_norm",
        "kernels/layer_norm.py",
        "dsum = tl.where(keep, dsum * dropout_scale, 0.0)",
        "dsum = tl.where(keep, dsum, 0.0)",
    ),
    Fault(
        "backward_skips_the_last_rows",
        "layer_norm",
        "kernels/layer_norm.py",
        "range(program * BLOCK_M, rows_total, programs * BLOCK_M)",
        "range(program * BLOCK_M, rows_total - BLOCK_M, programs * BLOCK_M)",
    ),
    Fault(
        "planes_of_partial_sums_overlap",
        "layer_norm",
        "kernels/reduction.py",
        "partials_ptr += plane.to(tl.int64) * rows_total * columns",
        "partials_ptr += plane.to(tl.int64) * columns",
    ),
    Fault(
        "rounding_to_bf16_truncates",
        "layer_norm",
        "kernels/common.py",
        "rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000",
        "rounded = bits & 0xFFFF0000",
    ),
    Fault(
        "rms_eps_outside_the_root",
        "rms_norm",
        "kernels/rms_norm.py",
        "rstd = reciprocal_root(row_mean(total * total, columns) + eps)",
        "rstd = 1.0 / (tl.sqrt_rn(row_mean(total * total, columns)) + eps)",
    ),
    Fault(
        "rms_gradient_along_the_row_missing",
        "rms_norm",
        "kernels/rms_norm.py",
        "dsum = (dnormalised - normalised * along[:, None]) * rstd[:, None]",
        "dsum = dnormalised * rstd[:, None]",
    ),
    Fault(
        "rms_dweight_of_the_unscaled_gradient",
        "rms_norm",
        "kernels/rms_norm.py",
        "dweight += tl.sum(dy * normalised, axis=0)",
        "dweight += tl.sum(dy * total, axis=0)",
    ),
    Fault(
        "rotary_turns_the_gradient_forwards",
        "rotary",
        "kernels/rotary.py",
        "sin = -sin",
        "sin = sin",
    ),
    Fault(
        "rotary_second_half_with_itself_as_partner",
        "rotary",
        "kernels/rotary.py",
        "second * cos + first * sin",
        "second * cos + second * sin",
    ),
    Fault(
        "last_partial_sum_dropped",
        "rms_norm",
        "kernels/reduction.py",
        "for first_row in range(0, rows_total, BLOCK_M):",
        "for first_row in range(0, rows_total - 1, BLOCK_M):",
    ),
    Fault(
        "partial_sums_overlap_in_their_rows",
        "reduction",
        "kernels/reduction.py",
        "rows = partial * ROWS + first_row + tl.arange(0, BLOCK_M)",
        "rows = partial * BLOCK_M + first_row + tl.arange(0, BLOCK_M)",
    ),
    Fault(
        "sum_of_rows_reads_a_row_too_many",
        "reduction",
        "kernels/reduction.py",
        "inside = (rows < rows_total)[:, None] & (cols < columns)[None, :]\n"
        "        total += tl.load(x_ptr",
        "inside = (rows <= rows_total)[:, None] & (cols < columns)[None, :]\n"
        "        total += tl.load(x_ptr",
    ),
)

EMBEDDING = (
    Fault(
        "padding_idx_ignored",
        "embedding",
        "kernels/embedding.py",
        "(index < table_rows) & (index != skipped)",
        "(index < table_rows)",
    ),
    Fault(
        "run_loses_its_last_chunk",
        "embedding",
        "kernels/embedding.py",
        "start = tl.where(goes_on, middle + 1, start)",
        "start = tl.where(goes_on, middle, start)",
    ),
    Fault(
        "run_loses_its_first_chunk",
        "embedding",
        "kernels/embedding.py",
        "gradient = (begun + tl.sum(parts, axis=0))[None, :]",
        "gradient = tl.sum(parts, axis=0)[None, :]",
    ),
    Fault(
        "run_stored_though_it_goes_on",
        "embedding",
        "kernels/embedding.py",
        "goes_on = starts & (keys == after)",
        "goes_on = starts & (keys > after)",
    ),
    Fault(
        "run_loses_its_later_chunks",
        "embedding",
        "kernels/embedding.py",
        "is_first = entries == chunk * BLOCK_M",
        "is_first = entries == 0",
    ),
    Fault(
        "index_one_beyond_the_table",
        "embedding",
        "kernels/embedding.py",
        "in_table = ((index >= 0) & (index < table_rows))",
        "in_table = ((index >= 0) & (index <= table_rows))",
    ),
    Fault(
        "embedding_dropout_not_in_the_backward",
        "embedding",
        "kernels/embedding.py",
        "dy = tl.where(keep, dy * dropout_scale, 0.0)",
        "dy = tl.where(keep, dy * dropout_scale, dy)",
    ),
    Fault(
        "types_added_where_positions_are_present",
        "embedding",
        "kernels/embedding.py",
        "    if HAS_TYPES:\n        total += _gather(\n",
        "    if HAS_POSITIONS:\n        total += _gather(\n",
    ),
    Fault(
        "entries_without_a_token_are_position_0",
        "embedding",
        "kernels/embedding.py",
        "no_key = words + types + positions",
        "no_key = words + types",
    ),
    Fault(
        "positions_counted_from_the_words",
        "embedding",
        "kernels/embedding.py",
        "offsets = (rows - words - types) * columns",
        "offsets = (rows - words) * columns",
    ),
)

CROSS_ENTROPY = (
    Fault(
        "logit_of_the_next_label",
        "cross_entropy",
        "kernels/cross_entropy.py",
        "cols[None, :] == labels[:, None], logits",
        "cols[None, :] == labels[:, None] + 1, logits",
    ),
    Fault(
        "ignore_index_ignored",
        "cross_entropy",
        "kernels/cross_entropy.py",
        "(inside & (labels != ignore_index))",
        "(inside & (labels != -100))",
    ),
    Fault(
        "vocabulary_tail_not_masked",
        "cross_entropy",
        "kernels/cross_entropy.py",
        'return tl.where((cols < columns)[None, :], logits, -float("inf"))',
        'return tl.where((cols <= columns)[None, :], logits, -float("inf"))',
    ),
    Fault(
        "last_part_of_the_vocabulary_dropped",
        "cross_entropy",
        "kernels/cross_entropy.py",
        "has_part = (parts < used)[:, None]",
        "has_part = (parts < tl.maximum(used - 1, 1))[:, None]",
    ),
    Fault(
        "sum_of_exponentials_not_rescaled",
        "cross_entropy",
        "kernels/cross_entropy.py",
        "total = total * tl.exp2((highest - higher) * LOG2E) + tl.sum",
        "total = total + tl.sum",
    ),
    Fault(
        "mean_over_all_rows",
        "cross_entropy",
        "kernels/cross_entropy.py",
        "loss /= tl.maximum(tl.load(order_ptr + rows_total), 1)",
        "loss /= tl.maximum(tl.load(order_ptr + rows_total) * 0 + rows_total, 1)",
    ),
    Fault(
        "label_outside_the_vocabulary_unnoticed",
        "cross_entropy",
        "kernels/cross_entropy.py",
        'total = tl.where((labels >= 0) & (labels < columns), total, float("nan"))',
        'total = tl.where((labels >= 0) & (labels <= columns), total, float("nan"))',
    ),
    Fault(
        "one_hot_missing",
        "cross_entropy",
        "kernels/cross_entropy_backward.py",
        "dlogits = exponentials * tl.div_rn(dloss, total)[:, None] - own",
        "dlogits = exponentials * tl.div_rn(dloss, total)[:, None]",
    ),
    Fault(
        "gradient_divided_by_all_rows",
        "cross_entropy",
        "kernels/cross_entropy_backward.py",
        "dloss = tl.div_rn(dloss, count.to(tl.float32))",
        "dloss = tl.div_rn(dloss, (count * 0 + rows_total).to(tl.float32))",
    ),
    Fault(
        "copy_that_fills_up_the_tile_counts",
        "cross_entropy",
        "kernels/cross_entropy_backward.py",
        "dlogits = tl.where(labelled[:, None], dlogits, 0.0)",
        "dlogits = tl.where((places >= 0)[:, None], dlogits, 0.0)",
    ),
    Fault(
        "dhidden_stored_by_place",
        "cross_entropy",
        "kernels/cross_entropy_backward.py",
        "rows = tl.load(order_ptr + places, mask=exists, other=0).to(tl.int64)",
        "rows = places.to(tl.int64)",
    ),
    Fault(
        "dbias_of_the_last_rows_lost",
        "cross_entropy",
        "kernels/cross_entropy_backward.py",
        "row_blocks = tl.cdiv(tl.load(order_ptr + rows_total), ROWS_PER_PARTIAL)",
        "row_blocks = tl.load(order_ptr + rows_total) // ROWS_PER_PARTIAL",
    ),
    Fault(
        "dhidden_of_the_last_chunk_alone",
        "cross_entropy",
        "kernels/cross_entropy_backward.py",
        "accumulator += tl.load(sums_ptr + offsets, mask=labelled & inside, other=0.0)",
        "accumulator += tl.load(sums_ptr + offsets, mask=labelled & inside, other=0.0) * 0.0",
    ),
    Fault(
        "dweight_skips_the_last_label",
        "cross_entropy",
        "kernels/cross_entropy_backward.py",
        "for first in range(0, count, BLOCK_K):",
        "for first in range(0, count // BLOCK_K * BLOCK_K, BLOCK_K):",
    ),
)

PHILOX = (
    Fault(
        "philox_of_six_rounds",
        "philox",
        "kernels/philox.py",
        "PHILOX_ROUNDS = tl.constexpr(7)",
        "PHILOX_ROUNDS = tl.constexpr(6)",
    ),
    Fault(
        "philox_keys_step_alike",
        "philox",
        "kernels/philox.py",
        "key_1 += 0xBB67AE85",
        "key_1 += 0x9E3779B9",
    ),
    Fault(
        "philox_ignores_half_of_the_seed",
        "philox",
        "kernels/philox.py",
        "key_1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)",
        "key_1 = (seed & 0xFFFFFFFF).to(tl.uint32)",
    ),
    Fault(
        "dropout_words_in_another_order",
        "philox",
        "kernels/philox.py",
        "keep = tl.join(tl.join(keep_0, keep_2), tl.join(keep_1, keep_3))",
        "keep = tl.join(tl.join(keep_0, keep_1), tl.join(keep_2, keep_3))",
    ),
    Fault(
        "dropout_draws_a_word_twice",
        "philox",
        "kernels/philox.py",
        "keep_3 = (word_3 >> 8)",
        "keep_3 = (word_2 >> 8)",
    ),
)

OFFSETS = (
    Fault(
        "rows_of_attention_times_stride_in_32_bit",
        "large_offsets",
        "kernels/attention_rows.py",
        "return rows.to(tl.int64)[:, None] * stride_row",
        "return rows[:, None] * stride_row",
    ),
    Fault(
        "rows_of_a_norm_times_stride_in_32_bit",
        "large_offsets",
        "kernels/norm_rows.py",
        "offsets = rows.to(tl.int64)[:, None] * stride_row",
        "offsets = rows[:, None] * stride_row",
    ),
    Fault(
        "rows_of_a_product_times_stride_in_32_bit",
        "large_offsets",
        "kernels/gemm.py",
        "a_rows = (rows % rows_total).to(tl.int64)",
        "a_rows = rows % rows_total",
    ),
)

LAYER = (
    Fault(
        "layer_gradient_without_residual",
        "layer",
        "kernels/layer.py",
        "dfirst = _add_product(dresidual, dinner, w1)",
        "dfirst = _cast(dinner @ w1, dresidual.dtype)",
    ),
    Fault(
        "layer_seeds_of_the_norms_swapped",
        "layer",
        "kernels/layer.py",
        "x_bias=bo, seed=inputs.attention_output_seed,",
        "x_bias=bo, seed=inputs.output_seed,",
    ),
    Fault(
        "layer_gradient_ignores_dropout",
        "layer",
        "kernels/layer.py",
        "dprojected = _cast(dresidual if dx is None else dx, shape.dtype)\n    dinner,",
        "dprojected = _cast(dresidual, shape.dtype)\n    dinner,",
    ),
    Fault(
        "layer_stops_before_the_first_norm",
        "layer",
        "kernels/layer.py",
        "if not any(needs[:7]):",
        "if not any(needs[:4]):",
    ),
    Fault(
        "layer_gradient_of_wo_from_the_wrong_rows",
        "layer",
        "kernels/layer.py",
        "_joined(saved.out, inputs).view(dprojected.shape)",
        "saved.first.to(dprojected.dtype)",
    ),
)

FAULTS: tuple[Fault, ...] = (
    *LAYER,
    *ATTENTION,
    *ATTENTION_BIAS,
    *ATTENTION_WEIGHTS,
    *ATTENTION_SHORT,
    *FEED_FORWARD,
    *ROWS,
    *EMBEDDING,
    *CROSS_ENTROPY,
    *PHILOX,
    *OFFSETS,
)
