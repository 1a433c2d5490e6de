"""What of verifiers 0.4 the adapter uses, written anew: harnesses reach the policy through a server of the trace."""
