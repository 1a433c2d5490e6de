"""The models behind the entries of `llms`: the policy, models in this process, and models behind an endpoint."""
