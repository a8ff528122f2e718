"""A wrong option raises an error before any file is read or written.

The error names the option, its value and the allowed values.
"""

import pytest

from fastbert.training.options import PretrainOptions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps: got 0, allowed: None or an integer >= 1"),
        ({"steps": 5, "epochs": 2}, r"steps and epochs: got \(5, 2\), allowed: at most one"),
        ({"epochs": 1.5}, "epochs: got 1.5, allowed: None or an integer"),
        ({"learning_rate": 0.0}, "learning_rate: got 0.0, allowed: a finite number > 0"),
        ({"learning_rate": float("nan")}, "learning_rate: got nan"),
        ({"warmup": 1.0}, r"warmup: got 1.0, allowed: a number in \[0, 1\)"),
        ({"held_out": -0.1}, r"held_out: got -0.1, allowed: a number in \[0, 1\)"),
        ({"weight_decay": -1}, "weight_decay: got -1, allowed: a finite number >= 0"),
        ({"clip_norm": "1"}, "clip_norm: got '1', allowed: a finite number > 0"),
        ({"precision": "fp16"}, "precision: got 'fp16', allowed: fp32, bf16"),
        ({"preset": "huge"}, "preset: got 'huge', allowed: tiny, mini, base, large"),
        ({"backend": "gpu"}, "backend: got 'gpu', allowed: None, reference, triton, cuda, cpu"),
        ({"config": {"hidden": 3}}, "config: got 'hidden', allowed: fields of BertConfig"),
        ({"config": {"vocab_size": 9}}, "allowed: no vocab_size: the tokenizer decides it"),
        ({"config": {"hidden_act": "mish"}}, "hidden_act: got 'mish', allowed: gelu"),
        ({"max_length": 4}, "max_length: got 4, allowed: an integer >= 8"),
        ({"max_length": 600}, r"max_length: got 600, allowed: at most max_position_embeddings"),
        ({"tokens_per_batch": 64}, r"tokens_per_batch: got 64, allowed: .* max_length \(128\)"),
        ({"seed": -1}, r"seed: got -1, allowed: an integer in \[0, 2\*\*63\)"),
        ({"accumulate": 0}, "accumulate: got 0, allowed: an integer >= 1"),
        ({"optimizer": "sgd"}, "optimizer: got 'sgd', allowed: adamw, lamb"),
        ({"schedule": "step"}, "schedule: got 'step', allowed: linear, cosine, constant"),
        ({"ema": 1.0}, r"ema: got 1.0, allowed: None or a number in \(0, 1\)"),
        ({"save_minutes": 0}, "save_minutes: got 0, allowed: None or a finite number > 0"),
        ({"tracker": "paper"}, "tracker: got 'paper', allowed: None, tensorboard, wandb"),
        ({"cuda_graphs": True, "accumulate": 2}, "cuda_graphs and accumulate: got 2, allowed"),
        ({"cuda_graphs": True, "optimizer": "lamb"}, "cuda_graphs and optimizer: got 'lamb', al"),
        ({"cuda_graphs": True, "shard": True}, "cuda_graphs and shard: got True, allowed: at m"),
        ({"log_every": True}, "log_every: got True, allowed: an integer >= 1"),
    ],
)
def test_bad_options_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        PretrainOptions(output="out", **changes)


def test_the_model_is_preset_plus_overrides():
    options = PretrainOptions(output="out", preset="tiny", config={"num_hidden_layers": 3})
    config = options.model_config(1000, pad_token_id=4)
    assert (config.hidden_size, config.num_hidden_layers) == (128, 3)
    assert (config.vocab_size, config.pad_token_id) == (1000, 4)
