"""Functions of whole logits on ranks that share the vocabulary (`hybridrl.engine.chunked_function`).

A function may read any words of a token, so a token's logits have to be in one place. Of a chunk of n tokens every rank
has `[n, V / ranks]`; they exchange them, so that each has `[n / ranks, V]`, which are as many. No rank holds more.

Legend: N tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import linear, pad

from hybridrl.engine.chunked_function import Hidden, OwnVocabulary
from hybridrl.engine.megatron.vocabulary import VocabularyShard


class SharedVocabulary(OwnVocabulary):
    """Ranks with a part of the output layer's rows each, `[padded vocabulary / ranks, H]`."""

    def __init__(self, part: VocabularyShard) -> None:
        self.part = part

    def share(self, tokens: int) -> int:
        """Return the number of a chunk's tokens per rank; the last ranks get padding if they do not divide."""
        return -(-tokens // self.part.group.size())

    def own(self, tensor: torch.Tensor, chunk: slice) -> torch.Tensor:
        """This rank's tokens of a chunk of `[N, ...]`, padded with zeros."""
        share = self.share(len(tensor[chunk]))
        rows = tensor[chunk][share * self.part.group.rank() :][:share]
        return torch.cat([rows, rows.new_zeros(share - len(rows), *rows.shape[1:])])

    def logits(self, hidden: Hidden, chunk: slice) -> torch.Tensor:
        ranks, words, padded = self.part.group.size(), self.part.vocabulary, len(hidden.weight)
        of_words = linear(hidden.states[chunk], hidden.weight)
        if ranks == 1:
            return of_words[:, :words]
        share = self.share(len(of_words))
        of_words = pad(of_words, (0, 0, 0, share * ranks - len(of_words)))
        of_tokens = torch.empty_like(of_words)
        dist.all_to_all_single(of_tokens, of_words, group=self.part.group)
        return of_tokens.view(ranks, share, padded).transpose(0, 1).reshape(share, ranks * padded)[:, :words]

    def by_words(self, of_tokens: torch.Tensor, tokens: int, rows: int) -> torch.Tensor:
        ranks = self.part.group.size()
        of_tokens = pad(of_tokens, (0, ranks * rows - of_tokens.shape[1]))
        if ranks == 1:
            return of_tokens
        sent = of_tokens.view(len(of_tokens), ranks, rows).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.part.group)
        return received.view(-1, rows)[:tokens]

    def everywhere(self, own: torch.Tensor, tokens: int) -> torch.Tensor:
        if self.part.group.size() == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.part.group.size())]
        dist.all_gather(parts, own.contiguous(), group=self.part.group)
        return torch.cat(parts)[:tokens]

    def summed(self, gradient: torch.Tensor) -> None:
        if self.part.group.size() > 1:
            dist.all_reduce(gradient, group=self.part.group)
