"""Training: train state, one optimizer step, deferred metrics, the loop, and several processes."""
