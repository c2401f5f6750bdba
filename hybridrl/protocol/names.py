"""Names of columns that several packages share."""

#: non-tensor: the reward that came with the trajectory; if None, the reward function scores the row
TRAJECTORY_REWARD = "trajectory_reward"
