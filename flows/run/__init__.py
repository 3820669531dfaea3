"""One run's stages inside the flow: opening, attempts, promotion, and what a person sees meanwhile."""
