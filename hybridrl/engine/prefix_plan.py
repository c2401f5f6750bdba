"""Micro-batches in which each token that rows share is computed once (`model.share_prefixes`).

The rows of a micro-batch become the flat row of their prefix tree (`hybridrl.models.prefix_tree`). What a response
token needs, its log-probability given the tokens before it, is a property of its node in the tree: rows that share the
token share its outputs, and rows that branch before it have a node each. So outputs are computed once per node, and
every row takes those of its own path; in the backward pass the gradients of all rows add up there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hybridrl.engine.microbatch import PREFERRED_CELLS, WORTHWHILE_PADDING, BatchPlan, MicroBatchLayout
from hybridrl.engine.train_engine import MicroBatching
from hybridrl.models.prefix_tree import PrefixOrder, PrefixTree, even_partition, partition
from hybridrl.models.tree_attention import Paths
from hybridrl.models.work import Work
from hybridrl.utils import device


@dataclass(slots=True)
class TreeLayout(MicroBatchLayout):
    """A flat row `[1, L]`. `selected` and `labels` have one entry for each node `[U]` that is a response token.

    Attributes:
        paths: for the attention.
        node_of_token: `[N]` the node of each response token of the micro-batch's rows.
        holders: `[L]` how many rows hold each token; in main memory.
    """

    paths: Paths | None = None
    node_of_token: torch.Tensor | None = None
    holders: torch.Tensor | None = None

    def row_counts(self) -> torch.Tensor:
        assert self.holders is not None
        return self.holders

    def to(self, target: torch.device) -> TreeLayout:
        if target.type == "cpu":
            return self
        names = ("input_ids", "position_ids", "selected", "labels", "node_of_token")
        return replace(self, **{name: getattr(self, name).to(target, non_blocking=True) for name in names})

    def part(self, own: MicroBatchLayout) -> TreeLayout:
        """This micro-batch with one rank's part of its tokens, where ranks share sequences."""
        assert self.paths is not None and own.lengths is not None
        paths = self.paths.padded(sum(own.lengths) - self.input_ids.shape[1])
        return TreeLayout(
            own.input_ids,
            own.position_ids,
            own.selected,
            own.labels,
            None,
            paths=paths,
            node_of_token=self.node_of_token,
        )

    def of_rows(self, of_nodes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Outputs `[U]` of nodes as outputs `[N]` of the rows' response tokens."""
        assert self.node_of_token is not None
        return {name: tensor.index_select(0, self.node_of_token) for name, tensor in of_nodes.items()}


class PrefixPlan(BatchPlan):
    """A plan whose micro-batches are prefix trees. Rows that share a prefix are in the same one where limits allow.

    Both limits of `micro` hold; `max_tokens` counts the tokens of the tree. The micro-batches are in the order of their
    work, as those of packed rows are.

    Attributes:
        row_tokens: tokens of the rows in micro-batches.
        work: what they cost the model.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], micro: MicroBatching, work: Work | None = None):
        super().__init__(tensors, micro, packed=False)
        # A stable sort of "is padding" moves the real tokens to the left and keeps their order.
        width = max(1, *self.lengths) if self.lengths else 1
        order = torch.argsort((~self.attention).to(torch.uint8), dim=1, stable=True)[:, :width]
        self._ids = self.input_ids.gather(1, order)
        positions = self.ranks if self.positions is None else self.positions
        kinds = positions.reshape(self.batch_size, -1, self.width).transpose(1, 2)  # [B, S, k]
        self._positions = kinds.gather(1, order[..., None].expand(-1, -1, kinds.shape[-1]))
        # Where positions count tokens, equal prefixes have equal positions.
        words = self._ids if self.positions is None else torch.cat([self._ids[..., None], self._positions], -1)
        rows = [row for row, count in enumerate(self.token_counts) if count]
        self._order = PrefixOrder.of(words, self.lengths, rows)
        self._together = micro.rows_together
        self._cut_order = self._order if self._together == 1 else self._order.in_units(self._together)
        self.work, self._size = work or Work(), micro.size or len(rows)
        self._costs: dict[int, float] = {}  # by the length of a row
        kind = device.get_device_name()
        self._set_groups(
            partition(
                self._cut_order,
                self._size,
                micro.max_tokens,
                PREFERRED_CELLS[kind],
                WORTHWHILE_PADDING[kind],
                cost=self._cost,
                together=self._together,
            )
        )
        self.row_tokens = sum(self._order.lengths)

    def _set_groups(self, groups: Sequence[list[int]]) -> None:
        if self._together > 1:  # rows that stay together keep their order
            groups = [sorted(rows) for rows in groups]
        self.groups = sorted(groups, key=lambda rows: -self._cost_of(rows))

    def _cost(self, length: int) -> float:
        """Return the cost of a row with `length` tokens, in tokens without attention."""
        if length not in self._costs:
            self._costs[length] = self.work.of(length) / self.work.per_token
        return self._costs[length]

    def _cost_of(self, rows: Sequence[int]) -> float:
        """Return the cost of the tree of these rows, in tokens without attention."""
        order = self._order.only(rows)
        return sum(self._cost(n) - self._cost(shared) for n, shared in zip(order.lengths, order.shared, strict=True))

    def balance(self, count: int) -> None:
        """Re-split the rows into at most `count` micro-batches, so that the most expensive one costs less.

        This cuts families of rows, so tokens may be computed twice. It is done where the largest micro-batch gets
        smaller by more than what is computed in addition.

        Args:
            count: at least the number of micro-batches that there are.
        """
        cut = even_partition(
            self._cut_order, count, self._size, self._micro.max_tokens, self._cost, together=self._together
        )
        if not cut or not self.groups:
            return
        before, after = ([self._cost_of(rows) for rows in groups] for groups in (self.groups, cut))
        if max(before) - max(after) > sum(after) - sum(before):
            self._set_groups(cut)

    @property
    def computed_tokens(self) -> int:
        """Tokens of the trees of all micro-batches."""
        return sum(map(self.tokens, self.groups))

    @property
    def shared_tokens(self) -> float:
        """The share of the rows' tokens that are not computed, because another row's are the same."""
        return 1 - self.computed_tokens / self.row_tokens if self.row_tokens else 0.0

    def flops(self, layouts: Sequence[MicroBatchLayout]) -> tuple[float, float]:
        """FLOPs of a forward pass over the micro-batches, and those of separate rows.

        They are counted as `hybridrl.models.work` counts FLOPs; one whose tokens another row has computed needs none.

        Args:
            layouts: of the micro-batches, of which dummies do not count.
        """
        trees = [layout for layout in layouts if isinstance(layout, TreeLayout) and layout.node_of_token is not None]
        orders = [self._order.only(rows) for rows in self.groups]
        lengths = [n for order in orders for n in order.lengths]
        new = [n - shared for order in orders for n, shared in zip(order.lengths, order.shared, strict=True)]
        nodes = sum(len(layout.selected) for layout in trees)
        outputs = sum(len(layout.node_of_token) for layout in trees if layout.node_of_token is not None)
        work = self.work
        return (
            2.0 * (work.of_squares(lengths, new) + nodes * work.per_output),
            2.0 * (work.of_squares(lengths) + outputs * work.per_output),
        )

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens of the prefix tree of these rows."""
        return self._order.only(rows).tokens

    def layout(self, rows: Sequence[int]) -> TreeLayout:
        order = self._order.only(rows)
        tree = PrefixTree.of(order)
        ids = np.empty(tree.tokens, dtype=np.int64)
        parents = np.zeros(tree.tokens, dtype=np.int64)
        positions = np.empty((tree.tokens, self._positions.shape[-1]), dtype=np.int64)
        own_ids, own_positions = self._ids.numpy(), self._positions.numpy()
        for row, path in zip(order.rows, tree.paths, strict=True):
            ids[path] = own_ids[row, : len(path)]
            positions[path] = own_positions[row, : len(path)]
            parents[path[1:]] = path[:-1]
        path_of = dict(zip(order.rows, tree.paths, strict=True))
        start = self.width - self.response_width
        # A response token's node; the token before it on the path predicts it.
        ranks, mask = self.ranks[:, start:].numpy(), self.response_mask.numpy()
        nodes = [path_of[row][ranks[row][mask[row]]] for row in rows]
        unique_nodes, node_of_token = np.unique(np.concatenate(nodes), return_inverse=True)
        kinds = torch.from_numpy(positions).T[:, None]  # [k, 1, L]
        return TreeLayout(
            input_ids=torch.from_numpy(ids)[None],
            position_ids=kinds if self.positions is not None and self.positions.ndim == 3 else kinds[0],
            selected=torch.from_numpy(parents[unique_nodes]),
            labels=torch.from_numpy(ids[unique_nodes]),
            lengths=None,
            paths=Paths.of(tree),
            node_of_token=torch.from_numpy(node_of_token),
            holders=torch.from_numpy(np.bincount(np.concatenate(tree.paths), minlength=tree.tokens)),
        )


def small_tree() -> TreeLayout:
    """The tree of two rows of two tokens, of which they share the first."""
    ids, ones = torch.tensor([[0, 0], [0, 1]]), torch.ones(2, 2, dtype=torch.int64)
    tensors = {"input_ids": ids, "attention_mask": ones, "responses": ids[:, 1:], "response_mask": ones[:, 1:]}
    return PrefixPlan(tensors, MicroBatching()).layout([0, 1])
