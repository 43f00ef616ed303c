"""What several tests share: tiny models, attention cases, an engine over tiny weights."""
