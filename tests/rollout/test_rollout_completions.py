"""Completions on their way out of a replica: arrays of small types with the values of the engine's lists."""

import pickle

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.protocol import DataProto
from hybridrl.rollout.batch import prompt_ids_of
from hybridrl.rollout.request import Completion, CompletionArrays

TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(max_value=0, width=32)), max_size=9)


@given(TOKENS, st.sampled_from(["stop", "length", "abort"]))
def test_a_completion_comes_back_from_its_arrays(tokens, reason) -> None:
    ids, log_probs = [token for token, _ in tokens], [value for _, value in tokens]
    completion = Completion("r1", ids, log_probs, reason, [(3, len(ids))], cached_tokens=2, image_digest="d")
    arrays = pickle.loads(pickle.dumps(CompletionArrays.of(completion)))
    assert (arrays.token_ids.dtype, arrays.log_probs.dtype) == (np.int32, np.float32)
    assert arrays.lists() == completion
    assert {type(token) for token in arrays.lists().token_ids} <= {int}


def test_a_completion_costs_eight_bytes_per_token() -> None:
    count = 5000
    completion = Completion("r1", list(range(count)), [-0.5] * count, "stop", [(0, count)])
    assert len(pickle.dumps(CompletionArrays.of(completion), protocol=5)) < 8 * count + 1000


@given(st.lists(st.lists(st.integers(1, 99), max_size=5), min_size=1, max_size=5))
def test_prompts_are_read_without_their_padding(prompts) -> None:
    width = max(map(len, prompts)) + 1
    ids = np.array([[0] * (width - len(ids)) + ids for ids in prompts])
    mask = np.array([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    tensors = {"input_ids": ids, "attention_mask": mask}
    batch = DataProto.from_dict({name: torch.from_numpy(array) for name, array in tensors.items()})
    assert prompt_ids_of(batch) == prompts
