"""The encoder–decoder of Vaswani et al. 2017, without padding inside on both sides."""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.io import checkpoint, marian
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.dropout import draw_seeds
from fastbert.modules.inputs import EncoderInput, enter
from fastbert.modules.model import Model
from fastbert.modules.outputs import as_asked
from fastbert.modules.summed_embeddings import SummedEmbeddings
from fastbert.modules.transformer.beam import beam_search
from fastbert.modules.transformer.decoder import TransformerDecoder
from fastbert.modules.transformer.decoder_step import DecoderStep
from fastbert.modules.transformer.encoder import build_encoder
from fastbert.modules.transformer.generation import GenerationSettings, largest_length
from fastbert.modules.transformer.greedy import greedy_search
from fastbert.modules.transformer.one_call import one_call
from fastbert.modules.transformer.outputs import States, TransformerOutput
from fastbert.modules.transformer.packed_attention import PackedAttention
from fastbert.modules.transformer.targets import check_mask, enter_target
from fastbert.modules.transformer.vocabulary_head import VocabularyHead
from fastbert.ops.backend import Choice, validate
from fastbert.ops.encoder import ONE_CALL
from fastbert.ops.product import needs_gradient
from fastbert.transformer_config import FIELDS, TransformerConfig


class Source(NamedTuple):
    """The encoder's output for a batch of sources.

    Attributes:
        rows: Rows after the last layer, of shape ``(S, H)``, without padding.
        layout: Division of the rows into sequences.
        hidden_states: The embedded source and the output of every layer in the caller's layout;
            None if not asked for.
        attentions: The attention weights of each layer in the caller's layout; None if not asked
            for.
    """

    rows: Tensor
    layout: BatchLayout
    hidden_states: States | None = None
    attentions: States | None = None

    @property
    def last_hidden_state(self) -> Tensor:
        """Rows after the last layer in the caller's layout, of shape ``(B, L, H)``."""
        return self.hidden_states[-1] if self.hidden_states else self.layout.given(self.rows)


