"""What several tests need: real processes that always stop, and models for them."""
