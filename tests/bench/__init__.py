"""scripts/bench and scripts/target-ongoing-requests."""
