"""What each Triton model does with its requests: arrays in, arrays out, through an engine or the
orchestrator."""
