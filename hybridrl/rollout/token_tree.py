"""The calls of one session, linked by their tokens: what continues what, and where a history was rewritten.

A call continues an earlier one if its prompt begins with exactly the tokens of that call's prompt and completion, and
has the very images among them that the call had. A call that continues none begins a tree of its own, with its own
prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hybridrl.rollout.image_place import ImagePlace
from hybridrl.rollout.request import Completion


@dataclass(eq=False)
class Turn:
    """One call.

    Attributes:
        index: its number in the session.
        parent: the call that it continues; None begins a conversation.
        between: tokens of its prompt that follow the parent's tokens; without a parent, the whole prompt.
        completion: what was generated.
        end: tokens of its prompt and its completion together.
        images: of its prompt, in order.
        children: the calls that continue it.
    """

    index: int
    parent: "Turn | None"
    between: list[int]
    completion: Completion
    end: int
    images: tuple[ImagePlace, ...] = ()
    children: list["Turn"] = field(default_factory=list)

    @property
    def path(self) -> "list[Turn]":
        """The calls from the beginning of the conversation to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens before its completion."""
        whole = self.token_ids
        return whole[: len(whole) - len(self.completion.token_ids)]

    @property
    def token_ids(self) -> list[int]:
        """The tokens of its prompt and its completion."""
        return [token for turn in self.path for token in (*turn.between, *turn.completion.token_ids)]


@dataclass(frozen=True)
class Branch:
    """The calls from the beginning of a conversation to one that nothing continues.

    Attributes:
        turns: the calls.
        prompt_ids: the prompt of the first.
        token_ids: every token after it.
        mask: 1 for generated tokens that belong to no earlier branch of the session.
    """

    turns: tuple[Turn, ...]
    prompt_ids: list[int]
    token_ids: list[int]
    mask: list[int]


class TokenTree:
    """The calls of a session, in the order in which they were answered."""

    def __init__(self, calls: Iterable[tuple[Sequence[int], Completion]] = ()) -> None:
        self.turns: list[Turn] = []
        self._roots: list[Turn] = []
        for prompt_ids, completion in calls:
            self.add(prompt_ids, completion)

    def add(self, prompt_ids: Sequence[int], completion: Completion, images: Sequence[ImagePlace] = ()) -> Turn:
        """Note a call; it continues the call that has most of its tokens, of equal ones the latest.

        Args:
            images: of the prompt, in order.
        """
        parent = self.continued_by(prompt_ids, images)
        prefix_length = 0 if parent is None else parent.end
        end = len(prompt_ids) + len(completion.token_ids)
        turn = Turn(len(self.turns), parent, list(prompt_ids[prefix_length:]), completion, end, tuple(images))
        self.turns.append(turn)
        (self._roots if parent is None else parent.children).append(turn)
        return turn

    def continued_by(self, prompt_ids: Sequence[int], images: Sequence[ImagePlace] = ()) -> Turn | None:
        """The call that a prompt with these images continues."""
        ids = list(prompt_ids)
        best: Turn | None = None
        waiting = [(turn, 0) for turn in self._roots]
        while waiting:
            turn, start = waiting.pop()
            middle = start + len(turn.between)
            if turn.end > len(ids) or ids[start:middle] != turn.between:
                continue
            if ids[middle : turn.end] != turn.completion.token_ids:
                continue
            if turn.images != tuple(image for image in images if image.first < turn.end):
                continue
            if best is None or (turn.end, turn.index) > (best.end, best.index):
                best = turn
            waiting += [(child, turn.end) for child in turn.children]
        return best

    def generated_after(self, prompt_ids: Sequence[int], images: Sequence[ImagePlace] = ()) -> int:
        """Return the number of tokens of a prompt after the first prompt of its conversation."""
        turn = self.continued_by(prompt_ids, images)
        return 0 if turn is None else len(prompt_ids) - len(turn.path[0].between)

    def branches(self) -> list[Branch]:
        """The conversations of the session. Each generated token has a mask of 1 in exactly one of them.

        Branches come in the order of their last calls. Where several share calls, the first has them; a branch of which
        nothing is left is not listed.
        """
        branches, assigned = [], set[int]()
        for leaf in self.turns:
            if leaf.children:
                continue
            path = leaf.path
            token_ids: list[int] = []
            mask: list[int] = []
            for number, turn in enumerate(path):
                between = turn.between if number else []
                completion = turn.completion.token_ids
                token_ids += [*between, *completion]
                mask += [0] * len(between) + [0 if turn.index in assigned else 1] * len(completion)
                assigned.add(turn.index)
            if any(mask):
                branches.append(Branch(tuple(path), list(path[0].between), token_ids, mask))
        return branches
