"""The models behind the entries of `llms`, listed in `registry.py`: the policy, models here and behind an endpoint."""
