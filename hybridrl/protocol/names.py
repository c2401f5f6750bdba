"""Names of columns that several packages share."""

#: non-tensor: the reward that came with the trajectory; if None, the reward function scores the row
TRAJECTORY_REWARD = "trajectory_reward"
#: tensor [B, S, L, K]: the experts of each token; in the meta of prompts, whether the rollout is to return it
ROUTED_EXPERTS = "routed_experts"
#: in the meta of a generated batch: (uid, sample) of each sample that the rollout left out
DROPPED_SAMPLES = "dropped_samples"
