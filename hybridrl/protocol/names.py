"""Names of columns that several packages share."""

#: non-tensor: the reward that came with the trajectory; if None, the reward function scores the row
TRAJECTORY_REWARD = "trajectory_reward"
#: tensor [B, T]: rewards of turns, at the last generated token of each; they are part of `token_level_scores`
TURN_LEVEL_REWARDS = "turn_level_rewards"
#: tensor [B, T] int32: at the last token of a turn, a number above 0 that identifies the situation before it; else 0
TURN_STATES = "turn_states"
#: tensor [B, S, L, K]: the experts of each token; in the meta of prompts, whether the rollout is to return it
ROUTED_EXPERTS = "routed_experts"
#: in the meta of prompts and of their answer: how often these samples were asked for before; missing for 0
ATTEMPT = "attempt"
#: in the meta of a generated batch: an `UnscoredSample` for each attempt at a sample that gave none
MISSING_SAMPLES = "missing_samples"
#: in the meta of a batch after its step: a `GroupScore` for each prompt that was scored for it
SCORED_GROUPS = "scored_groups"
#: in the meta of answers that brought rewards along: names of the columns that are the data's
DATA_COLUMNS = "data_columns"
#: non-tensor: what the model reads of the images of a row, `{"pixel_values", "image_grid_thw"}`; `{}` without any
MULTI_MODAL_INPUTS = "multi_modal_inputs"
#: non-tensor: the files of a row's images as (media type, bytes), where gateway agents send them
IMAGE_FILES = "image_files"
#: tensor [B, S] bool: the tokens of images, where the rollout says which they are; elsewhere every placeholder of a
#: prompt is one
IMAGE_MASK = "image_mask"
#: non-tensor: fingerprint of the images that a row's response was generated from
IMAGE_DIGEST = "image_digest"
#: non-tensor: `multi_modal_inputs` of the data's row that was answered, where a session may have more images
PROMPT_IMAGES = "prompt_images"
#: non-tensor: messages, generations and tool calls of a session (`SessionLog.record`), at its first row; else None
SESSION_LOG = "session_log"
