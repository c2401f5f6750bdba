"""What must hold of sessions with images: what was sampled and seen is what is trained on."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from hybridrl.engine.microbatch import MicroBatching
from hybridrl.protocol import DataProto


def check_seen(engine: Any, model: Path, batch: DataProto, expected: list) -> None:
    """The images of each row are the expected ones, and the sampler's log-probabilities those of transformers' own
    model, which computes the positions itself, and of the trainer.
    """
    fields, columns = batch.batch, batch.non_tensor_batch
    peer = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    width = fields["prompts"].shape[1]
    for row, images in enumerate(expected):
        real = fields["attention_mask"][row].bool()
        ids, places = fields["input_ids"][row][real][None], fields["image_mask"][row][real][None]
        wanted = dict(processor(images=images, return_tensors="pt")) if images else {}
        found = columns["multi_modal_inputs"][row]
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name])
        assert int(places.sum()) == sum(int(one.prod()) // 4 for one in wanted.get("image_grid_thw", ()))
        assert not (fields["response_mask"][row].bool() & fields["image_mask"][row, width:]).any()
        mask = places if wanted else None
        # the policy may have written the placeholder's id, so images are given one that nothing else has
        unused = min(set(range(peer.config.text_config.vocab_size)) - set(ids[0].tolist()))
        peer.config.image_token_id = unused
        ids = ids.masked_fill(places, unused)
        with torch.no_grad():
            output = peer(input_ids=ids, mm_token_type_ids=None if mask is None else mask.int(), **wanted)
        log_probs = output.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        trained = fields["response_mask"][row].bool()
        count = int(real[width:].sum())
        ours = fields["rollout_log_probs"][row][:count][trained[:count]]
        torch.testing.assert_close(ours, log_probs[-count:][trained[:count]], atol=1e-5, rtol=1e-5)
    generated = fields["response_mask"].bool()
    computed = engine.infer(batch, MicroBatching(size=3), 1.0, {"log_probs"})["log_probs"]
    assert float((computed - fields["rollout_log_probs"])[generated].abs().max()) < 1e-5
