"""What a rollout worker does: episodes, groups with their rewards, and the process that runs them."""