class Transformer(Model):
    """An encoder–decoder with a projection to the vocabulary, as transformers' ``MarianMTModel``.

    Args:
        config: Configuration of the model.
        backend: Requested backend, ``"reference"``, ``"triton"``, ``"cuda"`` or ``"cpu"``. An
            operation without a full implementation by this backend chooses by device and dtype.
            None lets every operation choose.

    Attributes:
        generation: The settings of `generate`, which a checkpoint stores too.

    Raises:
        ValueError: If `backend` is unknown.

    Examples:
        >>> import torch
        >>> from fastbert.modules.transformer import Transformer, TransformerConfig
        >>> config = TransformerConfig(vocab_size=100, d_model=64, encoder_layers=1)
        >>> model = Transformer(config).eval()
        >>> sources = torch.tensor([[5, 6, 7, 1], [8, 1, 0, 0]])
        >>> labels = torch.tensor([[9, 8, 1], [7, 1, -100]])
        >>> output = model(sources, attention_mask=sources != 0, labels=labels)
        >>> output.logits.shape, output.encoder_last_hidden_state.shape
        (torch.Size([2, 3, 100]), torch.Size([2, 4, 64]))
    """

    config: TransformerConfig

    def __init__(self, config: TransformerConfig, *, backend: str | None = None) -> None:
        """Create the modules and initialise their parameters."""
        super().__init__(config, backend)
        self._source_config, self._target_config = config.encoder(), config.decoder()
        embedding = functools.partial(
            SummedEmbeddings,
            scaled=config.scale_embedding,
            static=config.static_position_embeddings,
            backend=backend,
        )
        self.encoder_embeddings = embedding(self._source_config)
        self.encoder = build_encoder(self._source_config, backend)
        self.decoder_embeddings = embedding(self._target_config)
        self.decoder = TransformerDecoder(self._target_config, backend)
        self.head = VocabularyHead(config, backend)
        self.initialise(self)
        for embeddings in (self.encoder_embeddings, self.decoder_embeddings):
            embeddings.reset_positions()
        self.tie_weights()
        self.generation = GenerationSettings.of(config)

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | os.PathLike[str],
        *,
        backend: str | None = None,
        dtype: torch.dtype | None = None,
        **config_overrides: Any,
    ) -> Transformer:
        """Load a model from a folder of transformers' ``MarianMTModel``, or from a hub id.

        The files are ``config.json``, ``generation_config.json`` if there is one, and
        ``model.safetensors`` or its shards. ``pytorch_model.bin`` is read with
        ``weights_only=True``.

        Args:
            path_or_hub_id: Folder or hub id of the checkpoint.
            backend: Requested backend, as in the constructor.
            dtype: Dtype of the parameters; None means the dtype of the checkpoint.
            **config_overrides: Fields of the configuration that replace the values in
                ``config.json``.

        Returns:
            The model in eval mode.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If a file is damaged, if a weight is missing, unknown or has another shape,
                or if the checkpoint has an option that is not implemented. The message names the
                file and the reason.
            OSError: As in ``BertPreTrainedModel.from_pretrained``.
        """
        validate(backend)
        stored, settings = marian.read(path_or_hub_id)
        checkpoint.check_overrides(config_overrides, FIELDS)
        config = marian.config_of(stored).replace(**config_overrides)
        # On the meta device, the model takes no memory, so the shapes of the checkpoint are checked
        # before memory is allocated.
        with torch.device("meta"):
            empty = cls(config, backend=backend)
        tensors = marian.from_marian(stored, config, empty.state_dict(), empty.tied())
        model = cls(config, backend=backend)
        model.generation = GenerationSettings.of(config, settings)
        model.to(stored.dtype if dtype is None else dtype)
        model.load_state_dict(tensors, strict=False)
        return model.eval()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint that transformers opens as a ``MarianMTModel`` to a folder.

        The files are ``config.json``, ``generation_config.json`` and ``model.safetensors``, which
        replace the files of an earlier save together; see ``BertPreTrainedModel.save_pretrained``.
        transformers has no model with layer norms before the blocks. The checkpoint of such a model
        has another ``model_type``, which the Auto classes of transformers refuse.

        Args:
            folder: Folder, which is created if it does not exist.

        Raises:
            ValueError: If `folder` is a file.
            OSError: As in ``BertPreTrainedModel.save_pretrained``.
        """
        tied = self.tied()
        tensors = {name: t for name, t in self.state_dict().items() if name not in tied}
        dtype = str(self.dtype).removeprefix("torch.")
        marian.write(folder, self.config, tensors, self.generation.to_dict(), dtype)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        source: Source | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_logits: bool | None = None,
        return_dict: bool | None = None,
    ) -> TransformerOutput | tuple[Any, ...]:
        """Compute the logits of the target, and the loss of the labels.

        Args:
            input_ids: Ids of the sources, int64 or int32 of shape ``(B, Ls)``.
            attention_mask: Mask of the sources, 1 or True at tokens and 0 at padding, of shape
                ``(B, Ls)``. None means that there is no padding.
            decoder_input_ids: Ids of the targets, int64 or int32 of shape ``(B, Lt)``. None shifts
                `labels` by one position and puts ``decoder_start_token_id`` first.
            decoder_attention_mask: Mask of the targets, of shape ``(B, Lt)``. With None and
                `labels`, the positions after the last label of a target are padding. With None and
                no labels, there is no padding.
            labels: Ids that the decoder predicts, of shape ``(B, Lt)``; -100 at positions without a
                loss.
            source: The result of `encode`, instead of `input_ids` and `attention_mask`.
            output_attentions: Whether the attention weights of all three kinds are returned. None
                takes the value of the configuration.
            output_hidden_states: Whether the hidden states of encoder and decoder are returned.
                None takes the value of the configuration.
            output_logits: Whether the logits are computed. None computes them unless there are
                labels and the model is in training mode.
            return_dict: Whether the result is an output object; False returns a tuple instead. None
                takes the value of the configuration, whose default is True.

        Returns:
            The output. All tensors are 0 at padding. The loss has label smoothing if
            ``config.label_smoothing`` is above 0.

        Raises:
            ValueError: If a shape or a value is not allowed. The message names the argument, its
                value and what is allowed. Values in a tensor are checked on the CPU only.
            TypeError: If a dtype is not allowed.
        """
        attentions = self.flag("output_attentions", output_attentions)
        states = self.flag("output_hidden_states", output_hidden_states)
        if source is None:
            source = self.encode(
                input_ids,
                attention_mask,
                output_attentions=attentions,
                output_hidden_states=states,
            )
        elif input_ids is not None or attention_mask is not None:
            raise ValueError("source: got a source and input_ids or attention_mask, allowed: one")
        target = enter_target(
            self.config, self._target_config, decoder_input_ids, decoder_attention_mask, labels
        )
        output = self._decode(target, source, attentions, states)
        rows = output.pop("rows")
        if output_logits is None:
            output_logits = labels is None or not self.training
        result = TransformerOutput(
            loss=None if labels is None else self.head.loss(rows, target.layout.rows(labels)),
            logits=target.layout.given(self.head(rows)) if output_logits else None,
            encoder_last_hidden_state=source.last_hidden_state,
            encoder_hidden_states=source.hidden_states,
            encoder_attentions=source.attentions,
            **output,
        )
        return as_asked(result, self.flag("return_dict", return_dict, True))

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> Source:
        """Encode a batch of sources.

        Args:
            input_ids: As in `forward`.
            attention_mask: As in `forward`.
            output_attentions: Whether the attention weights are returned.
            output_hidden_states: Whether the hidden states are returned.

        Returns:
            The rows without padding.

        Raises:
            ValueError: As in `forward`.
            TypeError: As in `forward`.
        """
        check_mask("attention_mask", attention_mask)
        tokens = enter(self._source_config, input_ids, attention_mask)
        seeds = draw_seeds(self._source_config, self.training, tokens.positions.device)
        rows = self.encoder_embeddings(tokens, seeds.embeddings)
        rows, states, attentions = self.encoder(
            rows, tokens.layout, output_attentions, output_hidden_states, seeds.layers
        )
        return Source(
            rows,
            tokens.layout,
            tuple(states) if states else None,
            tuple(attentions) if attentions else None,
        )

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        early_stopping: bool | str | None = None,
        num_return_sequences: int | None = None,
    ) -> Tensor:
        """Generate targets by greedy search or beam search, as ``generate`` of transformers does.

        An argument that is None has the value of `generation`, which a checkpoint sets.

        Args:
            input_ids: Ids of the sources, int64 or int32 of shape ``(B, L)``.
            attention_mask: Mask of the sources, 1 or True at tokens and 0 at padding, of shape
                ``(B, L)``. None means that there is no padding.
            max_length: Largest number of tokens of a target, with the first token.
            max_new_tokens: Largest number of tokens after the first token, instead of `max_length`.
            num_beams: Number of beams; 1 means greedy search.
            length_penalty: As in `GenerationSettings`.
            early_stopping: As in `GenerationSettings`.
            num_return_sequences: Number of targets that are returned for each source.

        Returns:
            Tokens, int64 of shape ``(B * num_return_sequences, Lt)``. A target begins with
            ``decoder_start_token_id``. A shorter target is filled at its end.

        Raises:
            ValueError: If a shape or a value is not allowed, if the model is in training mode, or
                if `generation` has a setting that is not implemented.
            TypeError: If a dtype is not allowed.
        """
        if self.training:
            raise ValueError("generate: got a model in training mode, allowed: after model.eval()")
        settings = self.generation.replace(
            max_length=max_length,
            num_beams=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            num_return_sequences=num_return_sequences,
        )
        settings.check_implemented()
        length = largest_length(settings, self.config, max_length, max_new_tokens)
        source = self.encode(input_ids, attention_mask)
        step = DecoderStep(
            self.decoder_embeddings, self.decoder, self.head, source.rows, source.layout
        )
        search = greedy_search if settings.num_beams == 1 else beam_search
        return search(step, settings, length)

    def backends(self, device: str | None = None) -> dict[str, Choice]:
        """Return the backend of each operation; see ``Model.backends``.

        The entry ``"decoder"`` states whether the layers of the decoder run as one call in a step
        of `generate`.
        """
        choices = super().backends(device)
        weight = next(self.parameters())
        call = one_call(self.decoder, device or weight.device.type, weight.dtype)
        choices["decoder"] = (
            Choice(choices["attention"].backend, f"layer by layer: {call}")
            if isinstance(call, str)
            else Choice("cpu", ONE_CALL)
        )
        return choices

    def _decode(
        self, target: EncoderInput, source: Source, output_attentions: bool, states: bool
    ) -> dict[str, Any]:
        """Run the decoder; return its rows, and its fields of `TransformerOutput`."""
        layout = target.layout
        if layout.batch != source.layout.batch:
            raise ValueError(
                f"decoder_input_ids: got {layout.batch} targets, allowed: {source.layout.batch}, "
                "the number of sources"
            )
        kept: list[Tensor] = []

        def after(rows: Tensor) -> Tensor:
            kept.append(layout.given(rows))
            # With a gradient, the later layers are computed from the returned state.
            return layout.rows(kept[-1]) if needs_gradient(rows) else rows

        attention = PackedAttention(layout, source.layout, source.rows, output_attentions)
        rows = self.decoder_embeddings(target)
        decoded = self.decoder(rows, attention, after) if states else self.decoder(rows, attention)
        return {
            "rows": decoded.rows,
            "decoder_hidden_states": tuple(kept) if states else None,
            "decoder_attentions": decoded.attentions or None,
            "cross_attentions": decoded.cross_attentions or None,
        }

    def tied(self) -> dict[str, str]:
        """Return the tied tables of word embeddings; see ``Model.tied``."""
        config = self.config
        source, target = (
            f"{name}_embeddings.word_embeddings.weight" for name in ("encoder", "decoder")
        )
        tied = {target: source} if config.share_encoder_decoder_embeddings else {}
        if config.tie_word_embeddings:
            tied["head.decoder.weight"] = source if tied else target
        return tied

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of word embeddings of the source."""
        return self.encoder_embeddings.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """Return the projection to the vocabulary."""
        return self.head.decoder
