"""What stands behind each door: a call's arrays in, an engine's or orchestrator's work out."""
