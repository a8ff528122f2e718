"""An invalid argument of a C++ operator raises an error or is harmless, but causes no signal."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import _fresh_python
import pytest
from _good_calls import good_calls, operators

try:
    from fastbert import _C  # noqa: F401  registers the operators
except ImportError as error:
    pytest.skip(f"fastbert._C was not built: {error}", allow_module_level=True)

RUNNER = Path(__file__).with_name("_spoiled_calls.py")


class Outcome(NamedTuple):
    form: int
    argument: str
    spoil: str
    error: str | None = None
    message: str = ""
    wrong: str | None = None
    returned: str | None = None
    signal: int | None = None


@pytest.fixture(scope="session")
def outcomes() -> dict[str, list[Outcome]]:
    """Return the outcomes of all calls, by operator.

    If a signal ends the process, a new process continues with the next call.
    """
    results: dict[str, list[Outcome]] = defaultdict(list)
    begin, done = 0, False
    while not done:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = _fresh_python.run(RUNNER, begin, env=env)
        lines = [json.loads(line) for line in process.stdout.splitlines()]
        done = bool(lines) and lines[-1] == "done"
        assert done or process.returncode < 0, process.stderr
        for i, line in enumerate(lines[:-1] if done else lines):
            if isinstance(line, dict):
                continue
            number, operator, *rest = line
            end = lines[i + 1] if i + 1 < len(lines) else {"signal": -process.returncode}
            results[operator].append(Outcome(*rest, **end))
            begin = number + 1
    return dict(results)


# torch raises these errors before it calls an operator. An error about a device or a layout names
# only the operator, not the argument.
BY_TORCH = re.compile(
    r"fastbert_C::\w+: attempted to run this operator with Meta tensors"
    r"|Could not run 'fastbert_C::\w+' with arguments from the 'SparseCPU' backend"
    r"|There were no tensor arguments to this function"
    r"|Inplace update to inference tensor outside InferenceMode is not allowed"
    r"|a leaf Variable that requires grad is being used in an in-place operation"
    r"|a view of a leaf Variable that requires grad is being used in an in-place operation"
    r"|Dimension specified as 0 but tensor has no dimensions"
    r"|Storage size calculation overflowed|can't allocate memory|not enough memory"
)
# If the changed argument contradicts another argument, the message may name that other argument.
DISAGREEMENTS = re.compile(
    r"(\[\d+\]: )?(dtype|rank|size|empty|all|-?\d+ at)|-?\d+$|None|'|expanded|no tensor|not$|1\.5$"
)
# For these layouts, the child process compares the result with the result for a contiguous copy.
LAYOUTS = re.compile(
    r"(\[\d+\]: )?(offset|inference|wants a gradient|negative bit|stride 2|dimension \d|expanded)"
)
FLOATING = r"(dtype )?torch\.(bfloat16|float16|float32|float64)"
INTEGER = r"dtype torch\.(int64|int32|bool)"
CONTENT = r"all -?\d+|-?\d+ at -?\d"
NUMBER = r"-?\d+(\.\d+)?(e[+-]\d+)?"
ROWS = r"size ([+-] 1|0) of dimension 0"
# These calls are valid although an argument was changed, given as (operator/form, argument,
# change).
HARMLESS = (
    # Operators accept any floating-point value, and any integer that is not an index.
    (r".*", r".*", r"(all )?(nan|-?inf|3e\+38)( at -?\d)?"),
    (r".*", r"seeds?", f"{CONTENT}|rank.*"),
    (r"int8_linear/0|encoder/1|bert/2", r"packed|column_sum|parameters|scales", CONTENT),
    (r"unpad_indices/.*|any_outside/0", r"mask|index", f"{CONTENT}|{INTEGER}|size .*"),
    (r"any_outside/0", r"index", r"rank.*|empty"),
    # The arguments of the next entry are optional, so None is valid. The arguments of the entry
    # after it are bools, and torch converts any object to a bool.
    (
        r".*",
        r"addend|bias|(inner|outer)_bias|dbias|mask|residual|x_bias|ignored|heads|rows|cu_seqlens",
        r"None",
    ),
    (
        r".*",
        r"all_states|has_bias|inverse|recompute|save|sum_rows|(pre|rms)_norm",
        r"1\.5|None|not",
    ),
    # An empty tensor represents an absent parameter.
    (
        r"(encoder|bert|layer_\w+ward|decoder_step)/.*",
        r"parameters",
        r"size 0 of dimension 0|empty",
    ),
    (r"layer_(forward|backward)/4|encoder/5", r"parameters", r"dtype .*|rank.*"),
    (r"layer_(forward|backward)/4", r"rotation", r"no tensor"),
    (r"layer_(forward|backward)/.*", r"window", r"-1|\d+"),
    (r"layer_forward/.*", r"dtype", FLOATING),
    # In a norm, x may have a narrower dtype than the residual.
    (r"layer_norm_backward/0", r"x", FLOATING),
    # In the loss, the hidden states may have a narrower dtype than the weight.
    (r"linear_cross_entropy_\w+ward/.*", r"hidden", FLOATING),
    # The same holds for SPLADE. It does not read rows after the last sequence, and the row -1 means
    # that no logit is positive.
    (r"splade_forward/.*", r"hidden", f"{FLOATING}|{ROWS}"),
    (r"splade_forward/.*", r"cu_seqlens", r"size - 1 of dimension 0"),
    (r"splade_backward/.*", r"hidden", r"size [+-] 1 of dimension 0"),
    (r"splade_backward/.*", r"rows", r"(all )?-1( at -?\d)?"),
    # `bert` returns an empty result for arguments that it does not support.
    (r"bert/.*", r"ids|mask|token_types|cu_seqlens", r".*"),
    (r"bert/.*", r"dtype", r".*"),
    (r"bert/.*", r"parameters", r"dtype .*"),
    # These calls read no element of the changed argument.
    (r"use_huge_pages/0", r"weights", r".*"),
    # Other tensors have other bytes.
    (r"same_bytes/0", r"a|b", r".*"),
    (r"bert/.*", r"embedding", r"dtype .*"),
    (r"bert/.*", r"pooler", FLOATING),
    (r"bert/.*", r"embedding|pooler|parameters", r"no tensor|one tensor less"),
    (r"bert/.*", r"embedding", r"size ([+-] 1|0) of dimension 0"),
    (r"bert/.*", r"heads", r"[013]"),
    (r"bert/.*", r"first_position", NUMBER + "|None"),
    (r".*", r"embedding_eps", r"\d+(\.\d+)?(e\+\d+)?"),
    (r".*", r"activation", r"'(relu|geglu)'"),
    (r".*", r"dropout_p", r"[01]\.0"),
    (r".*", r"eps", r"\d+(\.\d+)?(e\+\d+)?"),
    (r"encoder/.*", r"dtype", FLOATING),
    (r".*", r"scale", NUMBER),
    (r".*", r"left|right", r"-1|\d+"),
    (r"any_outside/0", r"size|ignored", NUMBER),
    (r"embedding_backward/.*", r"padding_idx", NUMBER),
    (r"rotary/0|encoder/.*|layer_\w+/.*", r"heads", r"[013]"),
    (r"attention_weights/.*", r"heads|rows", r"\[\]|\[0, 0.*"),
    # Dense attention takes lengths from shapes. The encoder takes the batch size from cu_seqlens.
    (r"(relative_)?attention_\w+/0", r"max_seqlen_[qk]", NUMBER),
    (r"encoder/[1345]", r"batch", NUMBER),
    (r"(relative_)?attention_\w+/1|encoder/[1345]", r"max_seqlen(_[qk])?", r"4"),
    (r"encoder/3", r"rotations|windows", r"no tensor|\[\]"),
    # A table of positions without elements is absent.
    (r"encoder/4", r"positions", r"no tensor|empty|size 0 of dimension [01]"),
    (r"encoder/[45]", r"scale", r"None"),
    # Parameters may have any floating-point dtype. An operand that need not match another operand
    # may also have another number of rows.
    (
        r".*",
        r"bias|biases|(x|inner|outer)_bias|weight|norm_weight|norm_bias|dloss|parameters",
        FLOATING,
    ),
    (
        r".*_forward/.*|matmul/0|rotary/0|int8_linear/0|linear_of_parts/0|\w+_layer_norm/0",
        r"[xha]",
        FLOATING,
    ),
    (r"activation_forward/.*|linear_of_parts/0", r"[hx]", ROWS),
    (r"layer_norm_forward/1", r"x", ROWS),
    (r"embedding_forward/1", r"ids", f"{ROWS}|empty"),
    (r"embedding_forward/1", r"word_table", FLOATING),
    (r"(rotary|int8_linear)/0", r"x", r"size [+-] 1 of dimension 1"),
    (r".*", r"ids|token_types|positions|labels", INTEGER),
    (r"embedding_.*", r"(word|type|position)_table", r"size \+ 1 of dimension 0"),
    (r"attention_(forward|weights)/1|encoder/[1345]", r"q|k|hidden|cu_seqlens", ROWS),
    (
        r"(relative_)?attention_\w+/0|encoder/[02]",
        r"mask|bias",
        r"size [+-] 1 of dimension [01]",
    ),
    # Only one of the three tables is needed, and a table may be longer than needed. Two segments
    # are compared, and any two numbers can be.
    (r"relative_attention_\w+/0", r"position_(keys|queries|bias)", r"None"),
    (r"relative_attention_\w+/1", r"position_keys", r"size \+ 1 of dimension 0"),
    (r"relative_attention_.*", r"[qk]_segments", f"{CONTENT}|{INTEGER}"),
    (r"encoder/.*|linear_of_parts/0", r"parameters|biases", r"no tensor"),
    # The length of the bias sets how many outputs of a padded int8 weight are real.
    (r"encoder/1|bert/2", r"parameters", r"size [+-] 1 of dimension 0"),
    (r"sum_rows/.*", r"x", rf"size .* of dimension [01]|{FLOATING}"),
    # Without chosen rows, all rows are queries, and the results after the last sequence are 0.
    (r"layer_(forward|backward)/[13]", r"hidden|chosen", f"{ROWS}|None"),
    (r"layer_(forward|backward)/[13]", r"dropouts|max_seqlen_[qk]", r"\[0, 0, 1\]|3|4"),
    (r"scatter_rows/.*", r"values", r"dtype .*|rank \+ 1 behind|size .* of dimension 1"),
    (r"scatter_rows/.*", r"rows", r"[46]"),
    # A cache or a table may be larger than needed, and an earlier position is a valid position.
    (r"decoder_step/.*", r"(source_)?cache|slots|cu_seqlens", r"size \+ 1 of dimension \d"),
    (r"decoder_step/.*", r"position", r"[012]"),
    # For meta tensors, torch calls the fake implementations of these operators, which read no
    # memory.
    (r"linear/.*|matmul/0|sum_rows/.*", r".*", r"meta"),
)


def is_named(operator: str, v: Outcome) -> bool:
    if re.search(rf"\b{v.argument}\b", v.message) or BY_TORCH.search(v.message):
        return True
    if not DISAGREEMENTS.match(v.spoil):
        return False
    others = (a.name for a in operators()[operator].arguments)
    return any(re.search(rf"\b{name}\b", v.message) for name in others)


def is_harmless(operator: str, v: Outcome) -> bool:
    call = (f"{operator}/{v.form}", v.argument, v.spoil.rsplit("]: ", 1)[-1])
    return bool(LAYOUTS.match(v.spoil)) or any(
        all(re.fullmatch(pattern, got) for pattern, got in zip(rule, call, strict=True))
        for rule in HARMLESS
    )


def is_fine(operator: str, v: Outcome) -> bool:
    if v.error is not None:
        return is_named(operator, v)
    return v.returned is not None and is_harmless(operator, v)


def test_every_operator_has_a_good_call():
    assert sorted(good_calls()) == sorted(operators())


@pytest.mark.parametrize("operator", sorted(operators()))
def test_the_good_call_returns(outcomes, operator):
    good = [v for v in outcomes[operator] if v.spoil == "nothing"]
    assert len(good) == len(good_calls()[operator])
    assert [v for v in good if v.returned is None] == []


@pytest.mark.parametrize("operator", sorted(operators()))
def test_a_spoiled_argument_is_an_error_or_harmless(outcomes, operator):
    """A changed argument raises an error that names the argument, or the call is in ``HARMLESS``.

    No call ends the process by a signal, and an argument in another memory layout gives the same
    result.
    """
    spoiled = [v for v in outcomes[operator] if v.spoil != "nothing"]
    assert [v for v in spoiled if not is_fine(operator, v)] == []


def test_the_number_of_spoiled_calls(outcomes, capsys):
    calls = [v for results in outcomes.values() for v in results if v.spoil != "nothing"]
    errors = sum(v.error is not None for v in calls)
    with capsys.disabled():
        print(f"\n{len(calls)} spoiled calls of {len(outcomes)} operators: {errors} errors")
    assert len(calls) > 10_000
