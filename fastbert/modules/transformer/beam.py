"""Beam search with a length penalty, with the scores and the stopping rules of transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.modules.transformer.decoder_step import DecoderStep
from fastbert.modules.transformer.generation import GenerationSettings

# The score of a place that no finished sequence has taken yet, and the penalty of a candidate that
# must not be chosen. Both have the value that transformers uses.
NOTHING = -1.0e9


def beam_search(step: DecoderStep, settings: GenerationSettings, max_length: int) -> Tensor:
    """Generate the best sequences of each source.

    Args:
        step: The steps of generation.
        settings: The settings, which have `decoder_start_token_id`.
        max_length: Largest number of tokens, with the first token; at least 2.

    Returns:
        Tokens, int64 of shape ``(B * num_return_sequences, L)``. The sequences of a source follow
        one another, the best one first. A shorter sequence is filled at its end.
    """
    search = _Search(step, settings, max_length)
    while search.live.shape[0]:
        search.advance()
    return search.result()


class _Search:
    """The beams of all sources that are not finished.

    Attributes:
        live: Indices of the sources, int64 of shape ``(S,)``.
        running: Tokens of the running beams, int64 of shape ``(S, beams, length)``.
        scores: Log probability of each running beam, fp32 of shape ``(S, beams)``, falling.
        finished: Tokens of the best finished sequences, int64 of shape ``(S, K, length)``.
        finished_scores: Their scores with the length penalty, of shape ``(S, K)``.
        is_finished: Whether a place of `finished` has a sequence, bool of shape ``(S, K)``.
        lengths: Number of tokens of each finished sequence, int64 of shape ``(S, K)``.
    """

    def __init__(self, step: DecoderStep, settings: GenerationSettings, max_length: int) -> None:
        self.step, self.settings, self.max_length = step, settings, max_length
        self.live = live = step.cache.live
        sources, beams = live.shape[0], settings.num_beams
        # All beams begin with the same token, so that the first step has one beam.
        start = settings.decoder_start_token_id or 0
        self.running = live.new_full((sources, 1, 1), start)
        self.scores = torch.zeros(sources, 1, device=live.device)
        self.finished = live.new_full((sources, beams, 1), start)
        self.finished_scores = torch.full((sources, beams), NOTHING, device=live.device)
        self.is_finished = torch.zeros(sources, beams, dtype=torch.bool, device=live.device)
        self.lengths = live.new_ones(sources, beams)
        self.results: list[Tensor | None] = [None] * sources

    def advance(self) -> None:
        """Add one token to every running beam."""
        # The number of new tokens, with the token of this step.
        count = self.running.shape[2]
        at_the_end = count + 1 == self.max_length
        if at_the_end and self.settings.forced_eos_token_id is not None:
            scores = self.scores
            parents = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
            tokens = torch.full_like(parents, self.settings.forced_eos_token_id)
        else:
            scores, parents, tokens = self._candidates()
        ends = torch.full_like(tokens, at_the_end, dtype=torch.bool)
        if self.settings.eos_token_id is not None:
            ends |= tokens == self.settings.eos_token_id
        sequences = torch.cat([_gather(self.running, parents), tokens.unsqueeze(2)], dim=2)
        self._finish(scores, sequences, ends, count)
        if at_the_end:
            self._leave([False] * self.live.shape[0])
            return
        self.scores, best = (scores + ends * NOTHING).topk(self.settings.num_beams)
        self.running = _gather(sequences, best)
        self.step.cache.reorder(parents.gather(1, best))
        self._leave(self._goes_on(count).tolist())

    def _candidates(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores, the parents and the tokens of the best continuations of each source.

        There are twice as many candidates as beams, so that enough of them do not end a sequence.
        """
        logits = self.step(self.running[:, :, -1])
        wanted = 2 * self.settings.num_beams
        log_probs, tokens = _best_tokens(logits, wanted, self.settings)
        totals = log_probs.view(*self.scores.shape, wanted) + self.scores.unsqueeze(2)
        scores, places = totals.flatten(1).topk(wanted)
        tokens = tokens.view(totals.shape).flatten(1).gather(1, places)
        return scores, places // wanted, tokens

    def _finish(self, scores: Tensor, sequences: Tensor, ends: Tensor, count: int) -> None:
        """Add the candidates that end to the finished sequences, of which the best are kept."""
        beams = self.settings.num_beams
        # Only the best candidates may end; the others replace those that end.
        ends = ends & (torch.arange(ends.shape[1], device=ends.device) < beams)
        scores = scores / count**self.settings.length_penalty + ~ends * NOTHING
        older = torch.nn.functional.pad(self.finished, (0, 1), value=self.settings.filling)
        merged = torch.cat([self.finished_scores, scores], dim=1)
        self.finished_scores, best = merged.topk(beams)
        self.finished = _gather(torch.cat([older, sequences], dim=1), best)
        self.is_finished = torch.cat([self.is_finished, ends], dim=1).gather(1, best)
        lengths = torch.full_like(ends, count + 1, dtype=torch.int64)
        self.lengths = torch.cat([self.lengths, lengths], dim=1).gather(1, best)

    def _goes_on(self, count: int) -> Tensor:
        """Return whether a running beam of a source may still beat its finished sequences.

        The result is False too if `early_stopping` is True and all finished sequences exist.
        """
        settings = self.settings
        if settings.early_stopping == "never" and settings.length_penalty > 0.0:
            count = self.max_length - 1
        best = self.scores[:, :1] / count**settings.length_penalty
        worst = self.finished_scores.min(1, keepdim=True).values
        goes_on = (best > torch.where(self.is_finished, worst, NOTHING)).any(1)
        if settings.early_stopping is True:
            goes_on &= ~self.is_finished.all(1)
        return goes_on

    def _leave(self, goes_on: list[bool]) -> None:
        """Store the results of the sources that do not go on, and remove these sources."""
        if all(goes_on):
            return
        wanted = self.settings.num_return_sequences
        live, lengths = self.live.tolist(), self.lengths[:, :wanted].amax(1).tolist()
        for index, stays in enumerate(goes_on):
            if not stays:
                self.results[live[index]] = self.finished[index, :wanted, : lengths[index]]
        kept = torch.tensor(
            [index for index, stays in enumerate(goes_on) if stays],
            dtype=torch.int64,
            device=self.live.device,
        )
        for name in (
            "live", "running", "scores", "finished", "finished_scores", "is_finished", "lengths",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name)[kept])
        if self.live.shape[0]:
            self.step.cache.keep(kept)

    def result(self) -> Tensor:
        """Return the sequences of all sources, filled to the same length."""
        parts = [part for part in self.results if part is not None]
        longest = max((part.shape[1] for part in parts), default=1)
        fill = self.settings.filling
        padded = [
            torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=fill)
            for part in parts
        ]
        return torch.cat(padded) if padded else self.finished.flatten(0, 1)


def _best_tokens(
    logits: Tensor, wanted: int, settings: GenerationSettings
) -> tuple[Tensor, Tensor]:
    """Return the largest log probabilities of each row, and their tokens.

    Args:
        logits: Logits of shape ``(R, V)``.
        wanted: Number of tokens of each row.
        settings: The settings, which have the tokens that are never generated.

    Returns:
        Log probabilities and tokens, both of shape ``(R, wanted)``.
    """
    if settings.renormalize_logits:
        logits[:, settings.banned] = -torch.inf
    log_probs = logits.log_softmax(1)
    log_probs[:, settings.banned] = -torch.inf
    best, tokens = log_probs.topk(wanted)
    return best, tokens


def _gather(sequences: Tensor, places: Tensor) -> Tensor:
    """Select sequences ``(S, N, L)`` by their places ``(S, M)``; the result is ``(S, M, L)``."""
    return sequences.gather(1, places.unsqueeze(2).expand(-1, -1, sequences.shape[2]))
