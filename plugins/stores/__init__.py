"""State stores: where states are kept below RAM, across restarts."""
