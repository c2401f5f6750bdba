"""Names of columns that several packages share."""

#: non-tensor: the reward that a trajectory brought along; None leaves the row to the reward function
TRAJECTORY_REWARD = "trajectory_reward"
