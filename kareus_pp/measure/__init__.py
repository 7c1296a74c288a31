"""Learning what every instruction costs from ordinary training steps."""
