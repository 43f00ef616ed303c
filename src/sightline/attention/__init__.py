"""The attention contract: specs, capabilities, selection, planning, the oracle, and the backends."""
