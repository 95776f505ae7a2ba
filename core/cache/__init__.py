"""The state hierarchy: records, the RAM tier, sessions and their leases, the prefix tree."""
