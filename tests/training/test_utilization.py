"""Model FLOPs agree with torch's count, and the log has their share of a known peak rate."""

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from fastbert.config import BertConfig
from fastbert.training import pretraining_run, utilization
from fastbert.training.evaluate import IGNORED
from fastbert.training.log import read_log
from fastbert.training.pretraining import pretrain
from fastbert.training.utilization import model_flops, peak_flops


def test_flops_are_those_that_torch_counts():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 80, "vocab_size": 60}
    stock = transformers.BertForPreTraining(
        transformers.BertConfig(num_attention_heads=4, attn_implementation="eager", **sizes)
    )
    ids, labels = torch.randint(0, 60, (2, 4, 32))
    # The stock model computes logits at all positions, so all positions have a label here.
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones(4, 32, dtype=torch.int64),
        "labels": labels,
        "next_sentence_label": torch.tensor([0, 1, 1, 0]),
    }
    with FlopCounterMode(display=False) as counter:
        stock(**batch).loss.backward()
    config = BertConfig(num_attention_heads=4, **sizes)
    # The tolerance covers the two outputs of the next-sentence head, which model_flops does not
    # count.
    assert model_flops(config, batch) == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_padding_has_no_flops():
    config = BertConfig.preset("tiny", vocab_size=60)
    padded = torch.full((2, 6), IGNORED)
    padded[0, 1] = padded[1, 4] = 7
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    packed = {"cu_seqlens": torch.tensor([0, 3, 8]), "labels": padded[mask.bool()]}
    expected = model_flops(config, packed)
    assert model_flops(config, {"attention_mask": mask, "labels": padded}) == expected


def test_only_a_known_gpu_has_a_peak(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops(gpu, "bf16") == pytest.approx(989e12, rel=1e-3)
    assert peak_flops(gpu, "fp32") is None
    assert peak_flops(torch.device("cpu"), "bf16") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    assert peak_flops(gpu, "bf16") is None


def test_the_share_of_a_known_peak_is_logged_and_shown(options, documents, monkeypatch):
    monkeypatch.setattr(pretraining_run, "peak_flops", lambda device, precision: 1e12)
    monkeypatch.setattr(pretraining_run, "model_flops", lambda config, batch: 5e9)
    console = Console(file=io.StringIO(), width=200)
    result = pretrain(options(accumulate=2, steps=4), documents=documents, console=console)
    rows = [row for row in read_log(result.log) if row["event"] == "train"]
    assert len(rows) == 2
    # The run has two logged periods, each of two steps with two batches.
    seconds = sum(4 * 5e9 / 1e12 / row["utilization"] for row in rows)
    assert seconds == pytest.approx(result.seconds)
    assert f"{rows[0]['utilization']:.0%} of the peak" in console.file.getvalue()
    assert "is not known" not in console.file.getvalue()


def test_a_peak_that_is_not_known_is_said_once(options, documents):
    console = Console(file=io.StringIO(), width=200)
    result = pretrain(options(steps=4), documents=documents, console=console)
    text = console.file.getvalue()
    assert text.count("the peak of this processor in fp32 is not known") == 1
    assert "of the peak" not in text
    assert all("utilization" not in row for row in read_log(result.log))


def test_the_gpu_of_the_process_is_asked(monkeypatch):
    asked = []
    cuda = SimpleNamespace(get_device_name=lambda device: asked.append(device) or "NVIDIA H200")
    monkeypatch.setattr(utilization.torch, "cuda", cuda)
    peak_flops(torch.device("cuda", 1), "bf16")
    assert asked == [torch.device("cuda", 1)]
