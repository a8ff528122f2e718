"""Import every module of fastbert under a mode of torch, and then run models without the mode.

    python tests/modules/first_import.py MODE

The program prints a digest of the models' results, which must be the same for all modes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

# Class of each family → settings of its configuration in addition to `SIZES`.
FAMILIES = {
    "BertModel": {},
    "NomicBertModel": {},
    "ModernBertModel": {"pad_token_id": 0, "global_attn_every_n_layers": 2},
}
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


def hf_model(name: str) -> nn.Module:
    configuration = getattr(transformers, name.replace("Model", "Config"))
    return getattr(transformers, name)(configuration(**SIZES, **FAMILIES[name]))


def import_everything() -> None:
    import fastbert

    for module in pkgutil.walk_packages(fastbert.__path__, "fastbert."):
        # `__main__` would run the program. Without CUDA, the extension has no launcher to import.
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


def use_everything() -> None:
    """Build, accelerate and call models under the mode, as users do while transformers loads."""
    import fastbert
    from fastbert.config import BertConfig
    from fastbert.modules import BertModel

    builders: list[Callable[[], nn.Module]] = [lambda: BertModel(BertConfig(**SIZES))]
    builders += [lambda name=name: fastbert.accelerate(hf_model(name)) for name in FAMILIES]
    for build in builders:
        # A call with fake or meta tensors may fail, because these tensors have no values.
        with contextlib.suppress(Exception):
            build().eval()(input_ids=torch.ones(1, 4, dtype=torch.int64))


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def from_pretrained() -> Iterator[None]:
    """Import and use fastbert inside `from_pretrained`, which builds models on the meta device."""
    import tempfile

    class Loaded(transformers.BertModel):
        def __init__(self, config: Any) -> None:
            import_everything()
            use_everything()
            super().__init__(config)

    with tempfile.TemporaryDirectory() as folder:
        hf_model("BertModel").save_pretrained(folder)
        Loaded.from_pretrained(folder)
    yield


def fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


MODES: dict[str, Callable[[], Any]] = {
    "device meta": lambda: torch.device("meta"),
    "default device": default_device,
    "default dtype": default_dtype,
    "inference mode": torch.inference_mode,
    "fake tensors": fake,
    "from_pretrained": from_pretrained,
}


def results() -> Iterator[Tensor]:
    """Yield outputs and gradients of a fastbert model and of accelerated models in eval mode."""
    import fastbert
    from fastbert.config import BertConfig
    from fastbert.modules import BertModel

    ids = torch.arange(24).view(2, 12) % 50
    mask = (torch.arange(12) < torch.tensor([[12], [7]])).long()
    builders: list[Callable[[], nn.Module]] = [lambda: BertModel(BertConfig(**SIZES))]
    builders += [lambda name=name: fastbert.accelerate(hf_model(name)) for name in FAMILIES]
    for build in builders:
        torch.manual_seed(0)
        model = build()
        with torch.no_grad():
            yield model.eval()(input_ids=ids, attention_mask=mask)[0]
        with torch.inference_mode():
            yield model(input_ids=ids, attention_mask=mask)[0]
        model(input_ids=ids, attention_mask=mask)[0].square().sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                yield parameter.grad


def digest() -> str:
    """Return one SHA-256 digest of all tensors of `results`."""
    sha256 = hashlib.sha256()
    for result in results():
        assert result.dtype == torch.float32
        sha256.update(result.detach().numpy().tobytes())
    return sha256.hexdigest()


def main() -> None:
    warnings.simplefilter("ignore")
    with MODES[sys.argv[1]]():
        import_everything()
        use_everything()
    print(digest())


if __name__ == "__main__":
    main()
