"""The pieces of texts: bytes, and merges of frequent neighbours (byte-level BPE)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fastbert.data.tokenizer import CONFIG, read_tokenizer, rust_errors

FILE = "tokenizer.json"
PADDING, END = "<pad>", "</s>"
BYTES = 256


class PieceTokenizer:
    """A tokenizer whose pieces are bytes, and merges of bytes, of any text in UTF-8.

    The pieces are those of GPT-2's byte-level BPE (Sennrich et al. 2016; Radford et al. 2019),
    except that every digit is a piece of its own. No text has an unknown piece, and `decode`
    returns the text that was encoded. A source and a target end with the token ``</s>``.

    Attributes:
        size: Number of ids.
        padding: Id of the padding.
        end: Id of the token that ends a text.
    """

    def __init__(self, backend: Tokenizer, place: str = "tokenizer") -> None:
        """Wrap a tokenizer of the ``tokenizers`` library.

        Args:
            backend: The tokenizer.
            place: Name of the tokenizer, for messages.

        Raises:
            ValueError: If the tokenizer has no padding or no token that ends a text.
        """
        padding, end = backend.token_to_id(PADDING), backend.token_to_id(END)
        if padding is None or end is None:
            raise ValueError(f"{place}: got no {PADDING} or no {END}, allowed: both")
        # A text that contains "</s>" is encoded by its bytes, as any other text.
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        self._backend, self.padding, self.end = backend, padding, end
        self.size: int = backend.get_vocab_size()

    @classmethod
    def train(cls, texts: Iterable[str], merges: int) -> PieceTokenizer:
        """Find the pieces of some texts.

        Args:
            texts: The texts.
            merges: Largest number of merges. With 0, each byte is a piece.

        Returns:
            The tokenizer. The same texts give the same ids.
        """
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=2 + BYTES + merges,
            special_tokens=[PADDING, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        end = backend.token_to_id(END)
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {END}", special_tokens=[(END, end)]
        )
        return cls(backend)

    @classmethod
    def load(cls, folder: Path) -> PieceTokenizer:
        """Load the tokenizer of a model folder.

        Raises:
            FileNotFoundError: If there is no ``tokenizer.json``.
            ValueError: If the file is broken or lacks a special token.
        """
        path = folder / FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"model: {path} does not exist, allowed: a folder of `fastbert seq2seq train`"
            )
        return cls(read_tokenizer(path), str(path))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, with the id of ``</s>`` at the end."""
        with rust_errors("tokenizer: it fails"):
            return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, up to the first ``</s>``. Bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: The ids of a target, without the first input of the decoder.
        """
        ids = list(ids)
        if self.end in ids:
            ids = ids[: ids.index(self.end)]
        text: str = self._backend.decode(ids)
        return text

    def save(self, folder: str | os.PathLike[str], *, max_length: int | None = None) -> None:
        """Write the files that ``AutoTokenizer`` of transformers reads.

        Args:
            folder: Folder, which is created if it does not exist.
            max_length: Value of ``model_max_length`` in tokens; None writes no such key.
        """
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PADDING,
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
        }
        if max_length is not None:
            config["model_max_length"] = max_length
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (
            (FILE, self._backend.to_str(pretty=True)),
            (CONFIG, json.dumps(config, indent=2)),
        ):
            (folder / name).write_bytes(f"{text}\n".encode())
