"""Operations on one committed checkpoint or one run outside of training: evaluate, offer, sweep."""
