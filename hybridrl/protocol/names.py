"""Names of columns that several packages share."""

#: non-tensor: the reward that came with the trajectory; if None, the reward function scores the row
TRAJECTORY_REWARD = "trajectory_reward"
#: tensor [B, S, L, K]: the experts of each token; in the meta of prompts, whether the rollout is to return it
ROUTED_EXPERTS = "routed_experts"
#: in the meta of prompts and of their answer: how often these samples were asked for before; missing for 0
ATTEMPT = "attempt"
#: in the meta of a generated batch: a `MissingSample` for each attempt at a sample that gave none
MISSING_SAMPLES = "missing_samples"
#: non-tensor: what the model reads of the images of a row, `{"pixel_values", "image_grid_thw"}`; `{}` without any
MULTI_MODAL_INPUTS = "multi_modal_inputs"
#: non-tensor: fingerprint of the images that a row's response was generated from
IMAGE_DIGEST = "image_digest"
