"""One optimizer step and the loop around it: train state, gradients of several processes, deferred metrics."""
