"""The trajectory builders, listed in `registry.py`: `group`, `tree`, `dataset`, `dpo_traj_builder`."""
