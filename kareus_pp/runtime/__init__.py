"""The session: observe, profile, plan, apply, watch."""
